"""`NMSparse`: an N:M sparse weight as a JAX pytree."""

from __future__ import annotations

import json
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from jax_nmsparse import dense_form
from jax_nmsparse import layout as layout_lib
from jax_nmsparse.layout import Layout
from jax_nmsparse.pattern import NMPattern

_VALUE_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64, jnp.int8, jnp.float8_e4m3fn)
VALUE_DTYPES = tuple(jnp.dtype(d) for d in _VALUE_DTYPES)
"""Dtypes that the values of a weight may have."""


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _is_traced(x: Any) -> bool:
    return isinstance(x, Tracer)


def _dims(shape) -> str:
    return "x".join(str(size) for size in shape) or "scalar"


def check_pattern(op: str, pattern: Any) -> NMPattern:
    if isinstance(pattern, str):
        return NMPattern.parse(pattern)
    if not isinstance(pattern, NMPattern):
        raise TypeError(f"{op}: pattern is a {type(pattern).__name__}, expected an NMPattern or a string such as '2:4'")
    return pattern


def check_dense(op: str, dense: Any) -> jax.Array:
    if not _is_array(dense):
        raise TypeError(f"{op}: the dense weight is a {type(dense).__name__}, expected an array")
    if isinstance(dense, NMSparse):
        raise TypeError(f"{op}: the weight is an NMSparse already; todense() gives the dense form")
    if len(dense.shape) < 2:
        raise ValueError(
            f"{op}: the dense weight has shape {tuple(dense.shape)}, expected [..., in_features, out_features]"
        )
    if 0 in dense.shape[-2:]:
        raise ValueError(f"{op}: the dense weight has shape {tuple(dense.shape)}, expected at least one row and column")
    dense = jnp.asarray(dense)
    check_value_dtype(op, dense.dtype)
    return dense


def check_value_dtype(op: str, dtype: Any) -> None:
    if jnp.dtype(dtype) not in VALUE_DTYPES:
        names = ", ".join(d.name for d in VALUE_DTYPES)
        raise TypeError(f"{op}: the weight has dtype {jnp.dtype(dtype).name}, supported are {names}; convert it first")


@jax.tree_util.register_pytree_with_keys_class
class NMSparse:
    """An N:M sparse weight ``W`` of logical shape ``[..., in_features, out_features]``.

    What the arrays hold is what the kernels read; there is no hidden repacking. With the geometry of the pattern
    (windows of ``window_units`` units of ``bk x bn`` along in_features, ``q`` kept in each; see `Layout`):

    Attributes:
      values: ``[..., windows, out_blocks, q, bk, bn]``, the kept units in ascending order of position. float32,
        bfloat16, float16, float64, int8 or float8_e4m3fn.
      mask: uint32 ``[..., windows, out_blocks]`` (with a trailing axis of ``ceil(m / 32)`` words where a window is
        longer than 32 units). Bit u is set where unit u of the window is kept.
      scales: None, or float32 ``[..., out_features]``: W is ``values * scales`` column by column (`quantize`).
      pattern: The `NMPattern`.
      shape: The logical dense shape. Leading axes are batch axes: stacked layers, experts.

    Invariants, which `validate` checks on concrete arrays:
      * exactly n bits are set in every group, none beyond the window;
      * groups with fewer than n nonzero units hold zero-valued units at their lowest free positions;
      * padding (rows beyond in_features, columns beyond out_features) is zero.

    A weight is a pytree with the leaves values, mask and scales, so it passes through every JAX transformation.
    `jax.grad` refuses the integer mask; use `jax_nmsparse.grad`, or differentiate with respect to ``values``.

    Example:
      >>> import jax, jax.numpy as jnp, jax_nmsparse as nms
      >>> w = nms.prune(jax.random.normal(jax.random.key(0), (64, 48)), nms.NMPattern(2, 4))
      >>> w
      NMSparse(64x48, 2:4, float32)
      >>> (jnp.ones((3, 64)) @ w).shape
      (3, 48)
    """

    __slots__ = ("values", "mask", "scales", "pattern", "_features")
    # NumPy hands `ndarray @ NMSparse` to __rmatmul__ instead of looping over the elements.
    __array_ufunc__ = None

    values: Any
    mask: Any
    scales: Any
    pattern: NMPattern

    def __init__(
        self, values: jax.Array, mask: jax.Array, *, shape: Sequence[int], pattern: NMPattern | str, scales=None
    ) -> None:
        pattern = check_pattern("NMSparse", pattern)
        try:
            shape = tuple(operator.index(size) for size in shape)
        except TypeError:
            raise TypeError(
                f"NMSparse: shape is {shape!r}, expected integers (..., in_features, out_features)"
            ) from None
        if len(shape) < 2 or min(shape[-2:]) < 1:
            raise ValueError(f"NMSparse: shape is {shape}, expected (..., in_features, out_features), both at least 1")
        self.values, self.mask, self.scales = values, mask, scales
        self.pattern, self._features = pattern, shape[-2:]
        self._check_arrays(shape[:-2])

    def check_arrays(self, op: str) -> None:
        """Checks shapes and dtypes of the arrays against the static shape; slicing leaves one by one breaks them."""
        try:
            self._check_arrays(tuple(self.values.shape[:-5]))
        except (TypeError, ValueError) as error:
            raise type(error)(f"{op}: w is inconsistent ({error}); leaves of a weight cannot be sliced alone") from None

    def _check_arrays(self, lead: tuple[int, ...]) -> None:
        layout = self.layout
        for name in ("values", "mask") + (() if self.scales is None else ("scales",)):
            if not _is_array(getattr(self, name)):
                raise TypeError(f"NMSparse: {name} is a {type(getattr(self, name)).__name__}, expected an array")
        check_value_dtype("NMSparse", self.values.dtype)
        if self.mask.dtype != jnp.uint32:
            raise TypeError(f"NMSparse: mask has dtype {self.mask.dtype}, expected uint32")
        words = layout.mask_shape if self.pattern.mask_words > 1 else layout.mask_shape[:-1]
        expected = {"values": lead + layout.values_shape, "mask": lead + words}
        if self.scales is not None:
            if self.scales.dtype != jnp.float32:
                raise TypeError(f"NMSparse: scales has dtype {self.scales.dtype}, expected float32")
            expected["scales"] = lead + (layout.out_features,)
        for name, want in expected.items():
            got = tuple(getattr(self, name).shape)
            if got != want:
                raise ValueError(
                    f"NMSparse: {name} has shape {got}, expected {want} for a weight of shape "
                    f"{lead + self._features} with pattern {self.pattern}"
                )

    # Pytree.

    def tree_flatten_with_keys(self):
        key = jax.tree_util.GetAttrKey
        leaves = ((key("values"), self.values), (key("mask"), self.mask), (key("scales"), self.scales))
        return leaves, (self.pattern, self._features)

    def tree_flatten(self):
        return (self.values, self.mask, self.scales), (self.pattern, self._features)

    @classmethod
    def tree_unflatten(cls, aux, leaves) -> NMSparse:
        # Leaves may be anything here (None, sentinels, arrays with mapped axes), so nothing is checked.
        self = object.__new__(cls)
        self.pattern, self._features = aux
        self.values, self.mask, self.scales = leaves
        return self

    # What it is.

    @property
    def layout(self) -> Layout:
        return Layout(self.pattern, *self._features)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape[:-5]) + self._features

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """Elements of the dense weight."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def dtype(self):
        return self.values.dtype

    @property
    def in_features(self) -> int:
        return self._features[0]

    @property
    def out_features(self) -> int:
        return self._features[1]

    @property
    def nbytes(self) -> int:
        """Bytes of values, mask and scales together."""
        arrays = (self.values, self.mask) + (() if self.scales is None else (self.scales,))
        return sum(int(np.prod(a.shape, dtype=np.int64)) * jnp.dtype(a.dtype).itemsize for a in arrays)

    def __repr__(self) -> str:
        if not (_is_array(self.values) and _is_array(self.mask)):
            return f"NMSparse(values={self.values!r}, mask={self.mask!r}, {_dims(self._features)}, {self.pattern})"
        parts = [_dims(self.shape), str(self.pattern), jnp.dtype(self.dtype).name]
        if self.scales is not None:
            parts.append("scales=float32")
        if _is_traced(self.values) or _is_traced(self.mask):
            parts.append("traced")
        return f"NMSparse({', '.join(parts)})"

    # Conversions.

    @classmethod
    def fromdense(cls, dense: ArrayLike, pattern: NMPattern | str) -> NMSparse:
        """Packs a weight that already satisfies the pattern; nothing is lost.

        Args:
          dense: ``[..., in_features, out_features]`` with at most n nonzero units in every group of m.
          pattern: The pattern, or a string such as "2:4".

        Returns:
          The `NMSparse` whose `todense` is equal to dense (-0.0 counts as zero; NaN and Inf are kept).

        Raises:
          ValueError: Where a group holds more than n nonzero units; `prune` would choose among them.
          TypeError: For a traced array, whose contents cannot be checked; use `prune` under jit.

        Example:
          >>> import jax.numpy as jnp, jax_nmsparse as nms
          >>> nms.NMSparse.fromdense(jnp.eye(8), "1:4").todense().sum()
          Array(8., dtype=float32)
        """
        pattern = check_pattern("fromdense", pattern)
        dense = check_dense("fromdense", dense)
        if _is_traced(dense):
            raise TypeError(
                "fromdense: the dense weight is traced, so its groups cannot be checked; "
                "under jit use prune(dense, pattern), which keeps the largest units"
            )
        mask, too_many = dense_form.nonzero_mask(dense, Layout(pattern, *dense.shape[-2:]))
        excess = int(jnp.sum(too_many))
        if excess > 0:
            raise ValueError(
                f"fromdense: {excess} groups hold more than {pattern.n} nonzero units of {pattern.m} "
                f"(pattern {pattern}, groups along in_features, axis -2); use prune(dense, pattern)"
            )
        return cls._from_units(dense, mask, pattern)

    @classmethod
    def _from_units(cls, dense: jax.Array, mask: jax.Array, pattern: NMPattern) -> NMSparse:
        """Gathers the units that `mask` (with its word axis) names."""
        values = dense_form.gather_units(dense, mask, Layout(pattern, *dense.shape[-2:]))
        return cls(values, mask if pattern.mask_words > 1 else mask[..., 0], shape=dense.shape, pattern=pattern)

    @property
    def mask_with_words(self) -> jax.Array:
        """The mask with its word axis, also where there is one word."""
        return self.mask if self.pattern.mask_words > 1 else self.mask[..., None]

    def todense(self) -> jax.Array:
        """The dense weight ``[..., in_features, out_features]``; quantised values come back as float32."""
        return dense_form.dense(self.values, self.mask_with_words, self.scales, self.layout)

    def indices(self) -> jax.Array:
        """Position of every kept unit inside its group, 0 to m - 1: int32 ``[..., windows, out_blocks, q]``."""
        return dense_form.positions(self.mask_with_words, self.layout) % self.pattern.m

    def keep(self) -> jax.Array:
        """Which elements are kept: bool ``[..., in_features, out_features]`` (kept units may hold zeros)."""
        return dense_form.kept(self.mask_with_words, self.layout)

    def astype(self, dtype) -> NMSparse:
        """The same weight with values of another float dtype; quantised values are multiplied out."""
        dtype = jnp.dtype(dtype)
        check_value_dtype("astype", dtype)
        if dtype == self.dtype:
            return self
        if dtype == jnp.int8 or dtype == jnp.float8_e4m3fn:
            raise TypeError(f"astype: {dtype.name} needs scales; use quantize(w, {dtype.name!r})")
        values = self.values
        if self.scales is not None:
            values = values.astype(jnp.float32) * dense_form.scales_like_values(self.scales, self.layout)
        return self._replace(values=values.astype(dtype), scales=None)

    def with_values(self, values: jax.Array) -> NMSparse:
        """The same mask and scales with other values of the same shape; padding is set to zero."""
        if not _is_array(values) or tuple(values.shape) != tuple(self.values.shape):
            got = tuple(values.shape) if _is_array(values) else type(values).__name__
            raise ValueError(f"with_values: values has shape {got}, expected {tuple(self.values.shape)}")
        check_value_dtype("with_values", values.dtype)
        return self._replace(values=dense_form.zero_padding(values, self.mask_with_words, self.layout))

    def _replace(self, **leaves) -> NMSparse:
        old = {"values": self.values, "mask": self.mask, "scales": self.scales}
        new = {**old, **leaves}
        return type(self).tree_unflatten((self.pattern, self._features), (new["values"], new["mask"], new["scales"]))

    def validate(self) -> NMSparse:
        """Checks every invariant of the class on concrete arrays.

        Returns:
          self.

        Raises:
          ValueError: Names the invariant that is broken, and in how many places.
          TypeError: For traced arrays.
        """
        if any(_is_traced(leaf) for leaf in jax.tree.leaves(self)):
            raise TypeError("validate: the weight is traced; call it on concrete arrays, outside jit")
        self._check_arrays(self.shape[:-2])
        layout, mask = self.layout, self.mask_with_words
        bits = np.asarray(layout_lib.unpack_bits(mask, 32 * self.pattern.mask_words))
        beyond = int(bits[..., layout.window_units :].sum())
        if beyond:
            raise ValueError(
                f"validate: {beyond} bits of mask are set beyond the window of {layout.window_units} units"
            )
        groups = bits[..., : layout.window_units].reshape(*bits.shape[:-1], -1, self.pattern.m).sum(-1)
        wrong = int((groups != self.pattern.n).sum())
        if wrong:
            raise ValueError(f"validate: {wrong} groups of mask keep another number of units than {self.pattern.n}")
        clean = dense_form.zero_padding(self.values, mask, layout)
        differs = (clean != self.values) & ~(jnp.isnan(clean) & jnp.isnan(self.values))
        dirty = int(np.sum(np.asarray(differs)))
        if dirty:
            raise ValueError(f"validate: {dirty} values in the padding beyond {_dims(self._features)} are not zero")
        if self.scales is not None and not bool(jnp.all(jnp.isfinite(self.scales) & (self.scales > 0))):
            raise ValueError("validate: scales must be positive and finite")
        return self

    # Products; `ops` installs the meaning, since it lies above this module.

    def __matmul__(self, other):
        raise TypeError("NMSparse is the right operand of a product: x @ w; for g @ w.T use spmm(g, w, transpose=True)")

    def __rmatmul__(self, x):
        from jax_nmsparse import ops  # noqa: PLC0415  (the product is defined in a layer above the array)

        return ops.spmm(x, self)


def _serialize_aux(aux: tuple[NMPattern, tuple[int, int]]) -> bytes:
    pattern, features = aux
    return json.dumps([layout_lib.FORMAT_VERSION, str(pattern), *features]).encode()


def _deserialize_aux(data: bytes) -> tuple[NMPattern, tuple[int, int]]:
    version, pattern, in_features, out_features = json.loads(bytes(data))
    if version != layout_lib.FORMAT_VERSION:
        raise ValueError(
            f"NMSparse: the exported function has format version {version}, not {layout_lib.FORMAT_VERSION}"
        )
    return NMPattern.parse(pattern), (in_features, out_features)


# So that exported functions whose arguments hold weights can be serialised.
jax.export.register_pytree_node_serialization(
    NMSparse,
    serialized_name="jax_nmsparse.NMSparse",
    serialize_auxdata=_serialize_aux,
    deserialize_auxdata=_deserialize_aux,
)
