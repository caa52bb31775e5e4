"""spmm, spmv and sddmm against the oracle: every pattern, implementation, dtype and ragged size.

Most operands are small integers, whose products are exact in every order of summation, so they are compared exactly.
"""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jax_nmsparse as nms

FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)


@functools.partial(jax.jit, static_argnames="implementation")
def _all_ops(x, g, w, implementation=None):
    return {
        "spmm": nms.spmm(x, w, implementation=implementation),
        "spmm_t": nms.spmm(g, w, transpose=True, implementation=implementation),
        "sddmm": nms.sddmm(x, g, w, implementation=implementation),
    }


def _wanted(x, g, w):
    return {
        "spmm": oracle.spmm(x, w),
        "spmm_t": oracle.spmm(g, w, transpose=True),
        "sddmm": oracle.sddmm(x, g, w),
    }


def _assert_exact(got, want):
    for op, y in got.items():
        np.testing.assert_array_equal(np.asarray(y).astype(np.float64), want[op], err_msg=op)


@pytest.mark.parametrize("implementation", oracle.IMPLEMENTATIONS)
@pytest.mark.parametrize("pattern", oracle.PATTERNS)
def test_every_pattern_is_exact(rng, pattern, implementation):
    w = oracle.draw(rng, (67, 13), pattern)
    x, g = oracle.integers(rng, (3, 67)), oracle.integers(rng, (3, 13))
    _assert_exact(_all_ops(x, g, w, implementation), _wanted(x, g, w))


@pytest.mark.parametrize("implementation", oracle.IMPLEMENTATIONS)
@pytest.mark.parametrize(("pattern", "lead"), [("2:4", (2,)), ("4:64", (2, 3)), ("2:4/2x3", (3,))])
def test_batch_axes_of_the_weight(rng, pattern, lead, implementation):
    w = oracle.draw(rng, (*lead, 35, 9), pattern)
    x, g = oracle.integers(rng, (*lead, 2, 2, 35)), oracle.integers(rng, (*lead, 2, 2, 9))
    _assert_exact(_all_ops(x, g, w, implementation), _wanted(x, g, w))
    _assert_exact(
        _all_ops(x[..., 0, 0, :], g[..., 0, 0, :], w, implementation), _wanted(x[..., 0, 0, :], g[..., 0, 0, :], w)
    )


@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize("pattern", ["2:4", "8:32/1x8"])
def test_tokens_from_none_to_seventeen(rng, pattern, implementation):
    w = oracle.draw(rng, (40, 12), pattern)
    x, g = oracle.integers(rng, (17, 40)), oracle.integers(rng, (17, 12))
    counts = (0, 1, 2, 7, 16, 17) if implementation == "xla" else range(18)
    every = jax.jit(lambda x, g, w: [_all_ops(x[:t], g[:t], w, implementation) for t in counts])(x, g, w)
    for tokens, got in zip(counts, every, strict=True):
        assert got["spmm"].shape == (tokens, 12)
        _assert_exact(got, _wanted(x[:tokens], g[:tokens], w))


@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize("pattern", ["2:4", "2:4/1x4"])
def test_no_tail_column_is_dropped(rng, pattern, implementation):
    """out_features of 1 to 64, also where they divide a tile size."""
    sizes = (1, 3, 4, 17, 33, 64) if implementation == "xla" else (*range(1, 18), 23, 31, 32, 33, 47, 63, 64)
    weights = [oracle.draw(rng, (32, size), pattern) for size in sizes]
    x, g = oracle.integers(rng, (2, 32)), oracle.integers(rng, (2, 64))
    gs = [g[:, :size] for size in sizes]
    every = jax.jit(lambda x, gs, ws: [_all_ops(x, g, w, implementation) for g, w in zip(gs, ws, strict=True)])(
        x, gs, weights
    )
    for got, g, w in zip(every, gs, weights, strict=True):
        _assert_exact(got, _wanted(x, g, w))


@pytest.mark.parametrize("implementation", oracle.IMPLEMENTATIONS[1:])
@pytest.mark.parametrize("pattern", ["2:4", "8:32/1x8"])
def test_bias_with_ragged_sizes(rng, pattern, implementation):
    """Bias on and off; in_features and out_features of every ragged size, all pairs of them for the CPU kernels."""
    step = 1 if implementation == "cpu" and pattern == "2:4" else 4
    for i, in_features in enumerate(oracle.RAGGED):
        weights = [oracle.draw(rng, (in_features, size), pattern) for size in oracle.RAGGED[i % step :: step]]
        x, bias = oracle.integers(rng, (2, in_features)), oracle.integers(rng, (max(oracle.RAGGED),))

        def products(x, weights, bias):
            biases = [b for w in weights for b in (None, bias[: w.out_features])]
            twice = [w for w in weights for _ in range(2)]
            return [nms.spmm(x, w, bias=b, implementation=implementation) for w, b in zip(twice, biases, strict=True)]

        got = jax.jit(products)(x, weights, bias)
        for w, plain, biased in zip(weights, got[::2], got[1::2], strict=True):
            np.testing.assert_array_equal(plain, oracle.spmm(x, w))
            np.testing.assert_array_equal(biased, oracle.spmm(x, w, bias=bias[: w.out_features]))


@pytest.mark.parametrize("implementation", oracle.IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_random_numbers_within_the_tolerance(rng, dtype, implementation):
    w = oracle.draw(rng, (130, 33), "8:32", dtype, fill=oracle.normal)
    x, g = oracle.normal(rng, (9, 130), dtype), oracle.normal(rng, (9, 33), dtype)
    got, want = _all_ops(x, g, w, implementation), _wanted(x, g, w)
    for op, depth in (("spmm", 130), ("spmm_t", 33), ("sddmm", 9)):
        assert got[op].dtype == dtype
        oracle.assert_close(got[op], want[op], depth=depth)


@pytest.mark.parametrize("implementation", oracle.IMPLEMENTATIONS)
def test_float64(rng, x64, implementation):
    w = oracle.draw(rng, (130, 9), "8:32", np.float64, fill=oracle.normal)
    x, g = oracle.normal(rng, (3, 130), np.float64), oracle.normal(rng, (3, 9), np.float64)
    got, want = _all_ops(x, g, w, implementation), _wanted(x, g, w)
    for op, depth in (("spmm", 130), ("spmm_t", 9), ("sddmm", 3)):
        assert got[op].dtype == np.float64
        oracle.assert_close(got[op], want[op], depth=depth)


X_DTYPES = (*FLOATS, jnp.float8_e4m3fn, jnp.int8)
RESULTS = {
    (jnp.int8, jnp.int8): jnp.int32,
    (jnp.float8_e4m3fn, jnp.float8_e4m3fn): jnp.float32,
    (jnp.float8_e4m3fn, jnp.int8): jnp.float32,
    **{(f, q): f for f in FLOATS for q in (jnp.int8, jnp.float8_e4m3fn)},
    **{(q, f): f for f in FLOATS for q in (jnp.int8, jnp.float8_e4m3fn)},
    **{(a, b): jnp.promote_types(a, b) for a in FLOATS for b in FLOATS},
}
"""dtypes of x and of the values -> dtype of the result. int8 beside float8 values has none."""


@pytest.mark.parametrize("implementation", [None, "xla", "dense"])
@pytest.mark.parametrize("values_dtype", X_DTYPES)
def test_every_pair_of_dtypes(rng, values_dtype, implementation):
    """Sums of ones and zeros stay below 256, so even bfloat16 results are exact."""
    w = oracle.draw(rng, (67, 6), "2:4", values_dtype, fill=functools.partial(oracle.integers, largest=1))
    x = {d: oracle.integers(rng, (3, 67), d, largest=1) for d in X_DTYPES if (d, values_dtype) in RESULTS}
    g = {d: oracle.integers(rng, (3, 6), d, largest=1) for d in x}
    got = {d: _all_ops(x[d], g[d], w, implementation) for d in x}
    for d in x:
        want = RESULTS[d, values_dtype]
        assert got[d]["spmm"].dtype == got[d]["spmm_t"].dtype == want, (d, values_dtype)
        gradient = values_dtype if values_dtype in FLOATS else jnp.float32
        assert got[d]["sddmm"].dtype == gradient
        _assert_exact(got[d], _wanted(x[d], g[d], w))


def test_preferred_element_type(rng, x64):
    w8 = oracle.draw(rng, (67, 6), "2:4", jnp.int8)
    w16 = oracle.draw(rng, (67, 6), "2:4", jnp.bfloat16)
    x8, x16 = oracle.integers(rng, (3, 67), jnp.int8), oracle.integers(rng, (3, 67), jnp.bfloat16)
    for x, w, results in (
        (x8, w8, (jnp.int32, jnp.float32, jnp.float64)),
        (x16, w16, (jnp.float32, jnp.float64)),
        (x16, w8, (jnp.float32,)),
    ):
        for dtype in results:
            y = nms.spmm(x, w, preferred_element_type=dtype)
            assert y.dtype == dtype
            np.testing.assert_array_equal(np.asarray(y, np.float64), oracle.spmm(x, w))
            dx = nms.spmm(x[:, :6], w, transpose=True, preferred_element_type=dtype)
            assert dx.dtype == dtype
            np.testing.assert_array_equal(np.asarray(dx, np.float64), oracle.spmm(x[:, :6], w, transpose=True))
    y = nms.spmm(x16, w16, preferred_element_type=jnp.float16)
    np.testing.assert_array_equal(y, oracle.spmm(x16, w16).astype(np.float16))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_types_are_summed_in_float32(dtype):
    """2304 ones: a sum in float16 would stop at 2048, one in bfloat16 at 256."""
    dense = np.where(np.arange(4608)[:, None] % 4 < 2, 1, 0).astype(dtype)
    w = nms.NMSparse.fromdense(dense, "2:4")
    for implementation in oracle.IMPLEMENTATIONS:
        y = nms.spmm(np.ones((1, 4608), dtype), w, preferred_element_type=jnp.float32, implementation=implementation)
        assert y[0, 0] == 2304, implementation


@pytest.mark.parametrize("implementation", oracle.IMPLEMENTATIONS)
@pytest.mark.parametrize("activation", oracle.ACTIVATIONS)
def test_activation_and_bias(rng, activation, implementation):
    w = oracle.draw(rng, (67, 13), "2:4", fill=oracle.normal)
    x, bias = oracle.normal(rng, (3, 67)), oracle.normal(rng, (13,))
    run = jax.jit(
        lambda x, w, b: (
            nms.spmm(x, w, bias=b, activation=activation, implementation=implementation),
            nms.spmm(x, w, activation=activation, implementation=implementation),
            nms.spmm(
                x.astype(jnp.bfloat16),
                w.astype(jnp.bfloat16),
                bias=b,
                activation=activation,
                implementation=implementation,
            ),
        )
    )
    biased, plain, half = run(x, w, bias)
    oracle.assert_close(biased, oracle.spmm(x, w, bias=bias, activation=activation), depth=67)
    oracle.assert_close(plain, oracle.spmm(x, w, activation=activation), depth=67)
    x16, w16 = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
    assert half.dtype == jnp.bfloat16
    oracle.assert_close(half, oracle.spmm(x16, w16, bias=bias, activation=activation), depth=67)


def test_bias_of_batched_weights_and_of_other_dtypes(rng):
    w = oracle.draw(rng, (2, 32, 6), "2:4")
    x = oracle.integers(rng, (2, 3, 32))
    for shape in ((6,), (2, 6)):
        for dtype in FLOATS:
            bias = oracle.integers(rng, shape, dtype)
            np.testing.assert_array_equal(nms.spmm(x, w, bias=bias), oracle.spmm(x, w, bias=bias))


def test_integer_products_with_a_float_epilogue_are_floats(rng):
    w = oracle.draw(rng, (32, 6), "2:4", jnp.int8)
    x, bias = oracle.integers(rng, (3, 32), jnp.int8), np.full(6, 0.25, np.float32)
    y = nms.spmm(x, w, bias=bias)
    assert y.dtype == jnp.float32
    np.testing.assert_array_equal(y, oracle.spmm(x, w, bias=bias))
    oracle.assert_close(nms.spmm(x, w, activation="silu"), oracle.spmm(x, w, activation="silu"), depth=32)


@pytest.mark.parametrize("implementation", oracle.IMPLEMENTATIONS)
def test_nan_and_inf_reach_results_through_kept_units_alone(rng, implementation):
    w = oracle.draw(rng, (67, 13), "2:4")
    w = w.with_values(jnp.where(w.values == 0, 1, w.values))
    x = oracle.integers(rng, (3, 67))
    x[1, 66], x[2, 5] = np.nan, np.inf
    got = np.asarray(nms.spmm(x, w, implementation=implementation))
    keep = np.asarray(w.keep())
    if implementation != "cpu":  # a dense product multiplies Inf by the zeros between
        np.testing.assert_array_equal(got[0], oracle.spmm(x[:1], w)[0])
        return
    np.testing.assert_array_equal(np.isnan(got[1]), keep[66])
    np.testing.assert_array_equal(np.isinf(got[2]), keep[5])


@pytest.mark.parametrize("implementation", oracle.IMPLEMENTATIONS)
def test_slices_of_a_larger_buffer(rng, implementation):
    """Operands that start anywhere in memory: odd sizes and offsets."""
    stack = oracle.draw(rng, (3, 33, 7), "2:4")
    x = oracle.integers(rng, (3, 5, 35))

    def product(i, x, w):
        return nms.spmm(x[i, 1:, 1:34], jax.tree.map(lambda a: a[i], w), implementation=implementation)

    products = jax.jit(lambda x, w: [product(j, x, w) for j in range(3)])(x, stack)
    for i, y in enumerate(products):
        np.testing.assert_array_equal(y, x[i, 1:, 1:34] @ oracle.dense(stack)[i])


@hypothesis.settings(max_examples=8)
@given(st.integers(1, 70), st.integers(1, 40), st.sampled_from(["2:4", "3:5", "2:4/1x4"]))
def test_ragged_shapes(in_features, out_features, pattern):
    rng = np.random.default_rng(in_features * 100 + out_features)
    w = oracle.draw(rng, (in_features, out_features), pattern)
    x = oracle.integers(rng, (in_features,))
    np.testing.assert_array_equal(nms.spmv(x, w), oracle.spmm(x, w))


def test_spmv_matmul_and_lists(rng):
    w = oracle.draw(rng, (4, 6), "2:4")
    x = oracle.integers(rng, (4,))
    want = oracle.spmm(x, w)
    for y in (nms.spmv(x, w), x @ w, jnp.asarray(x) @ w, nms.spmm(x.tolist(), w), nms.spmv(x, w, precision="highest")):
        np.testing.assert_array_equal(y, want)
