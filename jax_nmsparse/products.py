"""The primitives for operands as users shape them: any axes of tokens, batch axes of the weight in front.

Where explicit mesh axes split an operand, every device multiplies its own part (see `explicit`).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_nmsparse import explicit, primitives, reference
from jax_nmsparse.layout import Layout
from jax_nmsparse.meshes import Axes, add_parts


def tokens_shape(x: Any, lead: int) -> tuple[int, int, int]:
    """x with its first `lead` axes merged, and its axes of tokens."""
    batch = int(np.prod(x.shape[:lead], dtype=np.int64))
    tokens = int(np.prod(x.shape[lead:-1], dtype=np.int64))
    return batch, tokens, x.shape[-1]


def _flat(array: jax.Array, lead: int) -> jax.Array:
    """Merges the batch axes of a weight's array into one."""
    return array.reshape(int(np.prod(array.shape[:lead], dtype=np.int64)), *array.shape[lead:])


def _activation_factors(x: jax.Array, lead: int, features: str) -> explicit.Factors:
    tokens = x.ndim - lead - 1
    return (*(f"b{i}" for i in range(lead)), *(f"t{i}" for i in range(tokens)), features)


def spmm(
    x: jax.Array,
    values: jax.Array,
    mask: jax.Array,
    scales: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    layout: Layout,
    activation: str | None = None,
    dtype: Any,
    out_sharding: Any = None,
    **static: Any,
) -> jax.Array:
    """``act((x W) * scales + bias)``: ``[*lead, ..., in_features]`` -> ``[*lead, ..., out_features]``.

    The mask has its word axis; values, mask, scales and bias have the batch axes `lead`.
    """
    lead = values.ndim - 5

    def local(layout, x, values, mask, scales, bias, activation, dtype):
        extras = [None if e is None else _flat(e, lead) for e in (scales, bias)]
        weight = (_flat(values, lead), _flat(mask, lead))
        y = primitives.spmm(
            x.reshape(tokens_shape(x, lead)),
            *weight,
            *extras,
            layout=layout,
            activation=activation,
            dtype=dtype,
            **static,
        )
        return y.reshape(*x.shape[:-1], layout.out_features)

    if not explicit.is_split(x, values, mask, scales, bias):
        return explicit.place("spmm", local(layout, x, values, mask, scales, bias, activation, dtype), out_sharding)

    def part(piece: Layout, parts: tuple[jax.Array, ...], axes: Axes, scatter: int | None) -> jax.Array:
        x, values, mask, *extras = parts
        scales, bias = primitives.split_extras(extras, has_scales, has_bias)
        if not axes:
            return local(piece, x, values, mask, scales, bias, activation, dtype)
        accumulator = reference.accumulator_dtype(x.dtype, values.dtype)
        acc = add_parts(local(piece, x, values, mask, None, None, None, accumulator), axes, scatter)
        flat = [None if e is None else _flat(e, lead) for e in (scales, bias)]
        return reference.epilogue(acc.reshape(tokens_shape(acc, lead)), *flat, activation, dtype).reshape(acc.shape)

    has_scales, has_bias = scales is not None, bias is not None
    operands = [(x, _activation_factors(x, lead, "w")), *((a, explicit.factors(lead, "wo", a)) for a in (values, mask))]
    operands += [(e, explicit.factors(lead, "c", e)) for e in (scales, bias) if e is not None]
    result = _activation_factors(x, lead, "o")
    return explicit.run("spmm", layout, operands, result, part, summed="w", out_sharding=out_sharding)


def spmm_t(
    g: jax.Array, values: jax.Array, mask: jax.Array, *, layout: Layout, dtype: Any, out_sharding: Any = None, **static
) -> jax.Array:
    """``g Wᵀ``: ``[*lead, ..., out_features]`` -> ``[*lead, ..., in_features]``."""
    lead = values.ndim - 5

    def local(layout, g, values, mask, dtype):
        canonical = (g.reshape(tokens_shape(g, lead)), _flat(values, lead), _flat(mask, lead))
        dx = primitives.spmm_t(*canonical, layout=layout, dtype=dtype, **static)
        return dx.reshape(*g.shape[:-1], layout.in_features)

    if not explicit.is_split(g, values, mask):
        return explicit.place("spmm", local(layout, g, values, mask, dtype), out_sharding)

    def part(piece: Layout, parts: tuple[jax.Array, ...], axes: Axes, scatter: int | None) -> jax.Array:
        accumulator = reference.accumulator_dtype(g.dtype, values.dtype) if axes else dtype
        return add_parts(local(piece, *parts, accumulator), axes, scatter).astype(dtype)

    operands = [(g, _activation_factors(g, lead, "o")), *((a, explicit.factors(lead, "wo", a)) for a in (values, mask))]
    result = _activation_factors(g, lead, "w")
    return explicit.run("spmm", layout, operands, result, part, summed="o", out_sharding=out_sharding)


def sddmm(
    x: jax.Array, g: jax.Array, mask: jax.Array, *, layout: Layout, dtype: Any, out_sharding: Any = None, **static
) -> jax.Array:
    """``xᵀ g`` at the kept units, in the shape of the values: ``[*lead, windows, out_blocks, q, bk, bn]``."""
    lead = mask.ndim - 3

    def local(layout, x, g, mask, dtype):
        canonical = (x.reshape(tokens_shape(x, lead)), g.reshape(tokens_shape(g, lead)), _flat(mask, lead))
        dv = primitives.sddmm(*canonical, layout=layout, dtype=dtype, **static)
        return dv.reshape(*mask.shape[:lead], *layout.values_shape)

    if not explicit.is_split(x, g, mask):
        return explicit.place("sddmm", local(layout, x, g, mask, dtype), out_sharding)

    def part(piece: Layout, parts: tuple[jax.Array, ...], axes: Axes, scatter: int | None) -> jax.Array:
        accumulator = jnp.promote_types(dtype, jnp.float32) if axes else dtype
        return add_parts(local(piece, *parts, accumulator), axes, scatter).astype(dtype)

    operands = [(x, _activation_factors(x, lead, "w")), (g, _activation_factors(g, lead, "o"))]
    operands.append((mask, explicit.factors(lead, "wo", mask)))
    result = explicit.factors(lead, "wo", jax.ShapeDtypeStruct((*mask.shape[:lead], *layout.values_shape), dtype))
    return explicit.run("sddmm", layout, operands, result, part, summed="t", out_sharding=out_sharding)
