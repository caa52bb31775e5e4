"""prune and fromdense: what is kept, in every edge case of the numbers, eagerly and under jit."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import jax_nmsparse as nms
from jax_nmsparse import pruning

# Few shapes and patterns, so that Hypothesis spends its time on numbers and not on compiling.
NO_STATISTICS: Any = None
CASES = (("2:4", (37, 3)), ("3:5", (11, 4)), ("1:32", (64, 2)), ("17:64", (70, 2)), ("2:4/2x3", (21, 7)))
SPECIAL = [0.0, -0.0, 1.0, -1.0, 2.0, 1e-42, -1e-42, 1e-45, 3e38, -3e38, np.inf, -np.inf, np.nan]


@functools.partial(jax.jit, static_argnums=1)
def _prune(dense, pattern):
    return nms.prune(dense, pattern)


def _expected_keep(scores: np.ndarray, pattern: nms.NMPattern) -> np.ndarray:
    """Kept units by a stable sort in float64; NaN is the largest, together with Inf; padding the smallest."""
    first = np.arange(oracle.cut(scores, pattern).shape[-3])
    units = oracle.cut(np.where(np.isnan(scores), np.inf, scores).astype(np.float64), pattern).sum((-2, -1))
    row = (np.arange(units.shape[-3])[:, None] * units.shape[-1] + first) * pattern.block[0]
    units = np.where((row >= scores.shape[-2])[:, None, :], -np.inf, units)
    groups = units.reshape(*units.shape[:-1], -1, pattern.m)
    order = np.argsort(-groups, axis=-1, kind="stable")[..., : pattern.n]
    keep = np.zeros(groups.shape, bool)
    np.put_along_axis(keep, order, True, axis=-1)
    return keep.reshape(units.shape)


@st.composite
def weights(draw):
    text, shape = draw(st.sampled_from(CASES))
    elements = st.one_of(st.sampled_from(SPECIAL), st.floats(width=32))
    return draw(hnp.arrays(np.float32, shape, elements=elements)), nms.NMPattern.parse(text)


@given(weights())
def test_keeps_exactly_the_n_largest_units(case):
    dense, pattern = case
    w = _prune(dense, pattern)
    keep = oracle.kept(w)
    assert (keep.reshape(*keep.shape[:-1], -1, pattern.m).sum(-1) == pattern.n).all()
    if pattern.is_elementwise:
        np.testing.assert_array_equal(keep, _expected_keep(np.abs(dense), pattern))
    units = oracle.cut(dense, pattern)
    np.testing.assert_array_equal(np.asarray(w.values), units[keep].reshape(w.values.shape))


@given(weights())
def test_is_idempotent_and_exact_where_the_pattern_holds(case):
    dense, pattern = case
    w = _prune(dense, pattern)
    again = oracle.dense(w).astype(np.float32)
    oracle.assert_same_bits(_prune(again, pattern).mask, w.mask) if pattern.is_elementwise else None
    packed = nms.NMSparse.fromdense(again, pattern)
    np.testing.assert_array_equal(oracle.dense(packed), again)


@pytest.mark.parametrize(("text", "shape"), CASES)
def test_jit_equals_eager_bit_for_bit(rng, text, shape):
    dense = oracle.normal(rng, (2, *shape))
    pattern = nms.NMPattern.parse(text)
    eager = nms.prune(dense, text).validate()
    oracle.assert_same_bits(eager, _prune(dense, pattern))
    for i in range(2):
        single = nms.prune(dense[i], pattern)
        np.testing.assert_array_equal(single.mask, eager.mask[i])
        np.testing.assert_array_equal(single.values, eager.values[i])
    mapped = jax.vmap(lambda d: nms.prune(d, pattern))(dense)
    oracle.assert_same_bits(mapped, eager)


def test_ties_go_to_the_lowest_position():
    w = nms.prune(np.ones((8, 1), np.float32), "2:4")
    np.testing.assert_array_equal(np.asarray(w.todense()).ravel(), [1, 1, 0, 0, 1, 1, 0, 0])
    w = nms.prune(np.array([[1], [-2], [2], [2]], np.float32), "2:4")
    np.testing.assert_array_equal(np.asarray(w.todense()).ravel(), [0, -2, 2, 0])


def test_negative_zero_is_a_zero():
    dense = np.array([[-0.0], [1.0], [-0.0], [2.0], [-0.0], [-0.0], [-0.0], [3.0]], np.float32)
    w = nms.NMSparse.fromdense(dense, "2:4").validate()
    np.testing.assert_array_equal(w.todense(), dense)
    np.testing.assert_array_equal(w.indices().ravel()[:4], [1, 3, 0, 3])
    full = np.where(np.arange(16) % 4 < 2, 1.0, -0.0).astype(np.float32).reshape(16, 1)
    np.testing.assert_array_equal(nms.NMSparse.fromdense(full, "2:4").todense(), full)
    np.testing.assert_array_equal(nms.prune(dense, "2:4").mask, w.mask)


def test_nan_and_inf_are_kept_and_are_the_largest():
    dense = np.array([3e38, np.nan, 1.0, -np.inf, 0, 0, np.nan, 5], np.float32).reshape(8, 1)
    w = nms.prune(dense, "2:4")
    np.testing.assert_array_equal(np.asarray(w.todense()).ravel(), [0, np.nan, 0, -np.inf, 0, 0, np.nan, 5])
    sparse = np.where(np.arange(8)[:, None] % 4 < 2, np.nan, 0).astype(np.float32)
    np.testing.assert_array_equal(nms.NMSparse.fromdense(sparse, "2:4").todense(), sparse)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_subnormal_numbers_count(dtype):
    tiny = float(jnp.finfo(dtype).smallest_subnormal)
    dense = np.zeros((8, 1), dtype)
    dense[2], dense[3], dense[7] = tiny, -2 * tiny, tiny
    for w in (nms.prune(dense, "1:4"), nms.NMSparse.fromdense(dense, "2:4")):
        kept = oracle.dense(w).ravel()
        assert kept[3] == -2 * tiny
        assert kept[7] == tiny
    with pytest.raises(ValueError, match="1 groups hold more than 1 nonzero"):
        nms.NMSparse.fromdense(dense, "1:4")


@pytest.mark.parametrize("text", ["2:4", "3:6", "8:32", "20:64", "4:8/1x4", "3:5/2x2"])
def test_groups_with_too_few_nonzeros(rng, text):
    """Groups of 0, 1 and n - 1 nonzero units hold zeros at their lowest free positions: no phantom values."""
    pattern = nms.NMPattern.parse(text)
    (bk, bn), (n, m) = pattern.block, (pattern.n, pattern.m)
    dense = np.zeros((3, m, bk, 2, bn), np.float32)
    for group, count in enumerate((0, 1, n - 1)):
        for column in range(2):
            dense[group, rng.permutation(m)[:count], :, column] = rng.integers(1, 5)
    dense = dense.reshape(3 * m * bk, 2 * bn)
    w = nms.NMSparse.fromdense(dense, pattern).validate()
    np.testing.assert_array_equal(oracle.dense(w), dense)
    x = oracle.integers(rng, (2, dense.shape[0]))
    np.testing.assert_array_equal(nms.spmm(x, w), x @ dense)
    keep = oracle.kept(w)
    keep = keep.reshape(*keep.shape[:-1], -1, m)
    np.testing.assert_array_equal(keep[0, :, 0], np.broadcast_to(np.arange(m) < n, (2, m)))


def test_groups_run_along_in_features_on_square_matrices():
    """Axis -2 is the contraction axis: a matrix that is 1:4 along it only packs that way round."""
    dense = np.zeros((8, 8), np.float32)
    dense[0] = dense[5] = np.arange(1, 9)
    w = nms.NMSparse.fromdense(dense, "1:4")
    np.testing.assert_array_equal(w.todense(), dense)
    with pytest.raises(ValueError, match="axis -2"):
        nms.NMSparse.fromdense(dense.T, "1:4")
    np.testing.assert_array_equal(nms.prune(dense, "1:4").todense(), dense)
    assert (np.asarray(nms.prune(dense.T, "1:4").todense()) != 0).sum() == 4
    x = np.arange(8, dtype=np.float32)
    np.testing.assert_array_equal(nms.spmm(x, w), x @ dense)
    np.testing.assert_array_equal(nms.spmm(x, w, transpose=True), x @ dense.T)


@pytest.mark.parametrize("text", ["2:4", "3:6", "2:4/2x3"])
def test_scores_decide(rng, text):
    pattern = nms.NMPattern.parse(text)
    dense, scores = oracle.normal(rng, (25, 7)), rng.permutation(25 * 7).reshape(25, 7).astype(np.float32) - 100
    w = nms.prune(dense, pattern, scores=scores)
    np.testing.assert_array_equal(oracle.kept(w), _expected_keep(scores, pattern))
    np.testing.assert_array_equal(oracle.dense(w), np.where(w.keep(), dense, 0))


def test_boolean_masks_are_scores(rng):
    keep = oracle.draw(rng, (24, 5), "2:4").keep()
    dense = oracle.normal(rng, (24, 5))
    w = nms.prune(dense, "2:4", scores=keep).validate()
    np.testing.assert_array_equal(w.todense(), np.where(keep, dense, 0))


def test_scores_below_every_padding_value_still_win():
    dense = np.ones((2, 1), np.float32)
    for worst in (-1.0, -np.inf):
        w = nms.prune(dense, "2:4", scores=np.full((2, 1), worst, np.float32)).validate()
        np.testing.assert_array_equal(w.todense(), dense)


def test_float64_is_compared_in_float64(x64):
    dense = np.array([1.0, 1.0 + 1e-12, 1.0, 1.0], np.float64).reshape(4, 1)
    w = nms.prune(jnp.asarray(dense), "1:4")
    assert w.dtype == np.float64
    assert w.indices().ravel()[0] == 1


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"scores": np.ones((4, 3))}, ValueError, r"scores has shape \(4, 3\), expected \(4, 4\)"),
        ({"scores": np.ones((4, 4), np.complex64)}, TypeError, "scores has dtype complex64"),
        ({"method": "random"}, ValueError, "method is 'random', expected one of magnitude, wanda, sparsegpt"),
        ({"method": "wanda", "scores": np.ones((4, 4))}, ValueError, "give one of them"),
        ({"pattern": "4:2"}, ValueError, "n is 4 with m = 2"),
        ({"pattern": (2, 4)}, TypeError, "prune: pattern is a tuple, expected an NMPattern"),
        ({"pattern": 0.5}, TypeError, "prune: pattern is a float"),
    ],
)
def test_errors(options, error, message):
    options = {"pattern": "2:4", **options}
    with pytest.raises(error, match=message):
        nms.prune(np.ones((4, 4), np.float32), options.pop("pattern"), **options)


@pytest.mark.parametrize("shape", [(8,), (1, 8), (2, 8)])
def test_wanda_scores_of_statistics_that_broadcast(rng, shape):
    w, squares = oracle.normal(rng, (2, 8, 3)), np.square(oracle.normal(rng, shape))
    inputs = pruning.Statistics(jnp.asarray(1), jnp.asarray(squares))
    oracle.assert_close(pruning.wanda_scores(w, inputs), np.abs(w) * np.sqrt(squares.astype(np.float64))[..., None])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda w, s: pruning.wanda_scores(w, s(6)), ValueError, r"squares of shape \(6,\), expected \(8,\)"),
        (lambda w, s: pruning.wanda_scores(w, s(1, 8)), ValueError, r"squares of shape \(1, 8\), expected \(8,\)"),
        (
            lambda w, _: pruning.wanda_scores(w, NO_STATISTICS),
            TypeError,
            "wanda_scores: inputs is a NoneType, expected Statistics",
        ),
        (
            lambda w, _: pruning.wanda_scores(w[0], NO_STATISTICS),
            ValueError,
            r"wanda_scores: the dense weight has shape \(3,\)",
        ),
        (lambda w, s: pruning.sparsegpt(w, "2:4", s(6)), ValueError, r"sparsegpt: inputs have squares of shape \(6,\)"),
        (
            lambda w, _: pruning.sparsegpt(w, "2:4", NO_STATISTICS),
            TypeError,
            "sparsegpt: inputs is missing, expected Statistics",
        ),
        (lambda w, _: pruning.find_permutation(w * 1j, "2:4"), TypeError, "scores has dtype complex64, expected real"),
    ],
)
def test_helpers_say_what_is_wrong(call, error, message):
    def statistics(*shape):
        return pruning.Statistics(jnp.asarray(1), jnp.ones(shape), jnp.ones((*shape, shape[-1])))

    with pytest.raises(error, match=message):
        call(jnp.ones((8, 3)), statistics)
