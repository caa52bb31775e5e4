"""What the linen layers share: their variables, read and checked, or drawn."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jax_nmsparse.array import NMSparse
from jax_nmsparse.description import Description
from jax_nmsparse.layer import check_bias, pack, weight

MASK_COLLECTION = "nm_mask"
"""The collection of what no optimiser may touch: the mask, the format, and quantised values."""


def label(module: nn.Module) -> str:
    """What errors call the layer: its class and its place in the model."""
    place = "/".join(module.path) if module.scope is not None else module.name
    return f"{type(module).__name__} {place}" if place else type(module).__name__


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A dense kernel that an initialiser drew.

    Attributes:
      array: ``[*lead, in_features, out_features]``.
      box: What the initialiser returned, if it boxed its result.
      names: Names of the axes of array, where the box is one of `nn.Partitioned`.
    """

    array: jax.Array
    box: Any = None
    names: tuple[Any, ...] = ()

    def box_like(self, array: jax.Array, names: tuple[Any, ...]) -> Any:
        """Boxes an array as the kernel was boxed; names are those of its leading axes."""
        if isinstance(self.box, nn.Partitioned):
            return self.box.replace(value=array, names=(*names, *([None] * (array.ndim - len(names)))))
        return self.box.replace_boxed(array) if isinstance(self.box, nn.meta.AxisMetadata) else array


def drawn(kernel: Any, reshape: Callable[[jax.Array], jax.Array], names: Callable[[Any], tuple[Any, ...]]) -> Drawn:
    """What an initialiser returned, with its array reshaped and its names to match."""
    array = reshape(nn.meta.unbox(kernel))
    return Drawn(array, kernel, names(kernel.names) if isinstance(kernel, nn.Partitioned) else ())


def layer_weight(
    module: Any, description: Description, draw: Callable[[jax.Array], Drawn], *, dense: str, lead: tuple[int, ...] = ()
) -> NMSparse:
    """The weight of a layer: read from its variables and checked, or drawn while the layer is initialised.

    Args:
      module: The layer; it has values_dtype.
      description: What the variables must hold.
      draw: Draws the dense kernel from a key; called with the very key that the dense layer's kernel gets.
      dense: Name of the dense layer's parameter, for the error.
      lead: Sizes of the batch axes.

    Returns:
      The weight, in the dtype that the variables have.
    """
    name, quantised = label(module), module.values_dtype is not None
    trained = "scales" if quantised else "values"
    has_params, has_mask = module.has_variable("params", trained), module.has_variable(MASK_COLLECTION, "mask")
    if not has_params and module.has_variable("params", dense):
        raise ValueError(
            f"{name}: params holds a dense '{dense}', expected '{trained}'; convert it with "
            f"{type(module).__name__}.from_dense(params, pattern)"
        )
    if has_params and not has_mask:
        raise ValueError(
            f"{name}: the variables hold params/{trained} but no {MASK_COLLECTION}/mask; pass both collections to "
            "apply, and name both in variable_axes of nn.scan and nn.vmap"
        )
    if not has_params:
        if has_mask and module.is_mutable_collection("params"):
            raise ValueError(f"{name}: there is a mask already, expected none while values are initialised")
        if module.is_mutable_collection("params") and not module.is_mutable_collection(MASK_COLLECTION):
            raise ValueError(
                f"{name}: collection '{MASK_COLLECTION}' cannot be written while the layer is initialised; name it "
                "beside 'params' in variable_axes of nn.scan and nn.vmap and in mutable of init"
            )
        return _initialised(module, description, draw, lead)
    constants = module.variables[MASK_COLLECTION]
    description.check(name, nn.meta.unbox(constants).get("format", {}))
    arrays = {trained: module.get_variable("params", trained), "mask": constants["mask"]}
    if quantised:
        if "values" not in constants:
            raise ValueError(f"{name}: the variables hold no {MASK_COLLECTION}/values, expected quantised values")
        arrays["values"] = constants["values"]
    description.check_arrays(
        name,
        nn.meta.unbox(arrays),
        lead,
        ", or of stacked layers, which nn.scan and nn.vmap slice where variable_axes names both collections, "
        f"'params' and '{MASK_COLLECTION}'",
    )
    # Through param and variable rather than straight from the collections, so that Flax knows of them.
    first = module.param(trained, lambda key: nn.meta.unbox(arrays[trained]))
    mask = module.variable(MASK_COLLECTION, "mask").value
    values = module.variable(MASK_COLLECTION, "values").value if quantised else first
    return weight(description, values, mask, first if quantised else None)


def _initialised(module: Any, description: Description, draw: Callable[[jax.Array], Drawn], lead) -> NMSparse:
    made: list[tuple[NMSparse, Drawn]] = []

    def init(key):
        kernel = draw(key)
        w = pack(kernel.array, description.pattern, values_dtype=module.values_dtype)
        made.append((w, kernel))
        if w.scales is None:
            return kernel.box_like(w.values, kernel.names)
        return kernel.box_like(w.scales, (*kernel.names[:-2], *kernel.names[-1:]))

    first = module.param("values" if module.values_dtype is None else "scales", init)
    w, kernel = made[0]
    mask = module.variable(MASK_COLLECTION, "mask", lambda: kernel.box_like(w.mask, kernel.names)).value
    module.variable(MASK_COLLECTION, "format", lambda: {str(description): jnp.zeros(lead, jnp.uint32)})
    if w.scales is None:
        return weight(description, first, mask, None)
    values = module.variable(MASK_COLLECTION, "values", lambda: kernel.box_like(w.values, kernel.names)).value
    return weight(description, values, mask, first)


# Conversion.


def variables_of(w: NMSparse, description: Description, bias: Any) -> dict[str, dict[str, Any]]:
    """The variables of a layer that holds a given weight."""
    check_bias(bias, w, description.out_sizes)
    constants: dict[str, Any] = {"mask": w.mask, "format": {str(description): jnp.zeros(w.shape[:-2], jnp.uint32)}}
    if w.scales is None:
        params = {"values": w.values}
    else:
        params, constants["values"] = {"scales": w.scales}, w.values
    return {"params": params if bias is None else {**params, "bias": bias}, MASK_COLLECTION: constants}


def stored_description(variables: Mapping[str, Any]) -> Description:
    """What the variables of one layer say that they hold.

    Raises:
      ValueError: Where they are not those of a layer of this package.
    """
    params, constants = (variables.get(name, {}) for name in ("params", MASK_COLLECTION))
    stored = Description.parse("to_weight", constants.get("format", {}))
    if stored is None or "mask" not in constants or not ("values" in params or "scales" in params):
        found = sorted(f"{c}/{name}" for c in variables for name in variables[c])
        raise ValueError(
            f"to_weight: the variables hold {found}, expected those of one N:M sparse layer: params/values, "
            f"{MASK_COLLECTION}/mask and {MASK_COLLECTION}/format"
        )
    return stored


def to_weight(variables: Mapping[str, Any]) -> NMSparse:
    """The weight in the variables of one layer (or of stacked layers), the inverse of ``from_weight``.

    Raises:
      ValueError: Where the variables are not those of an N:M sparse layer, or their shapes disagree.
    """
    variables = nn.meta.unbox(variables)
    stored = stored_description(variables)
    params, constants = variables["params"], variables[MASK_COLLECTION]
    scales = params.get("scales")
    return weight(stored, params["values"] if scales is None else constants["values"], constants["mask"], scales)


def bound_weight(module: nn.Module, description: Callable[[Description], Description]) -> NMSparse:
    """The weight of a bound module; description gives what it must be, where the variables leave sizes open."""
    variables = nn.meta.unbox(module.variables)
    stored = stored_description(variables)
    description(stored).check(label(module), variables[MASK_COLLECTION]["format"])
    return to_weight(variables)


def dense_params(params: Mapping[str, Any], kernel: str, optional: tuple[str, ...], layer: str) -> Mapping[str, Any]:
    """The parameters of one dense layer, out of ``{"params": ...}`` where they come with it."""
    params = nn.meta.unbox(params)
    params = params["params"] if set(params) == {"params"} else params
    if kernel not in params or set(params) - {kernel, *optional}:
        expected = " and ".join(f"'{name}'" for name in (kernel, *optional))
        raise ValueError(
            f"from_dense: params holds {sorted(params)}, expected {expected} of one {layer}; sparsify converts a model"
        )
    return params
