"""From scores of elements to the units that a pattern keeps."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from jax_nmsparse import explicit
from jax_nmsparse import layout as layout_lib
from jax_nmsparse.layout import Layout


def score_dtype(*dtypes) -> jnp.dtype:
    """float64 where one of the operands has it, otherwise float32: what scores and statistics are computed in."""
    return jnp.dtype(jnp.float64 if jnp.dtype(jnp.float64) in map(jnp.dtype, dtypes) else jnp.float32)


def over_largest(reference: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Arrays divided by the largest magnitude of a reference, by 1 where that is 0.

    Sums of the reference's squares then neither overflow nor vanish.
    """
    peak = jnp.max(jnp.abs(reference), initial=0)
    # XLA may multiply by the reciprocal, which must not be subnormal.
    shift = jnp.where(peak > 1, 2.0**-8, 1.0).astype(peak.dtype)
    divisor = jnp.where(peak == 0, 1, peak * shift)
    return tuple(array * shift / divisor for array in arrays)


def check_scores(op: str, scores: Any) -> jax.Array:
    scores = jnp.asarray(scores)
    if scores.ndim < 2 or 0 in scores.shape[-2:]:
        raise ValueError(
            f"{op}: scores has shape {scores.shape}, expected [..., in_features, out_features], at least one of each"
        )
    if jnp.issubdtype(scores.dtype, jnp.complexfloating):
        raise TypeError(f"{op}: scores has dtype {scores.dtype.name}, expected real numbers; take their abs")
    explicit.check_whole_array(op, "scores", scores)
    return scores


def unit_scores(scores: jax.Array, layout: Layout) -> jax.Array:
    """Sums of the scores of every unit, padding lost to all others.

    Where a sum might overflow, all scores of its window are scaled down by the same power of two, which keeps their
    order: only scores that are infinite themselves tie with one another.

    Args:
      scores: float ``[..., in_features, out_features]``.
      layout: Of the weight.

    Returns:
      float ``[..., windows, out_blocks, window_units]``; -inf where a unit lies beyond in_features.
    """
    units = layout_lib.to_units(scores, layout)
    unit = units[..., 0, 0] if layout.pattern.is_elementwise else jnp.sum(_scaled(units, layout), axis=(-2, -1))
    first_row = jnp.arange(layout.windows * layout.window_units) * layout.bk
    outside = (first_row >= layout.in_features).reshape(layout.windows, 1, layout.window_units)
    return jnp.where(outside, -jnp.inf, unit)


def _scaled(units: jax.Array, layout: Layout) -> jax.Array:
    size = layout.bk * layout.bn
    magnitude = jnp.where(jnp.isfinite(units), jnp.abs(units), 0)
    largest = jnp.max(magnitude, axis=(-3, -2, -1), keepdims=True)
    limit = float(jnp.finfo(units.dtype).max) / size
    return units * jnp.where(largest > limit, 2.0 ** -math.ceil(math.log2(size)), 1.0).astype(units.dtype)


def spread(units: jax.Array, layout: Layout) -> jax.Array:
    """One flag for every unit ``[..., windows, out_blocks, window_units]`` -> every element ``[..., in, out]``."""
    elements = jnp.broadcast_to(units[..., None, None], (*units.shape, layout.bk, layout.bn))
    return layout_lib.from_units(elements, layout)


@functools.partial(explicit.by_parts, trailing=(2,))
@jax.jit(static_argnums=1)
def scored_mask(scores: jax.Array, layout: Layout) -> jax.Array:
    """The mask, with its word axis, of the n units of largest summed score in every group; scores real or bool."""
    units = unit_scores(scores.astype(score_dtype(scores.dtype)), layout)
    return layout_lib.pack_bits(layout_lib.select(units, layout))


@jax.jit(static_argnums=1)
def magnitude_units(dense: jax.Array, layout: Layout, n: int | jax.Array | None = None) -> jax.Array:
    """Which units are kept by magnitude, n of every group (by default the pattern's): bool, one for every unit."""
    scores = jnp.abs(dense.astype(score_dtype(dense.dtype)))
    return layout_lib.select(unit_scores(scores, layout), layout, n)


@functools.partial(explicit.by_parts, trailing=(2, 0), op="sr_ste")
@jax.jit(static_argnums=2)
def magnitude_elements(dense: jax.Array, n: jax.Array | None, layout: Layout) -> jax.Array:
    """Which elements are kept by magnitude, n units of every group (by default the pattern's): bool, as dense."""
    return spread(magnitude_units(dense, layout, n), layout)


@functools.partial(explicit.by_parts, trailing=(2,))
@jax.jit(static_argnums=1)
def magnitude_mask(dense: jax.Array, layout: Layout) -> jax.Array:
    """The mask, with its word axis, of the units kept by magnitude."""
    return layout_lib.pack_bits(magnitude_units(dense, layout))
