"""Statistics of inputs, and gathering them by running a user's function with linen and NNX models."""

import functools
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from flax import nnx

import jax_nmsparse as nms
from jax_nmsparse.linen import NMSparseDense
from jax_nmsparse.pruning import Statistics, calibrate


def assert_counts(statistics: Any, x: Any, gram: bool = True) -> None:
    """Compares with sums over the rows of x in float64."""
    rows = np.asarray(x).astype(np.float64).reshape(-1, x.shape[-1])
    assert int(statistics.tokens) == len(rows)
    oracle.assert_close(statistics.squares, np.square(rows).sum(0), depth=len(rows))
    if gram:
        oracle.assert_close(statistics.gram, rows.T @ rows, depth=len(rows))
    else:
        assert statistics.gram is None


def take(stacked: Any, i: int) -> Statistics:
    return jax.tree.map(lambda leaf: leaf[i], stacked)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_sums_over_batches(rng, dtype):
    a, b = oracle.normal(rng, (3, 5, 7), dtype), oracle.normal(rng, (11, 7), dtype)
    both = np.concatenate([a.reshape(-1, 7), b])
    assert_counts(Statistics.from_inputs(jnp.asarray(a)).update(jnp.asarray(b)), both)
    assert_counts(Statistics.from_inputs(jnp.asarray(a), gram=False).update(jnp.asarray(b)), both, gram=False)
    joined: Any = Statistics.from_inputs(jnp.asarray(a)).merge(Statistics.from_inputs(jnp.asarray(b)))
    assert_counts(joined, both)
    assert joined.squares.dtype == joined.gram.dtype == jnp.float32


def test_float64_stays(x64, rng):
    x = oracle.normal(rng, (50, 4), np.float64)
    statistics: Any = Statistics.from_inputs(jnp.asarray(x))
    assert statistics.gram.dtype == np.float64
    np.testing.assert_allclose(statistics.gram, x.T @ x, rtol=1e-13)


def test_padding_does_not_count_even_where_it_is_nan(rng):
    x = oracle.normal(rng, (2, 4, 3))
    where = np.array([[1, 1, 0, 0], [1, 1, 1, 0]])
    x[where == 0] = np.nan
    assert_counts(Statistics.from_inputs(jnp.asarray(x), where=where), x[where == 1])


def test_stacked_layers_by_vmap(rng):
    x = jnp.asarray(oracle.normal(rng, (3, 20, 6)))
    stacked: Any = jax.vmap(Statistics.from_inputs)(x)
    assert stacked.gram.shape == (3, 6, 6)
    for i in range(3):
        assert_counts(take(stacked, i), x[i])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: Statistics.from_inputs(jnp.ones((2, 3), jnp.int32)), TypeError, "x is int32, expected a float"),
        (lambda: Statistics.from_inputs(jnp.float32(1)), ValueError, "x has no axes"),
        (lambda: Statistics.from_inputs(jnp.ones((2, 3)), where=jnp.ones(3)), ValueError, r"where has shape \(3,\)"),
        (lambda: Statistics.from_inputs(jnp.ones((2, 3))).update(jnp.ones((2, 4))), ValueError, r"expected \[..., 3\]"),
        (
            lambda: Statistics.from_inputs(jnp.ones((2, 3))).merge(
                Statistics.from_inputs(jnp.ones((2, 3)), gram=False)
            ),
            ValueError,
            "expected the same in_features and gram",
        ),
    ],
)
def test_statistics_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


class Net(nn.Module):
    """Dense, and a DenseGeneral that contracts two axes; the first layer runs twice."""

    @nn.compact
    def __call__(self, x, spread=False):
        first = nn.Dense(8, name="first")
        h = nn.relu(first(first(x)))
        heads = nn.DenseGeneral((2, 3), name="heads")(h)
        return nn.DenseGeneral(4, axis=(-2, -1), name="out")(heads)


def _inputs_of_net(params, x):
    def apply(layer, x):
        kernel = np.asarray(params[layer]["kernel"], np.float64)
        return np.tensordot(x, kernel, kernel.ndim - 1 if layer == "out" else 1) + np.asarray(params[layer]["bias"])

    x = np.asarray(x, np.float64)
    again = apply("first", x)
    h = np.maximum(apply("first", again), 0)
    heads = apply("heads", h)
    return {"first": np.concatenate([x, again]), "heads": h, "out": heads.reshape(*heads.shape[:-2], 6)}


def test_linen_model(rng):
    net = Net()
    batches = [jnp.asarray(oracle.normal(rng, (size, 5, 8))) for size in (2, 2, 3)]
    variables = net.init(jax.random.key(0), batches[0])
    # With jit around it or without, the layers are seen.
    for function in (net.apply, jax.jit(net.apply)):
        found = calibrate(function, variables, batches)
        wanted = [_inputs_of_net(variables["params"], batch) for batch in batches]
        assert list(found) == ["first", "heads", "out"]
        for name, statistics in found.items():
            rows = np.concatenate([w[name].reshape(-1, w[name].shape[-1]) for w in wanted])
            assert_counts(statistics, rows)
    some = calibrate(net.apply, variables, batches, include="^(heads|out)$", gram=False)
    assert list(some) == ["heads", "out"]
    assert some["out"].gram is None
    np.testing.assert_array_equal(some["out"].squares, found["out"].squares)


def test_where_applies_to_layers_that_read_the_tokens(rng):
    class Pooled(nn.Module):
        @nn.compact
        def __call__(self, x, where):
            h = nn.Dense(8, name="tokens")(x)
            h = nn.DenseGeneral((2, 4), name="heads")(h)
            h = nn.Dense(3, name="each_head")(h)
            return nn.Dense(2, name="pooled")(h.reshape(*x.shape[:2], 6).sum(1))

    x, where = oracle.normal(rng, (2, 4, 8)), np.array([[1, 1, 0, 0], [1, 1, 1, 0]], bool)
    net = Pooled()
    variables = net.init(jax.random.key(0), x, where)
    found = calibrate(lambda v, b: net.apply(v, *b), variables, [(x, where)], where=lambda b: b[1])
    assert {name: int(s.tokens) for name, s in found.items()} == {"tokens": 5, "heads": 5, "each_head": 10, "pooled": 2}
    assert_counts(found["tokens"], x[where])


@pytest.mark.parametrize("shape", [(2, 5), (4, 2), (2, 4, 8), (3,)])
def test_where_that_fits_no_layer_is_refused(rng, shape):
    net, x = nn.Dense(2, name="up"), oracle.normal(rng, (2, 4, 8))
    variables = net.init(jax.random.key(0), x)
    with pytest.raises(ValueError, match=f"where gives an array of shape {re.escape(str(shape))}, .* reads .2, 4, 8.;"):
        calibrate(net.apply, variables, [x], where=lambda _: jnp.ones(shape, bool))


def test_where_may_be_a_list_or_numpy(rng):
    net, x = nn.Dense(2), oracle.normal(rng, (2, 4, 8))
    variables, where = net.init(jax.random.key(0), x), [[1, 1, 0, 0], [1, 1, 1, 0]]
    given: Any
    for given in (where, np.array(where, bool)):
        (found,) = calibrate(net.apply, variables, [x], where=lambda _, given=given: given).values()
        assert_counts(found, x[np.array(where, bool)])


def test_a_subclass_that_calls_its_base_counts_once(rng):
    class Twice(nn.Dense):
        def __call__(self, inputs):
            return 2 * super().__call__(inputs)

    class Doubled(nnx.Linear):
        def __call__(self, inputs):
            return 2 * super().__call__(inputs)

    x = jnp.asarray(oracle.normal(rng, (5, 3)))
    net = Twice(2)
    assert_counts(calibrate(net.apply, net.init(jax.random.key(0), x), [x])[""], x)
    model = Doubled(3, 2, rngs=nnx.Rngs(0))
    found = calibrate(lambda model, x: model(x), model, [x], layers=(Doubled, nnx.Linear))
    assert_counts(found[""], x)


class NNXNet(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])
        self.head = nnx.LinearGeneral((2, 4), 3, axis=(-2, -1), rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = jnp.tanh(block(x))
        return self.head(x.reshape(*x.shape[:-1], 2, 4))


def test_nnx_model(rng):
    model = NNXNet(nnx.Rngs(0))
    before = jax.tree.leaves(nnx.state(model))
    call, batch = nnx.Linear.__call__, jnp.asarray(oracle.normal(rng, (4, 8)))
    found = calibrate(lambda model, x: model(x), model, [batch, 2 * batch])
    assert nnx.Linear.__call__ is call
    assert list(found) == ["blocks/0", "blocks/1", "head"]
    want = {"blocks/0": [], "blocks/1": [], "head": []}
    blocks: Any = model.blocks
    for x in (np.asarray(batch, np.float64), 2 * np.asarray(batch, np.float64)):
        for name, block in zip(want, blocks, strict=False):
            want[name].append(x)
            x = np.tanh(x @ np.asarray(block.kernel[...], np.float64) + np.asarray(block.bias[...]))
        want["head"].append(x)
    for name, rows in want.items():
        assert_counts(found[name], np.concatenate(rows))
    oracle.assert_same_bits(before, jax.tree.leaves(nnx.state(model)))


def test_layers_that_are_sparse_already(rng):
    """The next layer can be calibrated on what the sparse layers before it give."""
    x = jnp.asarray(oracle.normal(rng, (6, 8)))
    net = nn.Sequential([NMSparseDense(8, pattern="2:4"), nn.Dense(4)])
    variables = net.init(jax.random.key(0), x)
    found = calibrate(net.apply, variables, [x], layers=(nn.Dense, NMSparseDense))
    assert list(found) == ["layers_0", "layers_1"]
    sparse = NMSparseDense(8, pattern="2:4").bind({c: variables[c]["layers_0"] for c in variables}).weight()
    assert_counts(found["layers_0"], x)
    assert_counts(found["layers_1"], oracle.spmm(x, sparse))


def test_sow_carries_statistics_out_of_a_scan(rng):
    """What the message about inner transformations advises."""

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            self.sow("intermediates", "inputs", Statistics.from_inputs(x))
            return jnp.tanh(nn.Dense(4)(x)), None

    stack = nn.scan(Layer, variable_axes={"params": 0, "intermediates": 0}, split_rngs={"params": True}, length=3)()
    x = jnp.asarray(oracle.normal(rng, (6, 4)))
    variables: Any = {"params": stack.init(jax.random.key(0), x, None)["params"]}
    sown: Any
    _, sown = stack.apply(variables, x, None, mutable="intermediates")
    (statistics,) = sown["intermediates"]["inputs"]
    kernel = variables["params"]["Dense_0"]["kernel"]
    w = nms.prune(kernel, "2:4", method="sparsegpt", inputs=statistics).validate()
    for i in range(3):
        assert_counts(take(statistics, i), x)
        one = nms.prune(kernel[i], "2:4", method="sparsegpt", inputs=Statistics.from_inputs(x))
        np.testing.assert_array_equal(w.mask[i], one.mask)
        x = jnp.tanh(x @ kernel[i])
    with pytest.raises(ValueError, match="inside an inner jit, scan, vmap or remat .* sow a Statistics"):
        calibrate(lambda v, x: stack.apply(v, x, None), variables, [x])


def test_calibrate_errors(rng):
    net = nn.Dense(2)
    x = jnp.ones((3, 4))
    variables = net.init(jax.random.key(0), x)
    with pytest.raises(ValueError, match="no layer among Dense, DenseGeneral, .* whose path matches 'attention'"):
        calibrate(net.apply, variables, [x], include="attention")
    with pytest.raises(ValueError, match="batches may be empty"):
        calibrate(net.apply, variables, [])
    with pytest.raises(ValueError, match="inputs of .* hold NaN or Inf"):
        calibrate(net.apply, variables, [x.at[0, 0].set(jnp.nan)])
    inner = functools.partial(jax.jit, static_argnums=())(net.apply)
    with pytest.raises(ValueError, match="inside an inner jit|compiled already"):
        calibrate(lambda v, x: inner(v, x), variables, [x])
