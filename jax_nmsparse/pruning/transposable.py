"""Transposable masks: N:M along in_features and along out_features, so that W and its transpose are both N:M."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jax_nmsparse.array import check_pattern
from jax_nmsparse.layout import Layout
from jax_nmsparse.pattern import NMPattern
from jax_nmsparse.pruning.selection import check_scores, score_dtype

_EXACT_GROUP = 4
_SINKHORN_STEPS = 100
_SHARPNESS = 30.0


def transposable_mask(scores: ArrayLike, pattern: NMPattern | str) -> jax.Array:
    """A mask with at most n kept units in every group of m along in_features *and* along out_features.

    The weight is cut into tiles of ``m x m`` units; in each, at most n units of every row and column are kept, and
    their score is made large. For m up to 4 the best mask is found, by trying all of them. For larger m the mask is the
    better of two: units taken greedily in descending order (at least half of the optimum), and the same on the plan of
    an entropy-regularised transport problem (Sinkhorn iterations with capacities), which is usually closer.

    So ``g @ W^T`` is a product with an N:M weight too. Pack the weight by ``NMSparse.fromdense(where(mask, W, 0),
    pattern)``, and its transpose likewise: `prune` would fill groups that hold fewer than n with other units.

    Args:
      scores: ``[..., in_features, out_features]``, not negative: ``abs(W)``, or `wanda_scores`.
      pattern: The pattern, or a string such as "2:4"; groups along out_features are m units of bn columns.

    Returns:
      bool, of the shape of scores.

    Raises:
      ValueError, TypeError: For scores with fewer than two axes, without rows or columns, that are complex, or split
        over explicit mesh axes.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_nmsparse.pruning import transposable_mask
      >>> transposable_mask(jnp.array([[3.0, 2.0], [2.0, 0.0]]), "1:2").astype(int)
      Array([[0, 1],
             [1, 0]], dtype=int32)

    Source: Hubara et al., "Accelerated Sparse Neural Training: A Provable and Efficient Method to Find N:M Transposable
    Masks", NeurIPS 2021 (greedy with its bound); Cuturi, NeurIPS 2013 (Sinkhorn iterations).
    """
    pattern = check_pattern("transposable_mask", pattern)
    scores = check_scores("transposable_mask", scores)
    return _mask(scores, Layout(pattern, *scores.shape[-2:]))


@jax.jit(static_argnums=1)
def _mask(scores: jax.Array, layout: Layout) -> jax.Array:
    n, m, (bk, bn) = layout.pattern.n, layout.pattern.m, layout.pattern.block
    *lead, rows, columns = scores.shape
    down, across = -(-rows // (m * bk)), -(-columns // (m * bn))
    padding = [(0, 0)] * len(lead) + [(0, down * m * bk - rows), (0, across * m * bn - columns)]
    padded = jnp.pad(scores.astype(score_dtype(scores.dtype)), padding)
    units = padded.reshape(*lead, down, m, bk, across, m, bn).sum((-1, -4))
    tiles = jnp.moveaxis(units, -2, -3).reshape(-1, m, m)
    if m <= _EXACT_GROUP:
        keep = _exact(tiles, n)
    else:
        plans = (_greedy(tiles, n), _greedy(_transport(tiles, n), n))
        first, second = (jnp.sum(jnp.where(plan, tiles, 0), axis=(1, 2), keepdims=True) for plan in plans)
        keep = jnp.where(first >= second, *plans)
    keep = jnp.moveaxis(keep.reshape(*lead, down, across, m, m), -2, -3)
    keep = jnp.broadcast_to(keep[..., :, :, None, :, :, None], padded.reshape(*lead, down, m, bk, across, m, bn).shape)
    return keep.reshape(padded.shape)[..., :rows, :columns]


@functools.cache
def _maximal_masks(n: int, m: int) -> np.ndarray:
    """All masks with at most n in every row and column to which nothing can be added: bool ``[masks, m, m]``."""
    lines = [line for line in itertools.product((False, True), repeat=m) if sum(line) <= n]
    masks = np.array([mask for mask in itertools.product(lines, repeat=m) if np.sum(mask, axis=0).max() <= n])
    free = (masks.sum(2, keepdims=True) < n) & (masks.sum(1, keepdims=True) < n) & ~masks
    return masks[~free.any((1, 2))]


def _exact(tiles: jax.Array, n: int) -> jax.Array:
    m = tiles.shape[-1]
    masks = _maximal_masks(n, m)
    totals = jnp.matmul(
        tiles.reshape(-1, m * m), masks.reshape(-1, m * m).T.astype(tiles.dtype), precision=lax.Precision.HIGHEST
    )
    return jnp.asarray(masks)[jnp.argmax(totals, axis=1)]


def _greedy(tiles: jax.Array, n: int) -> jax.Array:
    """Takes units in descending order while their row and column have room: bool of the shape of tiles."""
    m = tiles.shape[-1]

    def one(tile: jax.Array) -> jax.Array:
        def take(room: tuple[jax.Array, jax.Array], unit: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            rows, columns = room
            fits = (rows[unit // m] > 0) & (columns[unit % m] > 0)
            one = fits.astype(jnp.int32)
            return (rows.at[unit // m].add(-one), columns.at[unit % m].add(-one)), fits

        order = jnp.argsort(tile.reshape(-1), descending=True, stable=True)
        _, taken = lax.scan(take, (jnp.full(m, n, jnp.int32), jnp.full(m, n, jnp.int32)), order)
        return jnp.zeros(m * m, bool).at[order].set(taken).reshape(m, m)

    return jax.vmap(one)(tiles)


def _transport(tiles: jax.Array, n: int) -> jax.Array:
    """Logarithms of the plan P, 0 <= P <= 1, whose rows and columns sum to n and that maximises <P, S> + entropy.

    Projections onto the three constraints in turn; the cap at 1 carries its own correction (Dykstra).
    """
    peak = jnp.max(tiles, axis=(1, 2), keepdims=True)
    logits = _SHARPNESS * tiles / jnp.where(peak > 0, peak, 1)
    wanted = jnp.log(jnp.asarray(n, tiles.dtype))

    def step(_: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        plan, correction = state
        for axis in (1, 2):
            plan = plan - jax.nn.logsumexp(plan, axis=axis, keepdims=True) + wanted
        raised = plan + correction
        plan = jnp.minimum(raised, 0)
        return plan, raised - plan

    plan, _ = lax.fori_loop(0, _SINKHORN_STEPS, step, (logits, jnp.zeros_like(logits)))
    return plan
