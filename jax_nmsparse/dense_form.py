"""Conversions between a weight's arrays and the dense form, jitted; on explicit meshes on each device's part.

Masks have their word axis here.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jax_nmsparse import explicit
from jax_nmsparse import layout as layout_lib
from jax_nmsparse.layout import Layout


def _by_parts(*trailing: int):
    """On meshes of explicit axis types, the function of each device's part of the weight."""
    return functools.partial(explicit.by_parts, trailing=trailing)


def _nonzero(x: jax.Array) -> jax.Array:
    """x != 0 by bits, so that subnormal numbers survive a device that flushes them; -0.0 is zero."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x != 0
    unsigned = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    return (lax.bitcast_convert_type(x, unsigned) << 1) != 0


def _any_in_unit(flags: jax.Array, layout: Layout) -> jax.Array:
    return jnp.any(layout_lib.to_units(flags, layout), axis=(-2, -1))


@_by_parts(2)
@jax.jit(static_argnums=1)
def nonzero_mask(dense: jax.Array, layout: Layout) -> tuple[jax.Array, jax.Array]:
    """The mask of the nonzero units, filled up to n in every group, and which groups hold more than n."""
    nonzero = _any_in_unit(_nonzero(dense), layout)
    groups = nonzero.reshape(*nonzero.shape[:-1], layout.window_units // layout.pattern.m, layout.pattern.m)
    too_many = jnp.sum(groups, axis=-1) > layout.pattern.n
    return layout_lib.pack_bits(layout_lib.select(nonzero.astype(jnp.float32), layout)), too_many


@_by_parts(2, 3)
@jax.jit(static_argnums=2)
def _compress(dense: jax.Array, mask: jax.Array, layout: Layout) -> jax.Array:
    return layout_lib.compress(layout_lib.to_units(dense, layout), mask, layout)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def gather_units(dense: jax.Array, mask: jax.Array, layout: Layout) -> jax.Array:
    """The kept units, moved as bits: XLA's CPU backend moves bfloat16 through float32 and flushes subnormal numbers.

    The two casts are outside the jitted function, where XLA would cancel them.
    """
    if not jnp.issubdtype(dense.dtype, jnp.floating):
        return _compress(dense, mask, layout)
    bits = lax.bitcast_convert_type(dense, jnp.dtype(f"uint{8 * dense.dtype.itemsize}"))
    return lax.bitcast_convert_type(_compress(bits, mask, layout), dense.dtype)


@gather_units.defjvp
def gather_units_jvp(layout, primals, tangents):
    # Linear in dense: the tangent is gathered as numbers, so that it can be transposed.
    return gather_units(*primals, layout), _compress(tangents[0], primals[1], layout)


positions = _by_parts(3)(jax.jit(layout_lib.kept_positions, static_argnums=1))


@_by_parts(5, 3, 1)
@jax.jit(static_argnums=3)
def dense(values: jax.Array, mask: jax.Array, scales: jax.Array | None, layout: Layout) -> jax.Array:
    values = values if scales is None else values.astype(jnp.float32)
    dense = layout_lib.from_units(layout_lib.expand(values, mask, layout), layout)
    return dense if scales is None else dense * scales[..., None, :]


@_by_parts(3)
@jax.jit(static_argnums=1)
def kept(mask: jax.Array, layout: Layout) -> jax.Array:
    bits = layout_lib.unpack_bits(mask, layout.window_units)
    units = jnp.broadcast_to(bits[..., None, None], bits.shape + (layout.bk, layout.bn))
    return layout_lib.from_units(units, layout)


def scales_like_values(scales: jax.Array, layout: Layout) -> jax.Array:
    """``[..., out_features]`` -> ``[..., 1, out_blocks, 1, 1, bn]``; padding columns get 1."""
    pad = [(0, 0)] * (scales.ndim - 1) + [(0, layout.padded_out - layout.out_features)]
    padded = jnp.pad(scales, pad, constant_values=1.0)
    return padded.reshape(*scales.shape[:-1], 1, layout.out_blocks, 1, 1, layout.bn)


@jax.jit(static_argnums=2)
def zero_padding(values: jax.Array, mask: jax.Array, layout: Layout) -> jax.Array:
    """Values with zeros where a kept unit reaches beyond in_features or out_features."""
    if layout.padded_in == layout.in_features and layout.padded_out == layout.out_features:
        return values
    unit = positions(mask, layout) + layout.window_units * jnp.arange(layout.windows)[:, None, None]
    row = unit[..., None, None] * layout.bk + jnp.arange(layout.bk)[:, None]
    column = (jnp.arange(layout.out_blocks)[:, None] * layout.bn + jnp.arange(layout.bn))[:, None, None, :]
    inside = (row < layout.in_features) & (column < layout.out_features)
    return jnp.where(inside, values, jnp.zeros((), values.dtype))
