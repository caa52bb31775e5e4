"""`NMSparseLinear`: `flax.nnx.Linear` with an N:M sparse kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes

from jax_nmsparse import ops
from jax_nmsparse.array import NMSparse, check_pattern
from jax_nmsparse.description import Description
from jax_nmsparse.pattern import NMPattern
from jax_nmsparse.pruning import prune
from jax_nmsparse.quantization import quantize

_default_kernel_init = nnx.initializers.lecun_normal()
_default_bias_init = nnx.initializers.zeros_init()


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
        return [name for name, value in vars(self).items() if isinstance(value, NMMask)]

    def __setattr__(self, name: str, value: Any) -> None:
        old = self.names()
        if isinstance(value, NMMask) and old and name not in old:
            described = Description.parse("the layer", old)
            assert described is not None  # pyright: there is a name
            described.check("NMFormat", [name])
        super().__setattr__(name, value)


class NMSparseLinear(nnx.Module):
    """`flax.nnx.Linear` with an N:M sparse kernel: ``y = act(x W + bias)``.

    Arguments, promotion of dtypes and initial values are those of `nnx.Linear` (the kernel is drawn dense by
    kernel_init at ``[in_features, out_features]`` and pruned by magnitude). There is no ``dot_general`` and no
    ``out_sharding``: a product with a packed kernel takes neither.

    Variables, for one layer (`nnx.vmap` over the constructor puts axes in front of all of them):

    * ``values``: `nnx.Param`, float ``[windows, out_blocks, q, bk, bn]``, the kept units (see `NMSparse`);
    * ``bias``: `nnx.Param`, ``[out_features]``, or None;
    * ``mask``: `NMMask`, uint32, which units are kept;
    * ``format``: format version, pattern, block and sizes, in the name of an empty variable: every state of the layer
      says what it holds, and one of another pattern or size cannot be restored into it.

    With values_dtype they are quantised: ``values`` is an `NMMask`, and ``scales`` an `nnx.Param`, float32
    ``[out_features]``. Otherwise scales is None.

    Args:
      in_features: Size of the last axis of x.
      out_features: Size of the last axis of y.
      use_bias: Whether to add a bias.
      dtype: dtype of the computation; by default that which x and the parameters promote to.
      param_dtype: dtype that values and bias are initialised in.
      precision: As in `jnp.dot`.
      kernel_init: Initialiser of the dense kernel; may be wrapped in `nnx.with_partitioning` with the axes (in, out).
        Where it returns an `NMSparse`, that is the weight.
      bias_init: Initialiser of the bias.
      promote_dtype: Casts (x, values, bias) to the dtype of the computation.
      preferred_element_type: As in `spmm`.
      rngs: The random numbers; ``rngs.params()`` is drawn from exactly as `nnx.Linear` does.
      kernel_metadata: Metadata of values. Names in ``out_sharding`` are those of the axes (in, out); mask and scales
        get theirs from it.
      bias_metadata: Metadata of bias.
      pattern: The `NMPattern`, or a string such as "2:4". Groups run along in_features.
      activation: None, "relu", "gelu" (exact), "gelu_tanh" or "silu", computed in the epilogue of the product.
      implementation: As in `spmm`.
      values_dtype: None, or int8 or float8_e4m3fn for quantised values.

    Raises:
      ValueError: Where variables and module do not fit together.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jax_nmsparse.nnx import NMSparseLinear
      >>> layer = NMSparseLinear(64, 48, pattern="2:4", activation="relu", rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((3, 64))).shape
      (3, 48)
      >>> layer.weight
      NMSparse(64x48, 2:4, float32)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        precision: Any = None,
        kernel_init: Callable[..., Any] = _default_kernel_init,
        bias_init: Callable[..., Any] = _default_bias_init,
        promote_dtype: Callable[..., Any] = dtypes.promote_dtype,
        preferred_element_type: Any = None,
        rngs: nnx.Rngs,
        kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
        pattern: NMPattern | str,
        activation: str | None = None,
        implementation: str | None = None,
        values_dtype: Any = None,
    ) -> None:
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = use_bias
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.promote_dtype = promote_dtype
        self.preferred_element_type = preferred_element_type
        self.pattern = check_pattern("NMSparseLinear", pattern)
        self.activation = activation
        self.implementation = implementation
        self.values_dtype = values_dtype
        kernel = kernel_init(rngs.params(), (in_features, out_features), param_dtype)
        hold_kernel(self, kernel, self._description, kernel_metadata)
        bias = bias_init(rngs.params(), (out_features,), param_dtype) if use_bias else None
        self.bias = nnx.data(None) if bias is None else nnx.Param(bias, **bias_metadata)

    @property
    def _description(self) -> Description:
        return Description(self.pattern, (self.in_features,), (self.out_features,))

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Applies the layer along the last axis of inputs, ``[..., in_features]``, giving ``[..., out_features]``."""
        bias = None if self.bias is None else self.bias[...]
        return multiply(self, self._description, inputs, bias)

    @property
    def weight(self) -> NMSparse:
        """The weight that the layer holds, with the batch axes of stacked layers in front.

        Raises:
          ValueError: Where the variables are those of another pattern or size.
        """
        return held_weight(self, self._description)

    @classmethod
    def from_weight(cls, w: NMSparse, bias: Any = None, **options: Any) -> NMSparseLinear:
        """A layer that holds a given weight.

        Args:
          w: The weight; leading axes are those of stacked layers.
          bias: None, or ``[..., out_features]``.
          **options: As in the constructor.

        Returns:
          The layer; its arrays are those of w, not copies.

        Example:
          >>> import jax.numpy as jnp, jax_nmsparse as nms
          >>> from jax_nmsparse.nnx import NMSparseLinear
          >>> NMSparseLinear.from_weight(nms.NMSparse.fromdense(jnp.eye(4), "1:4"))(jnp.arange(4.0))
          Array([0., 1., 2., 3.], dtype=float32)
        """
        if not isinstance(w, NMSparse):
            raise TypeError(f"from_weight: w is a {type(w).__name__}, expected an NMSparse; from_dense prunes a layer")
        check_bias("from_weight", bias, (*w.shape[:-2], w.out_features))
        return cls(
            w.in_features,
            w.out_features,
            use_bias=bias is not None,
            kernel_init=lambda *_: w,
            bias_init=lambda *_: bias,
            rngs=nnx.Rngs(0),
            pattern=w.pattern,
            values_dtype=None if w.scales is None else w.dtype,
            **options,
        )

    @classmethod
    def from_dense(
        cls,
        linear: nnx.Linear,
        pattern: NMPattern | str,
        *,
        scores: Any = None,
        exact: bool = False,
        values_dtype: Any = None,
        **options: Any,
    ) -> NMSparseLinear:
        """The layer that replaces a trained `nnx.Linear`; runs under `nnx.jit` too, except with exact.

        Args:
          linear: The layer; leading axes of its variables are those of stacked layers.
          pattern: The pattern, or a string such as "2:4".
          scores: As in `prune`: scores or a boolean mask of the kernel's shape; by default magnitude.
          exact: The kernel satisfies the pattern already; raise where it does not, rather than drop weights.
          values_dtype: None, or int8 or float8_e4m3fn to quantise.
          **options: Other arguments of the constructor, such as activation; dtype, precision and the like are those of
            linear.

        Returns:
          The layer. Nothing of it refers to the dense kernel.

        Raises:
          TypeError, ValueError: As `prune` and `NMSparse.fromdense`.

        Example:
          >>> import jax.numpy as jnp
          >>> from flax import nnx
          >>> from jax_nmsparse.nnx import NMSparseLinear
          >>> trained = nnx.Linear(64, 48, rngs=nnx.Rngs(0))
          >>> NMSparseLinear.from_dense(trained, "8:32")(jnp.ones((3, 64))).shape
          (3, 48)
        """
        if not isinstance(linear, nnx.Linear):
            raise TypeError(f"from_dense: the layer is a {type(linear).__name__}, expected an nnx.Linear")
        w = pack_kernel(linear.kernel[...], pattern, scores=scores, exact=exact, values_dtype=values_dtype)
        bias = None if linear.bias is None else linear.bias[...]
        return cls.from_weight(w, bias, **{**inherited(linear), **options})

    def to_dense(self) -> nnx.Linear:
        """The `nnx.Linear` that computes the same, but for the activation.

        Example:
          >>> from flax import nnx
          >>> from jax_nmsparse.nnx import NMSparseLinear
          >>> NMSparseLinear(64, 48, pattern="2:4", rngs=nnx.Rngs(0)).to_dense().kernel.shape
          (64, 48)
        """
        kernel, bias = self.weight.todense(), None if self.bias is None else self.bias[...]
        return nnx.Linear(
            self.in_features,
            self.out_features,
            use_bias=self.use_bias,
            kernel_init=lambda *_: kernel,
            bias_init=lambda *_: bias,
            rngs=nnx.Rngs(0),
            **inherited(self),
        )


# What the layers of this package share. A layer has pattern, values_dtype, dtype, promote_dtype, precision,
# preferred_element_type, activation and implementation, and the variables values, mask, scales and format.


def inherited(layer: Any) -> dict[str, Any]:
    """The arguments that dense and sparse layers have in common and keep as attributes."""
    names = ("dtype", "param_dtype", "precision", "promote_dtype", "preferred_element_type")
    return {name: getattr(layer, name) for name in names}


def pack_kernel(
    kernel: jax.Array, pattern: NMPattern | str, *, scores: Any, exact: bool, values_dtype: Any
) -> NMSparse:
    """A dense kernel ``[..., in_features, out_features]`` as a weight."""
    if exact and scores is not None:
        raise ValueError("from_dense: scores choose what to drop, exact=True drops nothing; give one of them")
    pattern = check_pattern("from_dense", pattern)
    w = NMSparse.fromdense(kernel, pattern) if exact else prune(kernel, pattern, scores=scores)
    return w if values_dtype is None else quantize(w, values_dtype)


def check_bias(op: str, bias: Any, expected: tuple[int, ...]) -> None:
    if bias is not None and jnp.shape(bias) != expected:
        raise ValueError(f"{op}: bias has shape {jnp.shape(bias)}, expected {expected} (= out_features of w)")


def hold_kernel(layer: Any, kernel: Any, description: Description, metadata: Mapping[str, Any]) -> None:
    """Gives the layer its variables from what kernel_init returned, with the metadata that it carries."""
    metadata = dict(metadata)
    if isinstance(kernel, nnx.VariableMetadata):
        metadata |= kernel.metadata
        kernel = kernel.raw_value
    w = kernel if isinstance(kernel, NMSparse) else prune(kernel, layer.pattern)
    if layer.values_dtype is not None and w.scales is None:
        w = quantize(w, layer.values_dtype)
    constant, scale = _named_axes(metadata, 0, w.mask.ndim), _named_axes(metadata, 1, 1)
    metadata |= _named_axes(metadata, 0, w.values.ndim)
    layer.mask = NMMask(w.mask, **constant)
    if w.scales is None:
        layer.values, layer.scales = nnx.Param(w.values, **metadata), nnx.data(None)
    else:
        layer.values = NMMask(w.values, **_named_axes(metadata, 0, w.values.ndim))
        layer.scales = nnx.Param(w.scales, **scale)
    layer.format = NMFormat(description, w.shape[:-2])


def _named_axes(metadata: Mapping[str, Any], first: int, ndim: int) -> dict[str, Any]:
    """The sharding metadata of an array whose leading axes are those of the kernel (in, out) from first on."""
    if metadata.get("out_sharding") is None:
        return {}
    names = (*tuple(metadata["out_sharding"])[first:], *(None,) * ndim)[:ndim]
    return {name: metadata[name] for name in ("sharding_rules", "mesh") if name in metadata} | {"out_sharding": names}


def held_weight(layer: Any, description: Description) -> NMSparse:
    """The weight in the variables of a layer, checked against what the module and the variables say."""
    label = type(layer).__name__
    description.check(label, layer.format.names())
    values, mask = layer.values[...], layer.mask[...]
    scales = None if layer.scales is None else layer.scales[...]
    lead = values.shape[:-5]
    arrays = {"values": values, "mask": mask} | ({} if scales is None else {"scales": scales})
    description.check_arrays(label, arrays, lead)
    layout = description.layout
    shape = (*lead, layout.in_features, layout.out_features)
    return NMSparse(values, mask, shape=shape, pattern=layer.pattern, scales=scales)


def multiply(layer: Any, description: Description, x: jax.Array, bias: jax.Array | None) -> jax.Array:
    """``act(x W + bias)`` in the dtype that x, values and bias promote to."""
    w = held_weight(layer, description)
    # Quantised values stand for a kernel of param_dtype.
    kernel = w.values if w.scales is None else jnp.zeros((1,), layer.param_dtype)
    x, kernel, bias = layer.promote_dtype((x, kernel, bias), dtype=layer.dtype)
    y = ops.spmm(
        x,
        w._replace(values=kernel) if w.scales is None else w,
        bias=bias,
        activation=layer.activation,
        precision=layer.precision,
        preferred_element_type=layer.preferred_element_type,
        implementation=layer.implementation,
    )
    return y if layer.preferred_element_type is not None else y.astype(x.dtype)
