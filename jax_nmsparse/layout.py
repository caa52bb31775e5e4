"""The geometry of the format and the bit operations on it, as pure functions of arrays.

A weight ``[in_features, out_features]`` is cut into units of ``bk x bn``; ``window_units`` units, consecutive along
``in_features``, are a window. Of every window and column block, ``q`` units are kept:

* ``values[..., window, out_block, j, :, :]`` is the j-th kept unit in ascending order of its position,
* bit ``u % 32`` of ``mask[..., window, out_block, u // 32]`` is set where unit ``u`` of the window is kept.

Inside this module and below it the mask always has its word axis; `NMSparse` drops it where there is one word.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_nmsparse.pattern import NMPattern

FORMAT_VERSION = 1
"""Version of the layout of values and mask; written into checkpoints. Frozen: see docs/decisions.md."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """The static geometry of one weight: its pattern and its logical dense size."""

    pattern: NMPattern
    in_features: int
    out_features: int

    @property
    def bk(self) -> int:
        return self.pattern.block[0]

    @property
    def bn(self) -> int:
        return self.pattern.block[1]

    @property
    def q(self) -> int:
        return self.pattern.q

    @property
    def window_units(self) -> int:
        return self.pattern.window_units

    @property
    def rows_per_window(self) -> int:
        return self.window_units * self.bk

    @property
    def windows(self) -> int:
        return -(-self.in_features // self.rows_per_window)

    @property
    def out_blocks(self) -> int:
        return -(-self.out_features // self.bn)

    @property
    def padded_in(self) -> int:
        return self.windows * self.rows_per_window

    @property
    def padded_out(self) -> int:
        return self.out_blocks * self.bn

    @property
    def values_shape(self) -> tuple[int, ...]:
        return (self.windows, self.out_blocks, self.q, self.bk, self.bn)

    @property
    def mask_shape(self) -> tuple[int, ...]:
        """With the word axis."""
        return (self.windows, self.out_blocks, self.pattern.mask_words)

    def values_bytes(self, dtype) -> int:
        return int(np.prod(self.values_shape, dtype=np.int64)) * jnp.dtype(dtype).itemsize

    def mask_bytes(self) -> int:
        return int(np.prod(self.mask_shape, dtype=np.int64)) * 4


def to_units(dense: jax.Array, layout: Layout) -> jax.Array:
    """``[..., in, out]`` -> ``[..., windows, out_blocks, window_units, bk, bn]``, padded with zeros."""
    lead = dense.shape[:-2]
    pad = [(0, 0)] * len(lead) + [(0, layout.padded_in - dense.shape[-2]), (0, layout.padded_out - dense.shape[-1])]
    units = jnp.pad(dense, pad).reshape(
        *lead, layout.windows, layout.window_units, layout.bk, layout.out_blocks, layout.bn
    )
    return jnp.moveaxis(units, -2, -4)


def from_units(units: jax.Array, layout: Layout) -> jax.Array:
    """The inverse of `to_units`; padding is cut off."""
    lead = units.shape[:-5]
    dense = jnp.moveaxis(units, -4, -2).reshape(*lead, layout.padded_in, layout.padded_out)
    return dense[..., : layout.in_features, : layout.out_features]


def pack_bits(keep: jax.Array) -> jax.Array:
    """bool ``[..., units]`` -> uint32 ``[..., ceil(units / 32)]``, unit u at bit ``u % 32`` of word ``u // 32``."""
    units = keep.shape[-1]
    words = -(-units // 32)
    keep = jnp.pad(keep, [(0, 0)] * (keep.ndim - 1) + [(0, 32 * words - units)])
    bits = keep.reshape(*keep.shape[:-1], words, 32).astype(jnp.uint32) << jnp.arange(32, dtype=jnp.uint32)
    return jnp.sum(bits, axis=-1, dtype=jnp.uint32)


def unpack_bits(mask: jax.Array, units: int) -> jax.Array:
    """uint32 ``[..., words]`` -> bool ``[..., units]``."""
    bits = (mask[..., None] >> jnp.arange(32, dtype=jnp.uint32)) & jnp.uint32(1)
    return bits.reshape(*mask.shape[:-1], 32 * mask.shape[-1])[..., :units] != 0


def kept_positions(mask: jax.Array, layout: Layout) -> jax.Array:
    """Positions of the kept units inside their window, ascending: int32 ``[..., q]``.

    Where a corrupt mask holds fewer than q bits, the missing positions are the last unit of the window.
    """

    def lowest(words):
        """Position of the lowest set bit over all words, and the words without it."""
        position = jnp.full(words[0].shape, layout.window_units - 1, jnp.int32)
        found = jnp.zeros(words[0].shape, bool)
        rest = []
        for v, word in enumerate(words):
            bit = word & (~word + jnp.uint32(1))
            here = (word != 0) & ~found
            trailing = lax.population_count(bit - jnp.uint32(1)).astype(jnp.int32)
            position = jnp.where(here, jnp.minimum(32 * v + trailing, layout.window_units - 1), position)
            rest.append(jnp.where(here, word ^ bit, word))
            found |= here
        return rest, position

    words = [mask[..., v] for v in range(mask.shape[-1])]
    _, positions = lax.scan(lambda words, _: lowest(words), words, length=layout.q, unroll=min(layout.q, 4))
    return jnp.moveaxis(positions, 0, -1)


def compress(units: jax.Array, mask: jax.Array, layout: Layout) -> jax.Array:
    """The kept units: ``[..., windows, out_blocks, window_units, bk, bn]`` -> ``[..., q, bk, bn]``."""
    positions = kept_positions(mask, layout)
    return jnp.take_along_axis(units, positions[..., None, None], axis=-3, mode="clip")


def expand(values: jax.Array, mask: jax.Array, layout: Layout) -> jax.Array:
    """The inverse of `compress`: zero where no unit is kept."""
    keep = unpack_bits(mask, layout.window_units)
    rank = jnp.clip(_ranks(mask, layout), 0, layout.q - 1)
    units = jnp.take_along_axis(values, rank[..., None, None], axis=-3, mode="clip")
    return jnp.where(keep[..., None, None], units, jnp.zeros((), values.dtype))


def _ranks(mask: jax.Array, layout: Layout) -> jax.Array:
    """For every unit of a window the number of kept units before it: int32 ``[..., window_units]``."""
    # From iota: a NumPy constant would be hoisted out of a partitioned function, which may not close over arrays.
    unit = jnp.arange(layout.window_units)
    below = (jnp.uint32(1) << (unit % 32).astype(jnp.uint32)) - jnp.uint32(1)
    word = jnp.take(mask, unit // 32, axis=-1, mode="clip")
    before = lax.population_count(word & below).astype(jnp.int32)
    if layout.pattern.mask_words == 1:
        return before
    whole = lax.population_count(mask).astype(jnp.int32)
    return before + jnp.take(jnp.cumsum(whole, axis=-1) - whole, unit // 32, axis=-1, mode="clip")


def _ordered(scores: jax.Array) -> jax.Array:
    """Integers in the order of floats, NaN beside Inf; subnormal numbers survive where arithmetic flushes them."""
    signed = jnp.dtype(f"int{8 * scores.dtype.itemsize}")
    bits = lax.bitcast_convert_type(scores, signed)
    largest = lax.bitcast_convert_type(jnp.array(jnp.inf, scores.dtype), signed)
    magnitude = bits & jnp.iinfo(signed).max
    return jnp.where((bits < 0) & (magnitude <= largest), -magnitude, jnp.minimum(magnitude, largest))


def best_units(scores: jax.Array, n: int | jax.Array) -> jax.Array:
    """Which n units of every group have the largest score; ties to the lowest position, NaN above everything.

    Args:
      scores: float ``[..., m]``, a group along the last axis.
      n: How many to keep, 0 to m; it may be traced.

    Returns:
      bool, of the shape of scores.
    """
    groups, m = _ordered(scores), scores.shape[-1]
    # A unit is kept when fewer than n units of its group come before it. Counting by m comparisons per unit fuses into
    # one pass over the scores; sorting groups takes XLA's CPU backend many times as long.
    before = jnp.zeros(groups.shape, jnp.uint8)
    position = np.arange(m)
    for j in range(m):
        other = groups[..., j : j + 1]
        ahead = jnp.where(position > j, other >= groups, other > groups)
        before += ahead.astype(jnp.uint8)
    return before < n


def select(scores: jax.Array, layout: Layout, n: int | jax.Array | None = None) -> jax.Array:
    """The mask of the n units of largest score in every group (`best_units`).

    Args:
      scores: float ``[..., windows, out_blocks, window_units]``.
      layout: Of the weight.
      n: Another number than the pattern's.

    Returns:
      bool, of the shape of scores.
    """
    m = layout.pattern.m
    groups = scores.reshape(*scores.shape[:-1], layout.window_units // m, m)
    return best_units(groups, layout.pattern.n if n is None else n).reshape(scores.shape)
