"""`NMSparseDense`: `flax.linen.Dense` with an N:M sparse kernel."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype

from jax_nmsparse import ops
from jax_nmsparse.array import NMSparse, check_pattern
from jax_nmsparse.layout import FORMAT_VERSION, Layout
from jax_nmsparse.pattern import NMPattern
from jax_nmsparse.pruning import prune
from jax_nmsparse.quantization import quantize

MASK_COLLECTION = "nm_mask"
"""The collection of what no optimiser may touch: the mask, the format, and quantised values."""

_FORMAT = re.compile(r"v(\d+)_(\d+):(\d+)_(\d+)x(\d+)_(\d+)x(\d+)")


class NMSparseDense(nn.Module):
    """`flax.linen.Dense` with an N:M sparse kernel: ``y = act(x W + bias)``.

    Arguments, promotion of dtypes and initial values are those of `nn.Dense` (the kernel is drawn dense by kernel_init
    at ``[in_features, features]`` and pruned by magnitude). `nn.Dense` takes ``dot_general`` too; a product with a
    packed kernel is none, so there is no such argument here.

    Variables, for one layer (`nn.scan` and `nn.vmap` put axes in front; name both collections in variable_axes):

    * ``params/values``: float ``[windows, out_blocks, q, bk, bn]``, the kept units (see `NMSparse`);
    * ``params/bias``: ``[features]``, with use_bias;
    * ``nm_mask/mask``: uint32, which units are kept. No leaf of params is an integer, so gradients and optax run over
      params untouched, and the pattern cannot be lost by training;
    * ``nm_mask/format/<v1_2:4_1x1_64x48>``: format version, pattern, block and shape, in the name of an empty leaf: so
      every checkpoint of the variables says what it holds, and a wrong pattern or input size raises under jit too.

    With values_dtype they are quantised: ``nm_mask/values``, constant, and ``params/scales``, float32 ``[features]``.

    Attributes:
      features: Size of the last axis of y.
      use_bias: Whether to add a bias.
      dtype: dtype of the computation; by default that which x and the parameters promote to.
      param_dtype: dtype that values and bias are initialised in.
      precision: As in `jnp.dot`.
      kernel_init: Initialiser of the dense kernel; may be wrapped in `nn.with_partitioning` with the axes (in, out).
      bias_init: Initialiser of the bias.
      promote_dtype: Casts (x, values, bias) to the dtype of the computation.
      pattern: The `NMPattern`, or a string such as "2:4". Groups run along in_features.
      activation: None, "relu", "gelu" (exact), "gelu_tanh" or "silu", computed in the epilogue of the product.
      implementation: As in `spmm`.
      values_dtype: None, or int8 or float8_e4m3fn for quantised values.

    Raises:
      ValueError: Where the variables hold another pattern, block or shape than the module and x need; the message
        names the layer.

    Example:
      >>> import jax, jax.numpy as jnp, jax_nmsparse as nms
      >>> from jax_nmsparse.linen import NMSparseDense
      >>> layer = NMSparseDense(48, pattern="2:4", activation="relu")
      >>> variables = layer.init(jax.random.key(0), jnp.ones((1, 64)))
      >>> layer.apply(variables, jnp.ones((3, 64))).shape
      (3, 48)
      >>> layer.bind(variables).weight()
      NMSparse(64x48, 2:4, float32)
    """

    features: int
    use_bias: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None
    kernel_init: Callable[..., Any] = nn.linear.default_kernel_init
    bias_init: Callable[..., Any] = nn.initializers.zeros_init()
    promote_dtype: Callable[..., Any] = promote_dtype
    _: dataclasses.KW_ONLY
    pattern: NMPattern | str
    activation: str | None = None
    implementation: str | None = None
    values_dtype: Any = None

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Applies the layer along the last axis of inputs, ``[..., in_features]``, giving ``[..., features]``."""
        if jnp.ndim(inputs) < 1:
            raise ValueError(f"{_label(self)}: x has no axes, expected [..., in_features]")
        layout = Layout(check_pattern(_label(self), self.pattern), jnp.shape(inputs)[-1], self.features)
        values, mask, scales = _layer_arrays(self, layout)
        bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype) if self.use_bias else None
        # Quantised values stand for a kernel of param_dtype.
        kernel = values if scales is None else jnp.zeros((1,), self.param_dtype)
        x, kernel, bias = self.promote_dtype(inputs, kernel, bias, dtype=self.dtype)
        w = NMSparse(
            kernel if scales is None else values,
            mask,
            shape=(layout.in_features, layout.out_features),
            pattern=layout.pattern,
            scales=scales,
        )
        y = ops.spmm(
            x,
            w,
            bias=bias,
            activation=self.activation,
            precision=self.precision,
            implementation=self.implementation,
        )
        return y.astype(x.dtype)

    def weight(self) -> NMSparse:
        """The weight that a bound module holds: ``layer.bind(variables).weight()``."""
        variables = self.variables
        w = self.to_weight(variables)
        layout = Layout(check_pattern(_label(self), self.pattern), w.in_features, self.features)
        _check_format(_label(self), variables[MASK_COLLECTION], layout)
        return w

    @staticmethod
    def from_weight(w: NMSparse, bias: jax.Array | None = None) -> dict[str, dict[str, Any]]:
        """The variables of a layer that holds a given weight.

        Args:
          w: The weight; leading axes become those of stacked layers.
          bias: None (a layer with use_bias=False), or ``[..., out_features]``.

        Returns:
          ``{"params": ..., "nm_mask": ...}``; the arrays are those of w, not copies.

        Raises:
          ValueError, TypeError: For what is no weight, or a bias of another shape.

        Example:
          >>> import jax.numpy as jnp, jax_nmsparse as nms
          >>> from jax_nmsparse.linen import NMSparseDense
          >>> variables = NMSparseDense.from_weight(nms.NMSparse.fromdense(jnp.eye(4), "1:4"))
          >>> NMSparseDense(4, use_bias=False, pattern="1:4").apply(variables, jnp.arange(4.0))
          Array([0., 1., 2., 3.], dtype=float32)
        """
        if not isinstance(w, NMSparse):
            raise TypeError(f"from_weight: w is a {type(w).__name__}, expected an NMSparse; from_dense prunes a kernel")
        lead = w.shape[:-2]
        params: dict[str, Any] = {}
        constants: dict[str, Any] = {"mask": w.mask, "format": {_format(w.layout): jnp.zeros(lead, jnp.uint32)}}
        if w.scales is None:
            params["values"] = w.values
        else:
            params["scales"], constants["values"] = w.scales, w.values
        if bias is not None:
            if jnp.shape(bias) != (*lead, w.out_features):
                raise ValueError(
                    f"from_weight: bias has shape {jnp.shape(bias)}, expected {(*lead, w.out_features)} "
                    f"(= out_features of {w!r})"
                )
            params["bias"] = bias
        return {"params": params, MASK_COLLECTION: constants}

    @staticmethod
    def to_weight(variables: Mapping[str, Any]) -> NMSparse:
        """The weight in the variables of one layer (or of stacked layers), the inverse of `from_weight`.

        Raises:
          ValueError: Where the variables are not those of an `NMSparseDense`, or their shapes disagree.
        """
        variables = nn.meta.unbox(variables)
        params, constants = (variables.get(name, {}) for name in ("params", MASK_COLLECTION))
        stored = _stored_layout("to_weight", constants)
        if stored is None or "mask" not in constants or not ("values" in params or "scales" in params):
            found = sorted(f"{c}/{name}" for c in variables for name in variables[c])
            raise ValueError(
                f"to_weight: the variables hold {found}, expected those of one NMSparseDense: params/values, "
                f"{MASK_COLLECTION}/mask and {MASK_COLLECTION}/format"
            )
        scales = params.get("scales")
        values = params["values"] if scales is None else constants["values"]
        shape = (*values.shape[:-5], stored.in_features, stored.out_features)
        return NMSparse(values, constants["mask"], shape=shape, pattern=stored.pattern, scales=scales)

    @staticmethod
    def from_dense(
        params: Mapping[str, Any],
        pattern: NMPattern | str,
        *,
        scores: Any = None,
        exact: bool = False,
        values_dtype: Any = None,
    ) -> dict[str, dict[str, Any]]:
        """The variables that replace those of a trained `nn.Dense`; runs under jit too, except with exact.

        Args:
          params: ``{"kernel": [..., in_features, features], "bias": [..., features]}`` (bias optional), or the whole
            ``{"params": ...}``. Leading axes are those of stacked layers.
          pattern: The pattern, or a string such as "2:4".
          scores: As in `prune`: scores or a boolean mask of the kernel's shape; by default magnitude.
          exact: The kernel satisfies the pattern already; raise where it does not, rather than drop weights.
          values_dtype: None, or int8 or float8_e4m3fn to quantise.

        Returns:
          ``{"params": ..., "nm_mask": ...}``. Nothing of it refers to the dense kernel.

        Raises:
          ValueError, TypeError: For params of something else, or as `prune` and `NMSparse.fromdense`.

        Example:
          >>> import flax.linen as nn, jax, jax.numpy as jnp
          >>> from jax_nmsparse.linen import NMSparseDense
          >>> trained = nn.Dense(48).init(jax.random.key(0), jnp.ones((1, 64)))
          >>> variables = NMSparseDense.from_dense(trained, "8:32")
          >>> NMSparseDense(48, pattern="8:32").apply(variables, jnp.ones((3, 64))).shape
          (3, 48)
        """
        params = nn.meta.unbox(params)
        params = params["params"] if set(params) == {"params"} else params
        if "kernel" not in params or set(params) - {"kernel", "bias"}:
            raise ValueError(
                f"from_dense: params holds {sorted(params)}, expected 'kernel' and 'bias' of one nn.Dense; convert a "
                "model layer by layer"
            )
        if exact and scores is not None:
            raise ValueError("from_dense: scores choose what to drop, exact=True drops nothing; give one of them")
        pattern, kernel = check_pattern("from_dense", pattern), params["kernel"]
        w = NMSparse.fromdense(kernel, pattern) if exact else prune(kernel, pattern, scores=scores)
        return NMSparseDense.from_weight(w if values_dtype is None else quantize(w, values_dtype), params.get("bias"))

    @staticmethod
    def to_dense(variables: Mapping[str, Any]) -> dict[str, jax.Array]:
        """The parameters of the `nn.Dense` that computes the same: ``{"kernel": ..., "bias": ...}``.

        Example:
          >>> import jax, jax.numpy as jnp
          >>> from jax_nmsparse.linen import NMSparseDense
          >>> variables = NMSparseDense(48, pattern="2:4").init(jax.random.key(0), jnp.ones((1, 64)))
          >>> NMSparseDense.to_dense(variables)["kernel"].shape
          (64, 48)
        """
        kernel = NMSparseDense.to_weight(variables).todense()
        bias = nn.meta.unbox(variables["params"]).get("bias")
        return {"kernel": kernel} if bias is None else {"kernel": kernel, "bias": bias}


def _label(module: nn.Module) -> str:
    """What errors call the layer: its class and its place in the model."""
    place = "/".join(module.path) if module.scope is not None else module.name
    return f"NMSparseDense {place}" if place else "NMSparseDense"


def _format(layout: Layout) -> str:
    p = layout.pattern
    return f"v{FORMAT_VERSION}_{p.n}:{p.m}_{p.block[0]}x{p.block[1]}_{layout.in_features}x{layout.out_features}"


def _stored_layout(label: str, constants: Mapping[str, Any]) -> Layout | None:
    """What the variables say that they hold; None where somebody made them by hand without a format."""
    names = list(constants.get("format", {}))
    if not names:
        return None
    match = _FORMAT.fullmatch(names[0]) if len(names) == 1 else None
    if match is None:
        raise ValueError(f"{label}: {MASK_COLLECTION}/format holds {names}, expected one name such as v1_2:4_1x1_64x48")
    version, n, m, bk, bn, rows, columns = (int(number) for number in match.groups())
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{label}: the variables have format version {version}, expected {FORMAT_VERSION}; "
            f"{'upgrade jax_nmsparse' if version > FORMAT_VERSION else 'convert them with the version that wrote them'}"
        )
    return Layout(NMPattern(n, m, (bk, bn)), rows, columns)


def _check_format(label: str, constants: Mapping[str, Any], layout: Layout) -> None:
    """Raises where the variables say that they hold something else than layout."""
    stored = _stored_layout(label, constants)
    if stored is None or stored == layout:
        return
    w = f"w {stored.in_features}x{stored.out_features}"
    if stored.pattern != layout.pattern:
        raise ValueError(
            f"{label}: the variables have pattern {stored.pattern}, expected {layout.pattern} (= pattern of the module)"
            f"; build the module with pattern='{stored.pattern}', or convert: from_dense(to_dense(variables), pattern)"
        )
    if stored.in_features != layout.in_features:
        raise ValueError(
            f"{label}: x has trailing size {layout.in_features}, expected {stored.in_features} (= in_features of {w})"
        )
    raise ValueError(
        f"{label}: features is {layout.out_features}, expected {stored.out_features} (= out_features of {w})"
    )


def _check_shapes(label: str, arrays: Mapping[str, Any], layout: Layout) -> None:
    p = layout.pattern
    expected = {
        "values": layout.values_shape,
        "mask": layout.mask_shape if p.mask_words > 1 else layout.mask_shape[:-1],
        "scales": (layout.out_features,),
    }
    for name, array in arrays.items():
        if jnp.shape(array) != expected[name]:
            raise ValueError(
                f"{label}: {name} has shape {jnp.shape(array)}, expected {expected[name]} (= {name} of a weight "
                f"{layout.in_features}x{layout.out_features} with pattern {p}); the variables are of another pattern "
                "or size, or of stacked layers, which nn.scan and nn.vmap slice where variable_axes names both "
                f"collections, 'params' and '{MASK_COLLECTION}'"
            )


def _layer_arrays(module: NMSparseDense, layout: Layout) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Values, mask and scales of a layer: read and checked, or drawn while the module is initialised."""
    label, quantised = _label(module), module.values_dtype is not None
    trained = "scales" if quantised else "values"
    has_params, has_mask = module.has_variable("params", trained), module.has_variable(MASK_COLLECTION, "mask")
    if not has_params and module.has_variable("params", "kernel"):
        raise ValueError(
            f"{label}: params holds a dense 'kernel', expected '{trained}'; convert it with "
            "NMSparseDense.from_dense(params, pattern)"
        )
    if has_params and not has_mask:
        raise ValueError(
            f"{label}: the variables hold params/{trained} but no {MASK_COLLECTION}/mask; pass both collections to "
            "apply, and name both in variable_axes of nn.scan and nn.vmap"
        )
    if not has_params:
        if has_mask and module.is_mutable_collection("params"):
            raise ValueError(f"{label}: there is a mask already, expected none while values are initialised")
        if module.is_mutable_collection("params") and not module.is_mutable_collection(MASK_COLLECTION):
            raise ValueError(
                f"{label}: collection '{MASK_COLLECTION}' cannot be written while the layer is initialised; name it "
                "beside 'params' in variable_axes of nn.scan and nn.vmap and in mutable of init"
            )
        return _draw(module, layout)
    constants = module.variables[MASK_COLLECTION]
    _check_format(label, nn.meta.unbox(constants), layout)
    arrays = {trained: module.get_variable("params", trained), "mask": constants["mask"]}
    if quantised:
        if "values" not in constants:
            raise ValueError(f"{label}: the variables hold no {MASK_COLLECTION}/values, expected quantised values")
        arrays["values"] = constants["values"]
    _check_shapes(label, nn.meta.unbox(arrays), layout)
    # Through param and variable rather than straight from the collections, so that Flax knows of them.
    first = module.param(trained, lambda key: nn.meta.unbox(arrays[trained]))
    mask = module.variable(MASK_COLLECTION, "mask").value
    return (module.variable(MASK_COLLECTION, "values").value, mask, first) if quantised else (first, mask, None)


def _draw(module: NMSparseDense, layout: Layout) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Prunes a dense draw; param calls kernel_init with the very key that it gives `nn.Dense`'s kernel."""
    drawn: list[tuple[NMSparse, Any]] = []

    def init(key):
        kernel = module.kernel_init(key, (layout.in_features, layout.out_features), module.param_dtype)
        w = prune(nn.meta.unbox(kernel), layout.pattern)
        w = w if module.values_dtype is None else quantize(w, module.values_dtype)
        drawn.append((w, kernel))
        return _box_like(kernel, w.values, 2) if w.scales is None else _box_like(kernel, w.scales, -1)

    first = module.param("values" if module.values_dtype is None else "scales", init)
    w, kernel = drawn[0]
    mask = module.variable(MASK_COLLECTION, "mask", lambda: _box_like(kernel, w.mask, 2)).value
    module.variable(MASK_COLLECTION, "format", lambda: {_format(layout): jnp.zeros((), jnp.uint32)})
    if w.scales is None:
        return first, mask, None
    return module.variable(MASK_COLLECTION, "values", lambda: _box_like(kernel, w.values, 2)).value, mask, first


def _box_like(kernel: Any, array: jax.Array, axes: int) -> Any:
    """Boxes array as kernel_init boxed the dense kernel.

    The axes (in, out) of a partitioned kernel are the first two of values and mask, and out that of scales (axes=-1).
    """
    if isinstance(kernel, nn.Partitioned):
        names = kernel.names[1:] if axes == -1 else kernel.names
        return kernel.replace(value=array, names=(*names, *([None] * (array.ndim - len(names)))))
    return kernel.replace_boxed(array) if isinstance(kernel, nn.meta.AxisMetadata) else array
