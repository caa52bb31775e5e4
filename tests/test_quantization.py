"""quantize: int8 and float8 values with one scale for every output feature."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jax_nmsparse as nms

STEP = {jnp.int8: 1 / 127 / 2, jnp.float8_e4m3fn: 2.0**-4}  # largest error of a value, relative to its column's largest


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
@pytest.mark.parametrize(("pattern", "lead"), [("2:4", ()), ("3:6", (2,)), ("2:4/2x3", (2,))])
def test_is_the_nearest_multiple_of_the_scale(rng, dtype, pattern, lead):
    w = oracle.draw(rng, (*lead, 67, 13), pattern, fill=oracle.normal)
    quantised = nms.quantize(w, dtype).validate()
    assert (quantised.dtype, quantised.scales.dtype, quantised.shape) == (dtype, jnp.float32, w.shape)
    assert quantised.scales.shape == (*lead, 13)
    dense = oracle.dense(w)
    peak = np.abs(dense).max(-2, keepdims=True)
    largest = {jnp.int8: 127, jnp.float8_e4m3fn: 448}[dtype]
    oracle.assert_close(quantised.scales, peak[..., 0, :] / largest)
    assert np.abs(oracle.dense(quantised) - dense).max() <= (peak * STEP[dtype]).max() * 1.0001
    assert (np.abs(oracle.dense(quantised) - dense) <= peak * STEP[dtype] * 1.0001).all()
    oracle.assert_close(quantised.todense(), oracle.dense(quantised))
    assert quantised.nbytes == quantised.values.size + 4 * quantised.mask.size + 4 * quantised.scales.size


def test_columns_of_zeros_have_scale_one(rng):
    w = oracle.draw(rng, (64, 3), "2:4")
    w = w.with_values(w.values.at[:, 1].set(0))
    for dtype in (jnp.int8, jnp.float8_e4m3fn):
        quantised = nms.quantize(w, dtype)
        assert quantised.scales[1] == 1
        assert (oracle.dense(quantised)[:, 1] == 0).all()


def test_the_largest_value_is_exact(rng):
    w = oracle.draw(rng, (64, 5), "2:4", fill=oracle.normal)
    values = np.asarray(nms.quantize(w, jnp.int8).values)
    np.testing.assert_array_equal(np.abs(values.astype(int)).max((0, 2, 3, 4)), 127)
    assert values.min() >= -127


def test_jit_and_vmap_equal_eager(rng):
    w = oracle.draw(rng, (2, 32, 6), "2:4", fill=oracle.normal)
    eager = nms.quantize(w, jnp.int8)
    jitted = jax.jit(lambda w: nms.quantize(w, jnp.int8))(w)
    mapped = jax.vmap(lambda w: nms.quantize(w, jnp.int8))(w)
    for other in (jitted, mapped):
        np.testing.assert_array_equal(other.values, eager.values)
        oracle.assert_close(other.scales, eager.scales)


@pytest.mark.parametrize("implementation", oracle.IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
def test_products_and_gradients_of_scales(rng, dtype, implementation):
    if implementation == "cpu" and dtype == jnp.float8_e4m3fn:
        pytest.skip("the CPU kernels have no float8")
    w = nms.quantize(oracle.draw(rng, (67, 13), "2:4", fill=oracle.normal), dtype)
    x, g = oracle.normal(rng, (5, 67)), oracle.normal(rng, (5, 13))
    bias = oracle.normal(rng, (13,))
    y = nms.spmm(x, w, bias=bias, activation="silu", implementation=implementation)
    oracle.assert_close(y, oracle.spmm(x, w, bias=bias, activation="silu"), depth=67)
    dx = nms.spmm(g, w, transpose=True, implementation=implementation)
    oracle.assert_close(dx, oracle.spmm(g, w, transpose=True), depth=13)

    def loss(w):
        return jnp.sum(g * nms.spmm(x, w, implementation=implementation))

    dw = nms.grad(loss)(w) if dtype == jnp.int8 else nms.grad(lambda s: loss(w._replace(scales=s)))(w.scales)
    unscaled = oracle.spmm(x, w._replace(scales=None))
    oracle.assert_close(dw.scales if dtype == jnp.int8 else dw, (g * unscaled).sum(0), depth=67)


@pytest.mark.parametrize(
    ("dtype", "error", "message"),
    [
        (jnp.float16, TypeError, "dtype is float16, expected int8 or float8_e4m3fn"),
        (jnp.int4, TypeError, "dtype is int4"),
        (jnp.uint8, TypeError, "dtype is uint8"),
    ],
)
def test_wrong_dtypes(rng, dtype, error, message):
    with pytest.raises(error, match=f"quantize: {message}"):
        nms.quantize(oracle.draw(rng, (4, 4), "2:4"), dtype)


def test_wrong_weights(rng):
    w = oracle.draw(rng, (4, 4), "2:4")
    with pytest.raises(TypeError, match="is quantised already"):
        nms.quantize(nms.quantize(w, jnp.int8), jnp.int8)
    with pytest.raises(TypeError, match="w is a ndarray, expected an NMSparse"):
        nms.quantize(cast(Any, np.ones((4, 4))), jnp.int8)
    for bad in (np.nan, np.inf):
        with pytest.raises(ValueError, match="holds NaN or Inf"):
            nms.quantize(w.with_values(w.values.at[0, 0, 0].set(bad)), jnp.int8)
