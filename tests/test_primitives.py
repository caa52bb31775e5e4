"""Derivatives of the three primitives, of order two, forward and reverse, in float64, for every static parameter."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax import lax
from jax.test_util import check_grads

import jax_nmsparse as nms
from jax_nmsparse import primitives

SIZE = (37, 5)
pytestmark = pytest.mark.usefixtures("x64")


def _draw(rng, pattern="2:4", lead=()):
    w = oracle.draw(rng, (*lead, *SIZE), pattern, np.float64, fill=oracle.normal)
    x = oracle.normal(rng, (*lead, 3, SIZE[0]), np.float64)
    g = oracle.normal(rng, (*lead, 3, SIZE[1]), np.float64)
    return w, x, g


def _check(function, *arguments):
    """Numerical and analytical derivatives agree; jit keeps the many evaluations cheap."""
    check_grads(jax.jit(function), arguments, order=2, modes=("fwd", "rev"), atol=1e-6, rtol=1e-6, eps=1e-4)


@pytest.mark.parametrize(
    ("activation", "implementation"),
    [
        *((a, i) for a in oracle.ACTIVATIONS for i in (None, "xla")),
        *(("silu", i) for i in oracle.IMPLEMENTATIONS if i not in (None, "xla")),
    ],
)
def test_spmm_by_x_values_bias_and_scales(rng, activation, implementation):
    w, x, _ = _draw(rng)
    bias = oracle.normal(rng, SIZE[1:], np.float64)
    scales = 2.0 ** oracle.integers(rng, SIZE[1:], np.float32, largest=1)
    quantised = w._replace(scales=jnp.asarray(scales))

    def f(x, values, bias, scales):
        y = primitives.spmm(
            x[None],
            values[None],
            w.mask_with_words[None],
            scales[None],
            bias[None],
            layout=w.layout,
            dtype=np.float64,
            precision=None,
            implementation=implementation,
            activation=activation,
        )
        return y[0]

    want = oracle.spmm(x, quantised, bias=bias, activation=activation)
    oracle.assert_close(f(x, w.values, bias, scales), want, depth=SIZE[0])
    if implementation in ("xla", "dense"):
        _check(f, x, w.values, bias, scales.astype(np.float64))
        return
    # Kernels take float32 scales, which are too coarse to difference: their gradients are compared with one by values.
    _check(lambda x, values, bias: f(x, values, bias, scales), x, w.values, bias)
    loss = lambda values, scales: jnp.sum(jnp.sin(f(x, values, bias, scales)))  # noqa: E731
    dvalues, dscales = jax.jit(jax.grad(loss, argnums=(0, 1)))(w.values, scales)
    oracle.assert_close(dscales, (np.asarray(dvalues) * w.values).sum((0, 2, 3, 4)) / scales, depth=SIZE[0])


@pytest.mark.parametrize(
    ("pattern", "implementation"), [*(("2:4", i) for i in oracle.IMPLEMENTATIONS), ("4:64", None), ("2:5/3x2", "xla")]
)
def test_every_primitive_by_both_operands(rng, pattern, implementation):
    """spmm, spmm with transpose, and sddmm, whose derivatives are each other."""
    w, x, g = _draw(rng, pattern)

    def products(x, g, values):
        weight = w.with_values(values)
        return (
            nms.spmm(x, weight, implementation=implementation),
            nms.spmm(g, weight, transpose=True, implementation=implementation),
            nms.sddmm(x, g, weight, implementation=implementation),
        )

    y, dx, dv = products(x, g, w.values)
    oracle.assert_close(y, oracle.spmm(x, w), depth=SIZE[0])
    oracle.assert_close(dx, oracle.spmm(g, w, transpose=True), depth=SIZE[1])
    oracle.assert_close(dv, oracle.sddmm(x, g, w), depth=3)
    _check(products, x, g, w.values)


@pytest.mark.parametrize(
    "precision",
    ["default", "high", lax.Precision.HIGHEST, ("default", "highest"), "F64_F64_F64"],
)
def test_every_precision(rng, precision):
    w, x, g = _draw(rng)

    def products(x, g, values):
        weight = w.with_values(values)
        y = nms.spmm(x, weight, precision=precision, activation="silu", bias=jnp.ones(SIZE[1]))
        return y, nms.spmm(g, weight, transpose=True, precision=precision), nms.sddmm(x, g, weight, precision=precision)

    y, dx, dv = products(x, g, w.values)
    oracle.assert_close(y, oracle.spmm(x, w, bias=np.ones(SIZE[1]), activation="silu"), depth=SIZE[0])
    oracle.assert_close(dx, oracle.spmm(g, w, transpose=True), depth=SIZE[1])
    oracle.assert_close(dv, oracle.sddmm(x, g, w), depth=3)
    _check(products, x, g, w.values)


def test_batched_weights(rng):
    w, x, g = _draw(rng, lead=(2,))
    bias = oracle.normal(rng, (2, SIZE[1]), np.float64)

    def products(x, g, values, bias):
        weight = w.with_values(values)
        y = nms.spmm(x, weight, bias=bias, activation="gelu_tanh")
        return y, nms.spmm(g, weight, transpose=True), nms.sddmm(x, g, weight)

    _check(products, x, g, w.values, bias)


def test_third_derivatives(rng):
    w, x, _ = _draw(rng)

    def f(t):
        return jnp.sum(jnp.sin(nms.spmm(t * x, w.with_values(t * w.values), activation="silu")))

    matrix, to_dense = oracle.dense(w), oracle.scatter(w)

    def want(t):
        return jnp.sum(jnp.sin(jax.nn.silu((t * x) @ to_dense(t * w.values))))

    np.testing.assert_array_equal(to_dense(w.values), matrix)
    third, expected = (jax.jit(jax.grad(jax.grad(jax.grad(h))))(0.7) for h in (f, want))
    np.testing.assert_allclose(third, expected, rtol=1e-10)


@pytest.mark.parametrize("implementation", oracle.IMPLEMENTATIONS)
def test_scales_of_a_quantised_weight_when_transposed(rng, implementation):
    w, _, g = _draw(rng)
    scales = jnp.asarray(rng.uniform(0.5, 2, SIZE[1:]), jnp.float32)
    quantised = nms.NMSparse(
        jnp.asarray(oracle.integers(rng, w.values.shape, np.int8)), w.mask, shape=SIZE, pattern="2:4", scales=scales
    )
    matrix = oracle.dense(quantised._replace(scales=None))

    def f(g, scales):
        return nms.spmm(g, quantised._replace(scales=scales), transpose=True, implementation=implementation)

    g = jnp.asarray(g, jnp.float32)
    oracle.assert_close(f(g, scales), (np.asarray(g, np.float64) * scales) @ matrix.T, depth=SIZE[1])
    ct = oracle.normal(rng, (3, SIZE[0]))
    dg, dscales = jax.vjp(f, g, scales)[1](ct)
    back = ct.astype(np.float64) @ matrix
    oracle.assert_close(dg, back * scales, depth=SIZE[0])
    oracle.assert_close(dscales, (back * g).sum(0), depth=SIZE[0])


def test_padding_has_no_gradient(rng):
    """The gradient by values is zero where a kept unit lies beyond the edge."""
    for pattern in ("2:4", "2:4/2x4"):
        w = oracle.draw(rng, SIZE, pattern, np.float64, fill=oracle.normal)
        w = w.with_values(jnp.ones_like(w.values))
        dv = jax.grad(lambda v, w=w: jnp.sum(nms.spmm(jnp.ones((2, SIZE[0])), w._replace(values=v)) ** 2))(w.values)
        np.testing.assert_array_equal(np.asarray(dv) != 0, np.asarray(w.values) != 0)
        assert (np.asarray(w.values) == 0).any()


def test_names_of_the_primitives_in_the_jaxpr(rng):
    w, x, _ = _draw(rng)
    text = str(jax.make_jaxpr(jax.grad(lambda x, v: nms.spmm(x, w.with_values(v)).sum(), argnums=(0, 1)))(x, w.values))
    for name in ("nm_spmm[", "nm_spmm_t[", "nm_sddmm["):
        assert text.count(name) == 1, name
