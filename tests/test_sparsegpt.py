"""Wanda and SparseGPT beside the textbook algorithms in NumPy float64."""

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jax_nmsparse as nms
from jax_nmsparse.pruning import Statistics, sparsegpt, wanda_scores

# One word and more, m that divides 32 or does not, units of several rows and columns, ragged ends; 150 rows are more
# than a block of 128, and the groups of 16:32/6x2 are longer than one.
CASES = (
    ("2:4", (150, 5)),
    ("20:64", (70, 3)),
    ("2:4/1x8", (134, 17)),
    ("2:5/3x2", (50, 7)),
    ("16:32/6x2", (250, 3)),
)


def correlated(rng, tokens: int, features: int, dtype: Any = np.float32) -> np.ndarray:
    mixing = np.eye(features) + rng.standard_normal((features, features)) / np.sqrt(features)
    return (rng.standard_normal((tokens, features)) @ mixing * rng.uniform(0.5, 2, features)).astype(dtype)


def optimal_brain_surgeon(w, x, pattern: nms.NMPattern, damping: float = 0.01):
    """Weight and kept elements by eliminating one row after another from the inverse Hessian; no Cholesky factor."""
    w, x = w.astype(np.float64), x.astype(np.float64)
    rows, (bk, bn) = len(w), pattern.block
    hessian = x.T @ x
    inverse = np.linalg.inv(hessian + damping * np.mean(np.diag(hessian)) * np.eye(rows))
    # The variance of a row given the later ones does not depend on the weights: that of a whole group is known ahead.
    pivots, remaining = np.zeros(rows), inverse.copy()
    for i in range(rows):
        pivots[i] = remaining[0, 0]
        remaining = remaining[1:, 1:] - np.outer(remaining[1:, 0], remaining[0, 1:]) / remaining[0, 0]
    keep, remaining = np.zeros(w.shape, bool), inverse.copy()
    for i in range(rows):
        if i % (pattern.m * bk) == 0:
            group = slice(i, min(rows, i + pattern.m * bk))
            scores = np.square(w[group]) / pivots[group, None]
            for column in range(0, w.shape[1], bn):
                units = [scores[u : u + bk, column : column + bn].sum() for u in range(0, len(scores), bk)]
                for unit in np.argsort(-np.array(units), kind="stable")[: pattern.n]:
                    keep[i + unit * bk : min(group.stop, i + (unit + 1) * bk), column : column + bn] = True
        removed = np.where(keep[i], 0, w[i])
        w[i + 1 :] -= np.outer(remaining[1:, 0], removed) / remaining[0, 0]
        w[i] -= removed
        remaining = remaining[1:, 1:] - np.outer(remaining[1:, 0], remaining[0, 1:]) / remaining[0, 0]
    return w, keep


@pytest.mark.parametrize(("text", "shape"), CASES)
def test_sparsegpt_is_the_textbook_algorithm(x64, rng, text, shape):
    pattern = nms.NMPattern.parse(text)
    dense, x = oracle.normal(rng, shape, np.float64), correlated(rng, 2 * shape[0], shape[0], np.float64)
    inputs = Statistics.from_inputs(jnp.asarray(x))
    w = nms.prune(jnp.asarray(dense), pattern, method="sparsegpt", inputs=inputs).validate()
    want, keep = optimal_brain_surgeon(dense, x, pattern)
    np.testing.assert_array_equal(w.keep(), keep)
    np.testing.assert_allclose(oracle.dense(w), want, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("text", "dtype"), [("2:4", jnp.bfloat16), ("8:32/1x4", jnp.float32)])
def test_methods_in_order_of_their_error(rng, text, dtype):
    """The error of the product on the calibration inputs: SparseGPT below Wanda below magnitude."""
    dense, x = oracle.normal(rng, (96, 32), dtype), correlated(rng, 400, 96)
    x *= rng.uniform(0.1, 10, 96).astype(np.float32)
    inputs = Statistics.from_inputs(jnp.asarray(x))
    product = x.astype(np.float64) @ dense.astype(np.float64)
    errors = {}
    for method in ("magnitude", "wanda", "sparsegpt"):
        w = nms.prune(dense, text, method=method, inputs=None if method == "magnitude" else inputs).validate()
        assert w.dtype == dtype
        errors[method] = np.linalg.norm(product - x @ oracle.dense(w)) / np.linalg.norm(product)
    assert errors["sparsegpt"] < 0.95 * errors["wanda"] < 0.9 * errors["magnitude"], errors


def test_float32_reaches_the_error_of_float64(rng):
    dense, x = oracle.normal(rng, (160, 16)), correlated(rng, 500, 160)
    got = oracle.dense(nms.prune(dense, "2:4", method="sparsegpt", inputs=Statistics.from_inputs(jnp.asarray(x))))
    want, _ = optimal_brain_surgeon(dense, x, nms.NMPattern(2, 4))
    got, want = (np.linalg.norm(x @ (w - dense)) for w in (got, want))
    assert abs(got - want) < 1e-3 * want


def test_white_inputs_make_it_magnitude_pruning(rng):
    """H is a multiple of the identity: there is nothing to make up with."""
    dense = oracle.normal(rng, (40, 6))
    inputs = Statistics(jnp.asarray(7), jnp.full(40, 3.0), 3 * jnp.eye(40))
    w = nms.prune(dense, "2:4", method="sparsegpt", inputs=inputs)
    oracle.assert_same_bits(w, nms.prune(dense, "2:4"))


def test_inputs_never_active(rng):
    """They are removed first; where they must stay, they keep their weight, and nothing is NaN."""
    dense, x = oracle.normal(rng, (32, 4)), correlated(rng, 100, 32)
    x[:, [0, 1, 2, 9]] = 0
    inputs = Statistics.from_inputs(jnp.asarray(x))
    for method in ("wanda", "sparsegpt"):
        w = nms.prune(dense, "2:4", method=method, inputs=inputs).validate()
        keep = np.asarray(w.keep())
        assert keep[3].all()
        assert not keep[9].any()
        assert (keep[:3].sum(0) == 1).all()
        np.testing.assert_array_equal(oracle.dense(w)[:3], np.where(keep[:3], dense[:3], 0))
    nothing = Statistics.from_inputs(jnp.zeros((5, 32)))
    w = nms.prune(dense, "2:4", method="sparsegpt", inputs=nothing)
    oracle.assert_same_bits(w, nms.prune(dense, "2:4"))


@pytest.mark.parametrize("shared", [True, False])
def test_leading_axes(rng, shared):
    dense, x = oracle.normal(rng, (2, 2, 32, 3)), np.stack([correlated(rng, 80, 32) for _ in range(4)])
    each = jax.vmap(jax.vmap(Statistics.from_inputs))(jnp.asarray(x.reshape(2, 2, 80, 32)))
    inputs = jax.tree.map(lambda leaf: leaf[0, 0], each) if shared else each
    for method in ("wanda", "sparsegpt"):
        w = nms.prune(dense, "2:4", method=method, inputs=inputs).validate()
        for at in np.ndindex(2, 2):
            own = inputs if shared else jax.tree.map(operator.itemgetter(at), each)
            single = nms.prune(dense[at], "2:4", method=method, inputs=own)
            np.testing.assert_array_equal(w.mask[at], single.mask)
            oracle.assert_close(w.values[at], single.values, depth=32)


@pytest.mark.parametrize("text", ["2:4", "2:4/2x3"])
def test_wanda_scores(rng, text):
    pattern = nms.NMPattern.parse(text)
    dense, x = oracle.normal(rng, (25, 7)), correlated(rng, 60, 25)
    inputs = Statistics.from_inputs(jnp.asarray(x), gram=False)
    want = np.abs(dense.astype(np.float64)) * np.linalg.norm(x.astype(np.float64), axis=0)[:, None]
    oracle.assert_close(wanda_scores(jnp.asarray(dense), inputs), want, depth=60)
    w = nms.prune(dense, pattern, method="wanda", inputs=inputs)
    oracle.assert_same_bits(w, nms.prune(dense, pattern, scores=want.astype(np.float32)))


def test_runs_under_jit(rng):
    dense, inputs = oracle.normal(rng, (32, 8)), Statistics.from_inputs(jnp.asarray(correlated(rng, 80, 32)))
    traced = jax.jit(lambda d, i: nms.prune(d, "2:4", method="sparsegpt", inputs=i))(dense, inputs)
    eager = nms.prune(dense, "2:4", method="sparsegpt", inputs=inputs)
    np.testing.assert_array_equal(traced.mask, eager.mask)
    oracle.assert_close(traced.values, eager.values, depth=32)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"method": "wanda"}, TypeError, "inputs is missing, expected Statistics for method='wanda'"),
        ({"method": "wanda", "inputs": np.ones((5, 8))}, TypeError, "inputs is a ndarray"),
        ({"inputs": "ok"}, ValueError, "magnitude and scores need none"),
        ({"method": "sparsegpt", "inputs": "no gram"}, ValueError, "inputs hold no gram"),
        ({"method": "wanda", "inputs": "other"}, ValueError, r"squares of shape \(4,\), expected \(8,\)"),
        ({"method": "sparsegpt", "inputs": "ok", "damping": -2.0}, ValueError, "not positive definite in float32"),
        ({"method": "sparsegpt", "inputs": "ok", "dense": "nan"}, ValueError, "the dense weight holds NaN"),
        ({"method": "sparsegpt", "inputs": "ok", "dense": "int8"}, TypeError, "dense has dtype int8"),
    ],
)
def test_errors(rng, options, error, message):
    x = jnp.asarray(correlated(rng, 20, 8))
    made = {"ok": x, "other": x[:, :4], "no gram": x}
    name = options.get("inputs")
    if isinstance(name, str):
        options = {**options, "inputs": Statistics.from_inputs(made[name], gram=name != "no gram")}
    dense = {"nan": np.full((8, 2), np.nan, np.float32), "int8": np.ones((8, 2), np.int8)}
    with pytest.raises(error, match=message):
        nms.prune(dense.get(options.pop("dense", ""), np.ones((8, 2), np.float32)), "2:4", **options)


def test_sparsegpt_without_gram_raises_while_tracing():
    inputs = Statistics.from_inputs(jnp.ones((3, 8)), gram=False)
    with pytest.raises(ValueError, match="sparsegpt: inputs hold no gram"):
        jax.eval_shape(lambda w: sparsegpt(w, nms.NMPattern(2, 4), inputs), jnp.ones((8, 2)))
