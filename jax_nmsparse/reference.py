"""The meaning of the three primitives in plain jax.numpy: what every kernel is compared with, and what runs where there
is no kernel.

All functions take canonical operands, always with one batch axis:

    x, dx   [batch, tokens, in_features]        values  [batch, windows, out_blocks, q, bk, bn]
    g, y    [batch, tokens, out_features]       mask    [batch, windows, out_blocks, words]

A weight is expanded a few windows at a time, so temporary memory is bounded by ``temporary_bytes`` whatever
in_features is, and no dense [in_features, out_features] buffer exists. The ``dense_*`` functions do expand all of it:
they are the "dense" implementation. Where a function takes `expand` or `compress`, that makes the dense form of a
weight or takes the kept units of a dense matrix (`Expand`, `Compress`).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jax_nmsparse import layout as layout_lib
from jax_nmsparse.layout import Layout

_CHUNK_ROWS = 1024

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "silu": jax.nn.silu,
}


Expand = Callable[[jax.Array, jax.Array, Layout, jnp.dtype], jax.Array]
"""(values, mask, layout, dtype) -> the weight as a dense [batch, in_features, out_features] of that dtype."""
Compress = Callable[[jax.Array, jax.Array, Layout], jax.Array]
"""(dense [batch, in_features, out_features], mask, layout) -> the kept units, as values."""


def accumulator_dtype(x_dtype, values_dtype) -> jnp.dtype:
    """Where sums are kept: int32 for int8 times int8, float64 for float64, otherwise float32."""
    dtypes = {jnp.dtype(x_dtype), jnp.dtype(values_dtype)}
    if dtypes == {jnp.dtype(jnp.int8)}:
        return jnp.dtype(jnp.int32)
    return jnp.dtype(jnp.float64 if jnp.dtype(jnp.float64) in dtypes else jnp.float32)


def operand_dtype(x_dtype, values_dtype) -> jnp.dtype:
    """The dtype in which products are formed; quantised values are exact in every float dtype of x."""
    x_dtype, values_dtype = jnp.dtype(x_dtype), jnp.dtype(values_dtype)
    if x_dtype == values_dtype == jnp.int8:
        return x_dtype
    if x_dtype.itemsize == 1:
        x_dtype = jnp.dtype(jnp.bfloat16)
    return x_dtype if values_dtype.itemsize == 1 else jnp.promote_types(x_dtype, values_dtype)


def temporary_bytes(layout: Layout, batch: int, dtype) -> int:
    """Bound on the temporary memory of one call beyond its operands and result: four expanded chunks."""
    rows = min(layout.padded_in, max(_CHUNK_ROWS, layout.rows_per_window))
    return 4 * batch * rows * layout.padded_out * max(4, jnp.dtype(dtype).itemsize)


def _chunks(layout: Layout) -> tuple[int, int, int]:
    """Windows in a chunk, whole chunks, and windows left over."""
    size = min(layout.windows, max(1, _CHUNK_ROWS // layout.rows_per_window))
    return size, layout.windows // size, layout.windows % size


def _pad_axis(x: jax.Array, axis: int, size: int) -> jax.Array:
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, pad) if size != x.shape[axis] else x


def _windows(array: jax.Array, start, size: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(array, start, size, axis=1)


def _rows(array: jax.Array, start, size: int, layout: Layout) -> jax.Array:
    """The slice of x that `size` windows from `start` on multiply."""
    rows = layout.rows_per_window
    return lax.dynamic_slice_in_dim(array, start * rows, size * rows, axis=2)


def _sub_layout(layout: Layout, windows: int) -> Layout:
    return Layout(layout.pattern, windows * layout.rows_per_window, layout.out_features)


def _expand(values, mask, layout: Layout, dtype) -> jax.Array:
    """The weight as a dense [batch, in_features, out_features]."""
    return layout_lib.from_units(layout_lib.expand(values, mask, layout).astype(dtype), layout)


def _compress(dense, mask, layout: Layout) -> jax.Array:
    """The kept units of a dense [batch, in_features, out_features]."""
    return layout_lib.compress(layout_lib.to_units(dense, layout), mask, layout)


def _dense_windows(values, mask, start, size: int, layout: Layout, dtype, expand: Expand = _expand) -> jax.Array:
    """Windows [start, start + size) as a dense [batch, rows, out_features]."""
    return expand(_windows(values, start, size), _windows(mask, start, size), _sub_layout(layout, size), dtype)


def _dot(a, b, contract: tuple[int, int], accumulator, precision) -> jax.Array:
    """Batched product over axis 0, contracting the given axes."""
    dims = (((contract[0],), (contract[1],)), ((0,), (0,)))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=accumulator)


def _rounded_dot(a, b, contract: tuple[int, int], accumulator, precision, dtype) -> jax.Array:
    """The same, rounded to dtype: by the product itself where that is the dtype of its operands, as in `jnp.dot`."""
    return _dot(a, b, contract, dtype if dtype == a.dtype else accumulator, precision).astype(dtype)


def epilogue(acc: jax.Array, scales, bias, activation: str | None, dtype) -> jax.Array:
    """act(acc * scales + bias) in the accumulator's precision, rounded once to dtype.

    acc is [*batch, ..., out_features]; scales and bias are [*batch, out_features].
    """

    def column(extra: jax.Array) -> jax.Array:
        between = [1] * (acc.ndim - extra.ndim)
        return extra.reshape(*extra.shape[:-1], *between, extra.shape[-1]).astype(acc.dtype)

    if (scales is not None or bias is not None or activation) and not jnp.issubdtype(acc.dtype, jnp.floating):
        acc = acc.astype(jnp.float32)
    if scales is not None:
        acc = acc * column(scales)
    if bias is not None:
        acc = acc + column(bias)
    if activation is not None:
        acc = ACTIVATIONS[activation](acc)
    return acc.astype(dtype)


def spmm(x, values, mask, *, layout: Layout, dtype, precision=None) -> jax.Array:
    """y = x W: [batch, tokens, out_features]."""
    accumulator, operand = accumulator_dtype(x.dtype, values.dtype), operand_dtype(x.dtype, values.dtype)
    x = _pad_axis(x.astype(operand), 2, layout.padded_in)
    size, count, rest = _chunks(layout)

    def part(start, size):
        dense = _dense_windows(values, mask, start, size, layout, operand)
        return _dot(_rows(x, start, size, layout), dense, (2, 1), accumulator, precision)

    y = part(0, size)
    y = lax.fori_loop(1, count, lambda i, y: y + part(i * size, size), y)
    if rest:
        y = y + part(count * size, rest)
    return y.astype(dtype)


def spmm_t(g, values, mask, *, layout: Layout, dtype, precision=None, expand: Expand = _expand) -> jax.Array:
    """dx = g Wᵀ: [batch, tokens, in_features]."""
    accumulator, operand = accumulator_dtype(g.dtype, values.dtype), operand_dtype(g.dtype, values.dtype)
    g = g.astype(operand)
    size, count, rest = _chunks(layout)

    def part(start, size):
        dense = _dense_windows(values, mask, start, size, layout, operand, expand)
        return _rounded_dot(g, dense, (2, 2), accumulator, precision, dtype)

    def write(i, dx):
        return lax.dynamic_update_slice_in_dim(dx, part(i * size, size), i * size * layout.rows_per_window, axis=2)

    first = part(0, size)
    if count == 1 and not rest:
        return first[..., : layout.in_features]
    dx = lax.fori_loop(1, count, write, _pad_axis(first, 2, layout.padded_in))
    if rest:
        start = count * size * layout.rows_per_window
        dx = lax.dynamic_update_slice_in_dim(dx, part(count * size, rest), start, axis=2)
    return dx[..., : layout.in_features]


def sddmm(x, g, mask, *, layout: Layout, dtype, precision=None, compress: Compress = _compress) -> jax.Array:
    """dvalues = xᵀ g at the kept units: [batch, windows, out_blocks, q, bk, bn]."""
    accumulator, operand = accumulator_dtype(x.dtype, g.dtype), operand_dtype(x.dtype, g.dtype)
    x = _pad_axis(x.astype(operand), 2, layout.padded_in)
    g = g.astype(operand)
    size, count, rest = _chunks(layout)

    def part(start, size):
        product = _rounded_dot(_rows(x, start, size, layout), g, (1, 1), accumulator, precision, dtype)
        return compress(product, _windows(mask, start, size), _sub_layout(layout, size))

    def write(i, dv):
        return lax.dynamic_update_slice_in_dim(dv, part(i * size, size), i * size, axis=1)

    first = part(0, size)
    if count == 1 and not rest:
        return first
    dv = lax.fori_loop(1, count, write, _pad_axis(first, 1, layout.windows))
    return lax.dynamic_update_slice_in_dim(dv, part(count * size, rest), count * size, axis=1) if rest else dv


def dense_spmm(x, values, mask, *, layout: Layout, dtype, precision=None, expand: Expand = _expand) -> jax.Array:
    """`spmm` through the whole dense weight."""
    accumulator, operand = accumulator_dtype(x.dtype, values.dtype), operand_dtype(x.dtype, values.dtype)
    dense = expand(values, mask, layout, operand)
    return _rounded_dot(x.astype(operand), dense, (2, 1), accumulator, precision, dtype)


def dense_spmm_t(g, values, mask, *, layout: Layout, dtype, precision=None) -> jax.Array:
    """`spmm_t` through the whole dense weight."""
    accumulator, operand = accumulator_dtype(g.dtype, values.dtype), operand_dtype(g.dtype, values.dtype)
    dense = _expand(values, mask, layout, operand)
    return _rounded_dot(g.astype(operand), dense, (2, 2), accumulator, precision, dtype)


def dense_sddmm(x, g, mask, *, layout: Layout, dtype, precision=None) -> jax.Array:
    """`sddmm` through the whole dense gradient."""
    accumulator, operand = accumulator_dtype(x.dtype, g.dtype), operand_dtype(x.dtype, g.dtype)
    product = _rounded_dot(x.astype(operand), g.astype(operand), (1, 1), accumulator, precision, dtype)
    return _compress(product, mask, layout)
