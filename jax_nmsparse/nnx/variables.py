"""What the NNX layers share: their variables, made and read.

A layer has pattern, values_dtype, param_dtype, dtype, promote_dtype, precision and implementation, and the variables
values, mask, scales and format.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike

from jax_nmsparse.array import NMSparse
from jax_nmsparse.description import Description
from jax_nmsparse.layer import multiply, pack, weight


@nnx.register_variable_name("nm_mask")
class NMMask(nnx.Variable):
    """What no optimiser may touch: the mask, the format, and quantised values.

    It is no `nnx.Param`, so ``nnx.grad`` and ``nnx.Optimizer(..., wrt=nnx.Param)`` pass over it. Its collection in
    linen is "nm_mask" too.
    """


class NMFormat(nnx.Module):
    """Holds one empty variable whose name is the `Description` of a layer, and refuses a second one.

    So a state of another pattern or size cannot be written into a layer by `nnx.update`, nor restored into its
    abstract state.
    """

    def __init__(self, description: Description, lead: tuple[int, ...] = ()) -> None:
        setattr(self, str(description), NMMask(jnp.zeros(lead, jnp.uint32)))

    def names(self) -> list[str]:
        return [name for name in vars(self) if not name.startswith("_")]

    def __setattr__(self, name: str, value: Any) -> None:
        held = Description.parse("NMFormat", self.names())
        if held is not None and not name.startswith("_"):
            held.check("update", [name])
        super().__setattr__(name, value)


def initialised(result: Any, shape: tuple[int, ...], metadata: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """What an initialiser returned, in a shape, and metadata with what came with it."""
    if not isinstance(result, nnx.VariableMetadata):
        return result if isinstance(result, NMSparse) else result.reshape(shape), dict(metadata)
    return result.raw_value.reshape(shape), {**metadata, **result.metadata}


def hold(layer: Any, kernel: jax.Array | NMSparse, description: Description, metadata: Mapping[str, Any]) -> None:
    """Gives the layer its variables.

    Args:
      layer: The layer.
      kernel: Dense ``[*lead, in_features, out_features]``, or the weight itself.
      description: What the weight is.
      metadata: Of the trained variable; out_sharding names the axes of kernel.
    """
    w = kernel if isinstance(kernel, NMSparse) else pack(kernel, layer.pattern, values_dtype=layer.values_dtype)
    names = metadata.get("out_sharding")
    context = {key: metadata[key] for key in ("sharding_rules", "mesh") if key in metadata}

    def constant(array: jax.Array) -> NMMask:
        named = {} if names is None else {**context, "out_sharding": _padded(names, array.ndim)}
        # nnx.merge pairs variables by their order: what the mask is goes with it.
        return NMMask(array, **named, description=str(description))

    def trained(array: jax.Array, names: Any) -> nnx.Param:
        named = {} if names is None else {"out_sharding": _padded(names, array.ndim)}
        return nnx.Param(array, **{**metadata, **named})

    layer.mask = constant(w.mask)
    if w.scales is None:
        layer.values, layer.scales = trained(w.values, names), nnx.data(None)
    else:
        layer.values = constant(w.values)
        layer.scales = trained(w.scales, names and (*names[:-2], names[-1]))
    layer.format = NMFormat(description, w.shape[:-2])


def _padded(names: tuple[Any, ...], ndim: int) -> tuple[Any, ...]:
    return (*names, *(None,) * (ndim - len(names)))


def held(layer: Any, description: Description, lead: tuple[int, ...] | None = None) -> NMSparse:
    """The weight in the variables of a layer, checked against the module and against what they say themselves.

    Args:
      layer: The layer.
      description: What the module expects.
      lead: Sizes of the batch axes; by default any, those of stacked layers.
    """
    label = type(layer).__name__
    description.check(label, layer.format.names())
    description.check(label, filter(None, [layer.mask.get_metadata("description", None)]))
    arrays = {"values": layer.values[...], "mask": layer.mask[...]}
    if layer.scales is not None:
        arrays["scales"] = layer.scales[...]
    lead = tuple(arrays["values"].shape[:-5]) if lead is None else lead
    remedy = ", or of stacked layers, which nnx.scan and nnx.vmap slice"
    description.check_arrays(label, arrays, lead, remedy)
    return weight(description, arrays["values"], arrays["mask"], arrays.get("scales"))


def product(layer: Any, x: ArrayLike, w: NMSparse, bias: jax.Array | None, **options: Any) -> jax.Array:
    """``act(x W + bias)`` in the dtype that x, values and bias promote to."""

    def promote(*arrays):
        return layer.promote_dtype(arrays, dtype=layer.dtype)

    return multiply(layer, promote, x, w, bias, **options)


def placed(y: jax.Array, out_sharding: Any) -> jax.Array:
    """The result on the mesh as the caller asks."""
    return y if out_sharding is None else jax.sharding.reshard(y, out_sharding)


def taken(w: NMSparse) -> dict[str, Any]:
    """Arguments of a layer's constructor that takes a weight instead of drawing one."""
    return {"pattern": w.pattern, "values_dtype": None if w.scales is None else w.dtype, "rngs": nnx.Rngs(0)}


def inherited(layer: Any, *names: str) -> dict[str, Any]:
    """The arguments that dense and sparse layers have in common, from their attributes of the same names."""
    return {name: getattr(layer, name) for name in ("dtype", "param_dtype", "promote_dtype", *names)}
