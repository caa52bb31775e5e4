"""Channel permutations: reordering in_features so that the groups of a pattern hold on to more."""

from __future__ import annotations

import operator

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_nmsparse.array import check_pattern
from jax_nmsparse.layout import Layout
from jax_nmsparse.pattern import NMPattern
from jax_nmsparse.pruning.selection import check_scores, score_dtype, unit_scores


def find_permutation(
    scores: ArrayLike, pattern: NMPattern | str, *, steps: int = 500, key: jax.Array | None = None
) -> jax.Array:
    """An order of the input channels in which pruning keeps more score, by greedy swaps.

    In every step the groups are paired at random; of all m^2 swaps of a channel of one group with one of the other,
    each pair makes the best, if the kept score ``sum over groups and columns of the n largest`` grows by it. So the
    kept score never falls below that of the given order; the result is a local optimum, not the best of all orders.

    With ``p`` the result, ``x[..., p] @ W[p] == x @ W``: the layer is the same and nothing is to be done at run time
    once the layer before it writes its channels in the order p. For ``y = act(x A + a) W`` that is ``A[:, p]``,
    ``a[p]`` and ``W[p]``. Weights that read the same channels (query, key, value) share one permutation: concatenate
    their scores along out_features. In a residual stream everything that writes or reads it takes part, normalisation
    scales too.

    Args:
      scores: ``[in_features, out_features]``, not negative: ``abs(W)``, or `wanda_scores`.
      pattern: The pattern, or a string such as "2:4". Units of several rows move as a whole.
      steps: How many pairings; each costs in_features * m * out_features * 2 comparisons.
      key: A `jax.random.key` for the pairings, by default that of 0.

    Returns:
      int32 ``[in_features]``, the old channel at every new place.

    Raises:
      ValueError, TypeError: For scores that are no matrix of real numbers, are empty, or split over explicit mesh axes;
        steps below 0.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_nmsparse.pruning import find_permutation
      >>> w = jnp.array([[4.0], [3.0], [2.0], [1.0], [0.0], [0.0], [0.0], [0.0]])
      >>> p = find_permutation(w, "2:4")  # groups 0..3 and 4..7 kept 4 + 3
      >>> float(jnp.sort(w[p].reshape(2, 4))[:, 2:].sum())
      10.0

    Source: Pool and Yu, "Channel Permutations for N:M Sparsity", NeurIPS 2021 (greedy phase, without their escape from
    local optima).
    """
    pattern, steps = check_pattern("find_permutation", pattern), operator.index(steps)
    if jnp.ndim(scores) != 2:
        raise ValueError(
            f"find_permutation: scores has shape {jnp.shape(scores)}, expected [in_features, out_features]"
        )
    scores = check_scores("find_permutation", scores)
    if steps < 0:
        raise ValueError(f"find_permutation: steps is {steps}, expected at least 0")
    return _search(scores, jax.random.key(0) if key is None else key, Layout(pattern, *scores.shape), steps)


@jax.jit(static_argnums=(2, 3))
def _search(scores: jax.Array, key: jax.Array, layout: Layout, steps: int) -> jax.Array:
    n, m, bk = layout.pattern.n, layout.pattern.m, layout.bk
    units = jnp.swapaxes(unit_scores(scores.astype(score_dtype(scores.dtype)), layout), 1, 2)
    units = units.reshape(-1, layout.out_blocks)
    groups = -(-layout.in_features // (m * bk))
    units = jnp.where(units == -jnp.inf, 0, units)[: groups * m]
    # Only whole units move; padding stays at the end.
    movable = (jnp.arange(groups * m) + 1) * bk <= layout.in_features

    def step(state: tuple[jax.Array, jax.Array], key: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
        order, units = state
        shuffled = jax.random.permutation(key, groups)
        first, second = (shuffled[i : groups - groups % 2 : 2, None] * m + jnp.arange(m) for i in (0, 1))
        a, b = units[first], units[second]
        gain = _gains(a, b, n) + jnp.swapaxes(_gains(b, a, n), 1, 2)
        gain = jnp.where(movable[first][:, :, None] & movable[second][:, None, :], gain, -jnp.inf)
        best = jnp.argmax(gain.reshape(-1, m * m), axis=1)
        pair = jnp.arange(groups // 2)
        i, j = first[pair, best // m], second[pair, best % m]
        # Less than rounding of the sums is no gain.
        noise = 1e-6 * (jnp.sum(a, axis=(1, 2)) + jnp.sum(b, axis=(1, 2)))
        better = gain[pair, best // m, best % m] > noise
        i, j = (jnp.where(better, i, j), j)
        swap = jnp.arange(groups * m).at[i].set(j).at[j].set(jnp.where(better, first[pair, best // m], j))
        return (order[swap], units[swap]), None

    order = jnp.arange(groups * m, dtype=jnp.int32)
    if groups > 1:
        (order, _), _ = jax.lax.scan(step, (order, units), jax.random.split(key, steps))
    channels = order[:, None] * bk + jnp.arange(bk, dtype=jnp.int32)
    return channels.reshape(-1)[: layout.in_features]


def _gains(a: jax.Array, b: jax.Array, n: int) -> jax.Array:
    """What the groups a gain where unit j of b replaces their unit i: twice ``[pairs, m, out]`` -> ``[pairs, i, j]``.

    The n best of a group without i, and with a newcomer, are the n - 1 best of the rest and the larger of the newcomer
    and the n-th of the rest.
    """
    m = a.shape[1]
    position = jnp.arange(m)[:, None]
    rank = jnp.zeros(a.shape, jnp.int32)
    for k in range(m):
        other = a[:, k : k + 1]
        rank += jnp.where(position > k, other >= a, other > a).astype(jnp.int32)

    def ranked(which: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(which, a, 0), axis=1, keepdims=True)

    last, next_one, others = ranked(rank == n - 1), ranked(rank == n), ranked(rank < n - 1)
    rest = jnp.where(rank < n - 1, others + last - a, others)
    threshold = jnp.where(rank < n, next_one, last)
    newcomer = jnp.sum(jnp.maximum(threshold[:, :, None], b[:, None]), axis=-1)
    return newcomer + jnp.sum(rest - others - last, axis=-1)[:, :, None]
