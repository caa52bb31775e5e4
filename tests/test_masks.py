"""Channel permutations and transposable masks, beside the best of all by brute force."""

import itertools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import scipy.optimize

import jax_nmsparse as nms
from jax_nmsparse.pruning import find_permutation, transposable_mask


def kept_score(scores: np.ndarray, pattern: nms.NMPattern) -> float:
    """The sum of the scores that the pattern keeps, in float64."""
    units = oracle.cut(scores.astype(np.float64), pattern).sum((-2, -1))
    groups = np.sort(units.reshape(*units.shape[:-1], -1, pattern.m))
    return float(groups[..., pattern.m - pattern.n :].sum())


# Permutations.


@pytest.mark.parametrize(("text", "shape"), [("2:4", (64, 16)), ("4:8/1x4", (66, 9)), ("1:2/3x2", (25, 6))])
def test_a_permutation_that_keeps_more(rng, text, shape):
    """Ragged sizes too; units of several rows move whole."""
    pattern = nms.NMPattern.parse(text)
    scores = np.abs(oracle.normal(rng, shape)) * rng.permutation(np.geomspace(0.05, 5, shape[0]))[:, None]
    scores = scores.astype(np.float32)
    p = np.asarray(find_permutation(scores, pattern, steps=60))
    assert p.dtype == np.int32
    np.testing.assert_array_equal(np.sort(p), np.arange(shape[0]))
    bk = pattern.block[0]
    whole = p[: shape[0] // bk * bk].reshape(-1, bk)
    np.testing.assert_array_equal(whole % bk, np.broadcast_to(np.arange(bk), whole.shape))
    before, after = kept_score(scores, pattern), kept_score(scores[p], pattern)
    total = float(scores.astype(np.float64).sum())
    assert after - before > 0.1 * (total - before), (before, after, total)
    np.testing.assert_array_equal(p, find_permutation(scores, pattern, steps=60), "deterministic")


def test_two_groups_end_where_no_swap_gains(rng):
    """Also close to the best of all 35 splits of 8 channels."""
    pattern, close = nms.NMPattern(2, 4), 0
    for _ in range(10):
        scores = np.abs(oracle.normal(rng, (8, 6)))
        got = scores[np.asarray(find_permutation(scores, pattern, steps=20))]
        reached = kept_score(got, pattern)
        for i, j in itertools.product(range(4), range(4, 8)):
            order = np.arange(8)
            order[[i, j]] = j, i
            assert kept_score(got[order], pattern) <= reached * (1 + 2e-6)
        splits = ([*half, *sorted(set(range(8)) - set(half))] for half in itertools.combinations(range(8), 4))
        best = max(kept_score(scores[split], pattern) for split in splits)
        assert reached >= 0.97 * best
        close += reached >= (1 - 1e-6) * best
    assert close >= 5


def test_nothing_to_permute(rng):
    scores = np.abs(oracle.normal(rng, (4, 3)))
    np.testing.assert_array_equal(find_permutation(scores, "2:4"), np.arange(4))
    scores = np.abs(oracle.normal(rng, (40, 3)))
    np.testing.assert_array_equal(find_permutation(scores, "2:4", steps=0), np.arange(40))
    equal = np.ones((40, 3), np.float32)
    np.testing.assert_array_equal(find_permutation(equal, "2:4", steps=5), np.arange(40))


def test_folding_into_the_layer_before(rng):
    """As docs/pruning.md says: the MLP computes the same, and its second layer keeps more."""
    net = nn.Sequential([nn.Dense(64), nn.gelu, nn.Dense(8)])
    x = jnp.asarray(oracle.normal(rng, (5, 16)))
    params: Any = net.init(jax.random.key(0), x)["params"]
    up, down = params["layers_0"], params["layers_2"]
    up["bias"] = jnp.asarray(oracle.normal(rng, 64))
    down["kernel"] *= jnp.asarray(rng.permutation(np.geomspace(0.1, 10, 64)), jnp.float32)[:, None]
    p = find_permutation(jnp.abs(down["kernel"]), "2:4", steps=50)
    folded = {
        "layers_0": {"kernel": up["kernel"][:, p], "bias": up["bias"][p]},
        "layers_2": {"kernel": down["kernel"][p], "bias": down["bias"]},
    }
    want = net.apply({"params": params}, x)
    oracle.assert_close(net.apply({"params": folded}, x), np.asarray(want, np.float64), depth=64)
    before, after = (np.abs(nms.prune(w["layers_2"]["kernel"], "2:4").values).sum() for w in (params, folded))
    assert after > 1.03 * before


def test_permutation_errors():
    with pytest.raises(ValueError, match=r"scores has shape \(4,\), expected \[in_features, out_features\]"):
        find_permutation(jnp.ones(4), "2:4")
    with pytest.raises(ValueError, match="steps is -1"):
        find_permutation(jnp.ones((4, 4)), "2:4", steps=-1)


# Transposable masks.


def best_tile(tile: np.ndarray, n: int) -> float:
    """The optimum of one tile, by linear programming: the constraints are totally unimodular."""
    m = len(tile)
    lines = np.zeros((2 * m, m * m))
    for i in range(m):
        lines[i, i * m : (i + 1) * m] = 1
        lines[m + i, i::m] = 1
    solved = scipy.optimize.linprog(-tile.reshape(-1), A_ub=lines, b_ub=np.full(2 * m, n), bounds=(0, 1))
    return -solved.fun


def assert_transposable(mask: np.ndarray, pattern: nms.NMPattern) -> None:
    """At most n units of every group along both axes, by packing the weight and its transpose."""
    bk, bn = pattern.block
    dense = np.where(mask, 1.0, 0.0).astype(np.float32)
    nms.NMSparse.fromdense(dense, pattern).validate()
    nms.NMSparse.fromdense(np.swapaxes(dense, -1, -2), nms.NMPattern(pattern.n, pattern.m, (bn, bk))).validate()


@pytest.mark.parametrize("text", ["2:4", "1:4"])
def test_small_groups_are_exact(rng, text):
    pattern = nms.NMPattern.parse(text)
    m = pattern.m
    scores = np.abs(oracle.normal(rng, (2 * m, 3 * m)))
    # Optima that leave a row with fewer than n exist too.
    scores[:m, :m] = rng.random((m, m)) < 0.5
    mask = np.asarray(transposable_mask(scores, pattern))
    assert_transposable(mask, pattern)
    for i, j in np.ndindex(2, 3):
        tile = np.s_[i * m : (i + 1) * m, j * m : (j + 1) * m]
        assert scores[tile][mask[tile]].sum() == pytest.approx(best_tile(scores[tile], pattern.n), rel=1e-5)


@pytest.mark.parametrize("text", ["4:8"])
def test_larger_groups_are_close_to_the_optimum(rng, text):
    pattern = nms.NMPattern.parse(text)
    m = pattern.m
    scores = np.abs(oracle.normal(rng, (m, 4 * m)))
    # The worst case of greedy: two large units in the way of each other.
    scores[:, :m] = 0
    scores[0, 0], scores[0, 1 : pattern.n + 1], scores[1 : pattern.n + 1, 0] = 1.01, 1, 1
    mask = np.asarray(transposable_mask(scores, pattern))
    assert_transposable(mask, pattern)
    for j in range(4):
        tile = np.s_[:, j * m : (j + 1) * m]
        got, best = scores[tile][mask[tile]].sum(), best_tile(scores[tile], pattern.n)
        assert got >= (0.97 if j else 0.5) * best - 1e-5


@pytest.mark.parametrize(("text", "shape"), [("2:4", (2, 7, 9)), ("2:5/2x3", (13, 31))])
def test_ragged_blocked_and_stacked(rng, text, shape):
    pattern = nms.NMPattern.parse(text)
    scores = np.abs(oracle.normal(rng, shape))
    mask = np.asarray(transposable_mask(scores, pattern))
    assert (mask.shape, mask.dtype) == (shape, bool)
    assert_transposable(mask, pattern)
    assert scores[mask].sum() > pattern.density * scores.sum()
    np.testing.assert_array_equal(mask[0], transposable_mask(scores[0], pattern)) if len(shape) == 3 else None


def test_zeros_and_errors():
    assert_transposable(np.asarray(transposable_mask(np.zeros((8, 8), np.float32), "4:8")), nms.NMPattern(4, 8))
    with pytest.raises(ValueError, match="transposable_mask: scores has shape"):
        transposable_mask(jnp.ones(4), "2:4")
