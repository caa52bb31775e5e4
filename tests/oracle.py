"""What the tests compare with: N:M products in NumPy float64 on the dense matrix, and one table of tolerances.

Nothing here calls the package's packing, pruning or reference code: masks are drawn, packed and unpacked with NumPy.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_nmsparse as nms
from jax_nmsparse import native

PATTERNS = (
    "2:4",
    "1:4",
    "8:32",
    "16:32",
    "3:6",
    "1:10",
    "4:64",
    "100:128",
    "2:4/1x8",
    "8:32/2x3",
    "1:2/4x4",
    "2:5/3x2",
)
"""Element-wise, vector-wise and block-wise, windows of 1, 2 and 4 words, and m that divides 32 or does not."""

RAGGED = (1, 31, 33, 63, 65, 127, 129, 1000)

IMPLEMENTATIONS = (None, "xla", "dense", *(["cpu"] if native.MODULES["cpu"].loaded else []))
"""What can be named on a CPU: `None` is the native kernel where its module is loaded."""

ACTIVATIONS = (None, "relu", "gelu", "gelu_tanh", "silu")

# (rounding of one result, error of a sum for every sqrt(depth)), relative to |want| + rms(want). Half types are summed
# in float32. TF32 keeps 10 bits of every factor.
TOLERANCE = {
    ("float64", "highest"): (2.0**-51, 2.0**-51),
    ("float32", "highest"): (2.0**-22, 2.0**-22),
    ("float32", "tf32"): (2.0**-22, 2.0**-10),
    ("float16", "highest"): (2.0**-10, 2.0**-22),
    ("bfloat16", "highest"): (2.0**-7, 2.0**-22),
}


def assert_close(got, want, *, depth: int = 1, dtype=None, precision: str = "highest") -> None:
    """Compares with the oracle; integers must be equal, NaN and Inf must be at the same places.

    Args:
      got: The result under test.
      want: What the oracle says.
      depth: Length of the sums.
      dtype: The least precise type on the way, by default that of got.
      precision: "tf32" where float32 factors may be rounded to TF32.
    """
    got_dtype = jnp.dtype(got.dtype)
    got, want = np.asarray(got).astype(np.float64), np.asarray(want).astype(np.float64)
    assert got.shape == want.shape, f"shape {got.shape}, expected {want.shape}"
    if got_dtype.kind in "iub":
        np.testing.assert_array_equal(got, want)
        return
    name = jnp.dtype(dtype or got_dtype).name
    rounding, per_sum = TOLERANCE[name, precision if name == "float32" else "highest"]
    rtol = rounding + per_sum * math.sqrt(depth)
    finite = want[np.isfinite(want)]
    rms = math.sqrt(np.mean(np.square(finite))) if finite.size else 0.0
    np.testing.assert_allclose(got, want, rtol=rtol, atol=rtol * rms, equal_nan=True)


def assert_same_bits(got, want) -> None:
    """Two pytrees with equal structure, dtypes and bytes."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.tobytes() == b.tobytes()


# Weights.


def integers(rng: np.random.Generator, shape, dtype: Any = np.float32, largest: int = 3) -> np.ndarray:
    """Integers in [-largest, largest]: their products and sums are exact in every dtype used here."""
    return rng.integers(-largest, largest + 1, shape).astype(jnp.dtype(dtype))


def normal(rng: np.random.Generator, shape, dtype: Any = np.float32) -> np.ndarray:
    return rng.standard_normal(shape).astype(jnp.dtype(dtype))


def _geometry(pattern: nms.NMPattern, features: tuple[int, ...]) -> tuple[int, int, int]:
    """Units in a window, windows, column blocks."""
    units = 32 if 32 % pattern.m == 0 else pattern.m
    bk, bn = pattern.block
    return units, math.ceil(math.ceil(features[0] / bk) / units), math.ceil(features[1] / bn)


def cut(dense: np.ndarray, pattern: nms.NMPattern) -> np.ndarray:
    """[..., in, out] -> [..., windows, out_blocks, units, bk, bn]."""
    units, windows, blocks = _geometry(pattern, dense.shape[-2:])
    bk, bn = pattern.block
    padded = np.zeros((*dense.shape[:-2], windows * units * bk, blocks * bn), dense.dtype)
    padded[..., : dense.shape[-2], : dense.shape[-1]] = dense
    return np.moveaxis(padded.reshape(*dense.shape[:-2], windows, units, bk, blocks, bn), -2, -4)


def draw(
    rng: np.random.Generator, shape, pattern: nms.NMPattern | str, dtype: Any = np.float32, fill=integers
) -> nms.NMSparse:
    """A weight with random kept units, packed by NumPy alone."""
    pattern = nms.NMPattern.parse(pattern) if isinstance(pattern, str) else pattern
    units = cut(fill(rng, shape, dtype), pattern)
    groups = rng.random((*units.shape[:-3], units.shape[-3] // pattern.m, pattern.m))
    keep = (np.argsort(np.argsort(groups)) < pattern.n).reshape(units.shape[:-2])
    values = units[keep].reshape(*units.shape[:-3], -1, *pattern.block)
    return nms.NMSparse(jnp.asarray(values), jnp.asarray(pack(keep)), shape=shape, pattern=pattern)


def pack(keep: np.ndarray) -> np.ndarray:
    """bool [..., units] -> the mask; its word axis goes where there is one word."""
    words = math.ceil(keep.shape[-1] / 32)
    bits = np.zeros((*keep.shape[:-1], 32 * words), bool)
    bits[..., : keep.shape[-1]] = keep
    mask = np.packbits(bits, axis=-1, bitorder="little").view(np.uint32)
    return mask if words > 1 else mask[..., 0]


def kept(w: nms.NMSparse) -> np.ndarray:
    """The mask unpacked: bool [..., windows, out_blocks, units]."""
    units, windows, blocks = _geometry(w.pattern, w.shape[-2:])
    mask = np.ascontiguousarray(np.asarray(w.mask)).reshape(*w.shape[:-2], windows, blocks, -1)
    bits = np.unpackbits(mask.view(np.uint8), axis=-1, bitorder="little").astype(bool)
    assert not bits[..., units:].any(), "bits beyond the window"
    return bits[..., :units]


def dense(w: nms.NMSparse) -> np.ndarray:
    """The weight as a dense float64 matrix."""
    keep, (bk, bn) = kept(w), w.pattern.block
    units = np.zeros((*keep.shape, bk, bn))
    units[keep] = np.asarray(w.values).astype(np.float64).reshape(-1, bk, bn)
    whole = np.moveaxis(units, -4, -2).reshape(*w.shape[:-2], keep.shape[-3] * keep.shape[-1] * bk, -1)
    whole = whole[..., : w.shape[-2], : w.shape[-1]]
    return whole if w.scales is None else whole * np.asarray(w.scales, np.float64)[..., None, :]


def scatter(w: nms.NMSparse):
    """values -> the dense matrix, as a differentiable function of jax.numpy on positions found by NumPy."""
    (bk, bn), (rows, columns) = w.pattern.block, w.shape[-2:]
    keep = kept(w)
    *lead, window, block, unit = (index.reshape(*keep.shape[:-1], -1) for index in np.nonzero(keep))
    row = (window * keep.shape[-1] + unit)[..., None, None] * bk + np.arange(bk)[:, None]
    column = block[..., None, None] * bn + np.arange(bn)
    lead = tuple(index[..., None, None] for index in lead)
    padded = (*w.shape[:-2], keep.shape[-3] * keep.shape[-1] * bk, keep.shape[-2] * bn)

    def to_dense(values):
        return jnp.zeros(padded, values.dtype).at[(*lead, row, column)].set(values)[..., :rows, :columns]

    return to_dense


# Products.

_erf = np.vectorize(math.erf, otypes=[np.float64])
_FUNCTIONS = {
    None: lambda y: y,
    "relu": lambda y: np.maximum(y, 0),
    "gelu": lambda y: y * 0.5 * (1 + _erf(y / math.sqrt(2))),
    "gelu_tanh": lambda y: y * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3))),
    "silu": lambda y: y / (1 + np.exp(-y)),
}


def spmm(x, w: nms.NMSparse, *, transpose: bool = False, bias=None, activation: str | None = None) -> np.ndarray:
    """act(x W + bias), or x Wᵀ, in float64."""
    matrix, x = dense(w), np.asarray(x).astype(np.float64)
    lead = w.shape[:-2]
    rows = x.reshape(*lead, -1, x.shape[-1])
    y = rows @ (np.swapaxes(matrix, -1, -2) if transpose else matrix)
    if bias is not None:
        y = y + np.broadcast_to(np.asarray(bias).astype(np.float64), (*lead, w.shape[-1]))[..., None, :]
    return _FUNCTIONS[activation](y).reshape(*x.shape[:-1], y.shape[-1])


def sddmm(x, g, w: nms.NMSparse) -> np.ndarray:
    """(xᵀ g) at the kept units, in float64 and the shape of the values."""
    lead = w.shape[:-2]
    x, g = (np.asarray(a).astype(np.float64).reshape(*lead, -1, a.shape[-1]) for a in (x, g))
    product = np.swapaxes(x, -1, -2) @ g
    return cut(product, w.pattern)[kept(w)].reshape(w.values.shape)
