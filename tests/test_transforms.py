"""Every static parameter under every transformation, against plain jax.numpy on the dense matrix."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax import lax

import jax_nmsparse as nms

TOKENS, IN, OUT = 4, 40, 6
CONFIGS = {
    "plain": {},
    "transpose": {"transpose": True},
    "bias": {"bias": True},
    **{name: {"activation": name, "bias": True} for name in oracle.ACTIVATIONS if name},
    "highest": {"precision": "highest"},
    "preferred": {"preferred_element_type": jnp.float32},
    **{f"implementation {name}": {"implementation": name} for name in oracle.IMPLEMENTATIONS if name},
    **{f"transpose {name}": {"implementation": name, "transpose": True} for name in oracle.IMPLEMENTATIONS if name},
}
_ACTIVATE = {
    None: lambda y: y,
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "silu": jax.nn.silu,
}


class Problem:
    """One static configuration as a sparse and a dense function of the same x and values."""

    def __init__(self, name: str):
        rng = np.random.default_rng(7)
        options = dict(CONFIGS[name])
        self.w = oracle.draw(rng, (IN, OUT), "2:4", np.float64, fill=oracle.normal)
        self.values = self.w.values
        self.transpose = options.get("transpose", False)
        self.x = jnp.asarray(oracle.normal(rng, (TOKENS, OUT if self.transpose else IN), np.float64))
        self.ct = jnp.asarray(oracle.normal(rng, (TOKENS, IN if self.transpose else OUT), np.float64))
        bias = jnp.asarray(oracle.normal(rng, (OUT,), np.float64)) if options.pop("bias", False) else None
        self.options = {**options, "bias": bias}
        self.to_dense = oracle.scatter(self.w)

    def sparse(self, x, values):
        return nms.spmm(x, self.w._replace(values=values), **self.options)

    def dense(self, x, values):
        matrix = self.to_dense(values)
        y = x @ (matrix.T if self.transpose else matrix)
        y = y if self.options["bias"] is None else y + self.options["bias"]
        return _ACTIVATE[self.options.get("activation")](y).astype(self.options.get("preferred_element_type"))


def _loss(f, p):
    return lambda x, values: jnp.sum(p.ct * jnp.sin(f(x, values)))


def _jit(f, p):
    return f(p.x, p.values)


def _vmap(f, p):
    return jax.vmap(f, in_axes=(0, None))(p.x, p.values)


def _grad(f, p):
    return jax.grad(_loss(f, p), argnums=(0, 1))(p.x, p.values)


def _jvp(f, p):
    return jax.jvp(f, (p.x, p.values), (jnp.cos(p.x), jnp.cos(p.values)))


def _vmap_of_grad(f, p):
    loss = lambda x, values, ct: jnp.sum(ct * jnp.sin(f(x, values)))  # noqa: E731
    return jax.vmap(jax.grad(loss, argnums=(0, 1)), in_axes=(0, None, 0))(p.x, p.values, p.ct)


def _grad_of_vmap(f, p):
    return jax.grad(_loss(jax.vmap(f, in_axes=(0, None)), p), argnums=(0, 1))(p.x, p.values)


def _jacrev(f, p):
    return jax.jacrev(f, argnums=(0, 1))(p.x[:2], p.values)


def _jacfwd(f, p):
    return jax.jacfwd(lambda x: f(x, p.values))(p.x[0])


def _hvp(f, p):
    return jax.jvp(jax.grad(_loss(f, p), argnums=(0, 1)), (p.x, p.values), (jnp.cos(p.x), jnp.cos(p.values)))[1]


def _scan(f, p):
    def loss(x, values):
        body = lambda total, scale: (total + f(scale * x, values), None)  # noqa: E731
        return jnp.sum(p.ct * lax.scan(body, jnp.zeros_like(p.ct), jnp.array([1.0, -0.5, 2.0], x.dtype))[0])

    return jax.value_and_grad(loss, argnums=(0, 1))(p.x, p.values)


def _remat(f, p):
    return jax.grad(_loss(jax.checkpoint(f), p), argnums=(0, 1))(p.x, p.values)


def _while_loop(f, p):
    def body(state):
        step, x, _ = state
        return step + 1, 0.5 * x, f(x, p.values)

    return lax.while_loop(lambda state: state[0] < 3, body, (0, p.x, jnp.zeros_like(f(p.x, p.values))))


def _linearize(f, p):
    y, tangent = jax.linearize(f, p.x, p.values)
    transposed = jax.linear_transpose(lambda x: tangent(x, jnp.zeros_like(p.values)), p.x)
    return tangent(p.x, p.values), transposed(p.ct.astype(y.dtype))


TRANSFORMS = (
    _jit, _vmap, _grad, _jvp, _vmap_of_grad, _grad_of_vmap, _jacrev, _jacfwd, _hvp, _scan, _remat, _while_loop,
    _linearize,
)  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS)
def test_every_transform(config, x64):
    """All transformations of one static configuration in one compilation, in float64."""
    p = Problem(config)

    def every(f):
        return jax.jit(lambda: {t.__name__: t(f, p) for t in TRANSFORMS})()

    got, want = every(p.sparse), every(p.dense)
    dtype = p.options.get("preferred_element_type", np.float64)
    for name in got:
        jax.tree.map(lambda a, b: oracle.assert_close(a, b, depth=4 * IN, dtype=dtype), got[name], want[name])


VMAP_AXES = [axes for axes in itertools.product((None, 0, 1), (None, 0, 2), (None, 0, 1)) if axes != (None,) * 3]


def _stack(arrays, axis):
    return arrays[0] if axis is None else np.stack(arrays, axis)


@pytest.mark.parametrize("axes", VMAP_AXES, ids=str)
def test_vmap_over_every_combination_of_axes(rng, axes):
    """x, values and mask mapped or not, over different axes, for the three products; a mask may be mapped alone."""
    weights = [oracle.draw(rng, (IN, OUT), "2:5") for _ in range(3)]
    weights = [w._replace(values=jnp.where(w.values == 0, 1, w.values)) for w in weights]
    xs, gs = oracle.integers(rng, (3, TOKENS, IN)), oracle.integers(rng, (3, TOKENS, OUT))
    x_axis, v_axis, m_axis = axes

    def products(x, g, values, mask):
        w = nms.NMSparse(values, mask, shape=(IN, OUT), pattern="2:5")
        return nms.spmm(x, w), nms.spmm(g, w, transpose=True), nms.sddmm(x, g, w)

    operands = (
        _stack(list(xs), x_axis),
        _stack(list(gs), x_axis),
        _stack([w.values for w in weights], v_axis),
        _stack([w.mask for w in weights], m_axis),
    )
    got = jax.jit(jax.vmap(products, in_axes=(x_axis, x_axis, v_axis, m_axis)))(*operands)
    for i in range(3):
        x, g = (a[i if x_axis is not None else 0] for a in (xs, gs))
        w = weights[i if m_axis is not None else 0]
        w = w._replace(values=weights[i if v_axis is not None else 0].values)
        np.testing.assert_array_equal(got[0][i], oracle.spmm(x, w))
        np.testing.assert_array_equal(got[1][i], oracle.spmm(g, w, transpose=True))
        np.testing.assert_array_equal(got[2][i], oracle.sddmm(x, g, w))


@pytest.mark.parametrize("axes", [(0, None, None), (None, 0, None), (None, None, 0), (0, 0, 0)], ids=str)
def test_vmap_over_bias_and_scales(rng, axes):
    x_axis, bias_axis, scales_axis = axes
    w = oracle.draw(rng, (IN, OUT), "2:4")
    x, bias = oracle.integers(rng, (3, TOKENS, IN)), oracle.integers(rng, (3, OUT))
    scales = 2.0 ** oracle.integers(rng, (3, OUT))

    def f(x, bias, scales):
        return nms.spmm(x, w._replace(scales=scales), bias=bias, activation="relu")

    operands = [a if axis is not None else a[0] for a, axis in zip((x, bias, scales), axes, strict=True)]
    got = jax.jit(jax.vmap(f, in_axes=axes))(*operands)
    for i in range(3):
        one = [a[i if axis is not None else 0] for a, axis in zip((x, bias, scales), axes, strict=True)]
        want = oracle.spmm(one[0], w._replace(scales=one[2]), bias=one[1], activation="relu")
        np.testing.assert_array_equal(got[i], want)


def test_nested_vmap(rng):
    w = oracle.draw(rng, (2, IN, OUT), "2:4")
    x = oracle.integers(rng, (3, 2, TOKENS, IN))
    y = jax.vmap(jax.vmap(lambda x, w: x @ w), in_axes=(0, None))(x, w)
    np.testing.assert_array_equal(y, x @ oracle.dense(w))


def test_a_batch_of_x_is_one_call(rng):
    """vmap over x folds into tokens and vmap over weights into the batch axis: no loop, one product."""
    w = oracle.draw(rng, (2, IN, OUT), "2:4")
    x = oracle.integers(rng, (3, 2, TOKENS, IN))
    single = jax.tree.map(lambda a: a[0], w)
    for f, arguments in (
        (jax.vmap(lambda x: x @ single), (x[:, 0],)),
        (jax.vmap(lambda x, w: x @ w), (x[0], w)),
        (jax.vmap(jax.vmap(lambda x, w: x @ w), in_axes=(0, None)), (x, w)),
    ):
        assert str(jax.make_jaxpr(f)(*arguments)).count("nm_spmm[") == 1


def test_value_and_grad_of_weights(rng):
    """Weight-shaped gradients: pytrees, argnums, auxiliary results, and weights that are not float."""
    w = oracle.draw(rng, (IN, OUT), "2:4", fill=oracle.normal)
    x, g = oracle.normal(rng, (TOKENS, IN)), oracle.normal(rng, (TOKENS, OUT))
    params = {"w": w, "b": jnp.zeros(OUT)}

    def f(x, params):
        y = nms.spmm(x, params["w"], bias=params["b"])
        return jnp.sum(g * y), y

    (loss, y), (dx, dparams) = jax.jit(nms.value_and_grad(f, argnums=(0, 1), has_aux=True))(x, params)
    oracle.assert_close(y, oracle.spmm(x, w), depth=IN)
    oracle.assert_close(loss, np.sum(g.astype(np.float64) * oracle.spmm(x, w)), depth=IN * OUT)
    oracle.assert_close(dx, oracle.spmm(g, w, transpose=True), depth=OUT)
    assert isinstance(dparams["w"], nms.NMSparse)
    np.testing.assert_array_equal(dparams["w"].mask, w.mask)
    oracle.assert_close(dparams["w"].values, oracle.sddmm(x, g, w), depth=TOKENS)
    oracle.assert_close(dparams["b"], g.sum(0), depth=TOKENS)
    dparams, aux = nms.grad(f, argnums=-1, has_aux=True)(x, params)
    oracle.assert_close(aux, y)
    oracle.assert_close(dparams["w"].values, oracle.sddmm(x, g, w), depth=TOKENS)
    jax.grad(lambda v: f(x, {**params, "w": w._replace(values=v)})[0])(w.values)
    with pytest.raises(TypeError, match="uint32"):
        jax.grad(lambda w: (x @ w).sum())(w)
