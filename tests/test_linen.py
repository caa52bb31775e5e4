"""`NMSparseDense` beside `nn.Dense`, and through what Flax, optax and checkpoints do to variables."""

import gc
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import orbax.checkpoint as ocp
import pytest
from flax import serialization

import jax_nmsparse as nms
from jax_nmsparse.linen import MASK_COLLECTION, NMSparseDense

FLOATS = ("float32", "bfloat16", "float16", "float64")
COLLECTIONS: dict[Any, Any] = {"params": 0, MASK_COLLECTION: 0}


def integer_init(key, shape, dtype):
    return jax.random.randint(key, shape, -3, 4).astype(dtype)


def make(in_features=40, features=24, pattern="2:4", key=0, **arguments) -> tuple[Any, Any]:
    layer = NMSparseDense(features, pattern=pattern, **arguments)
    return layer, jax.jit(layer.init)(jax.random.key(key), jnp.ones((1, in_features)))


def as_dense(variables):
    return {"params": NMSparseDense.to_dense(variables)}


# Promotion, initial values, results.


@pytest.mark.parametrize("param_dtype", FLOATS)
@pytest.mark.parametrize("dtype", [None, *FLOATS])
def test_promotes_as_dense_dtype_and_param_dtype_surprise(x64, rng, dtype, param_dtype):
    """flax#3945: for every dtype, param_dtype and input dtype the same result dtype, and exactly the same integers."""
    options = {"dtype": dtype, "param_dtype": param_dtype, "kernel_init": integer_init, "bias_init": integer_init}
    sparse, dense = NMSparseDense(6, pattern="2:4", **options), nn.Dense(6, **options)
    variables = jax.jit(sparse.init)(jax.random.key(1), jnp.ones(16))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(variables["params"])} == {param_dtype}
    for x_dtype in (*FLOATS, "int8", "int32"):
        x = jnp.zeros((2, 16), x_dtype)
        got = jax.eval_shape(sparse.apply, variables, x)
        assert got == jax.eval_shape(dense.apply, as_dense(variables), x), x_dtype
    if dtype in (None, "bfloat16", "float64"):
        x = oracle.integers(rng, (5, 16))
        got, want = jax.jit(lambda v: (sparse.apply(v, x), dense.apply(as_dense(v), x)))(variables)
        oracle.assert_same_bits(got, want)


def test_refuses_what_dense_refuses_and_complex():
    x = jnp.ones((1, 8))
    for layer in (nn.Dense(4, dtype=jnp.int32), NMSparseDense(4, pattern="2:4", dtype=jnp.int32)):
        with pytest.raises(ValueError, match="inexact"):
            jax.eval_shape(layer.init, jax.random.key(0), x)
    with pytest.raises(TypeError, match="complex64, supported are"):
        NMSparseDense(4, pattern="2:4", param_dtype=jnp.complex64).init(jax.random.key(0), x)


@pytest.mark.parametrize("pattern", ["2:4", "8:32/1x64", "3:6"])
def test_init_prunes_the_draw_of_dense(pattern):
    """The same key draws the same dense kernel as nn.Dense, also under jit and eval_shape."""
    key, x = jax.random.key(3), jnp.ones((2, 40))
    dense = nn.Dense(24, bias_init=nn.initializers.normal()).init(key, x)
    layer = NMSparseDense(24, pattern=pattern, bias_init=nn.initializers.normal())
    got = layer.init(key, x)
    want = NMSparseDense.from_dense(dense, pattern)
    oracle.assert_same_bits(got, want)
    shapes = jax.eval_shape(layer.init, key, x)
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, want)
    jitted = jax.jit(layer.init)(key, x)
    oracle.assert_same_bits(jitted[MASK_COLLECTION], want[MASK_COLLECTION])
    oracle.assert_close(jitted["params"]["values"], want["params"]["values"])


@pytest.mark.parametrize(
    ("pattern", "in_features", "features"),
    [("1:4", 64, 32), ("3:6", 31, 33), ("4:64", 129, 7), ("8:32/2x3", 100, 20), ("2:4/1x8", 1, 65)],
)
def test_equals_the_oracle(rng, pattern, in_features, features):
    layer, variables = make(in_features, features, pattern, bias_init=nn.initializers.normal())
    w = layer.bind(variables).weight()
    assert w.shape == (in_features, features)
    x = oracle.normal(rng, (2, 3, in_features))
    want = oracle.spmm(x, w, bias=variables["params"]["bias"])
    oracle.assert_close(layer.apply(variables, x), want, depth=in_features)


def test_activation_and_implementation(rng):
    x = oracle.normal(rng, (3, 40))
    layer, variables = make(use_bias=False, precision="highest")
    assert list(variables["params"]) == ["values"]
    for activation, implementation in zip(oracle.ACTIVATIONS[1:], 2 * oracle.IMPLEMENTATIONS, strict=False):
        layer = layer.clone(activation=activation, implementation=implementation)
        want = oracle.spmm(x, layer.bind(variables).weight(), activation=activation)
        oracle.assert_close(jax.jit(layer.apply)(variables, x), want, depth=40)
    with pytest.raises(ValueError, match="NMSparseDense: activation is 'tanh'"):
        layer.clone(activation="tanh").apply(variables, x)


def test_named_implementation_reaches_the_product():
    layer, variables = make(implementation="dense")
    jaxpr = str(jax.make_jaxpr(layer.apply)(variables, jnp.ones((2, 40))))
    assert "implementation=dense" in jaxpr


# Quantised values.


@pytest.mark.parametrize("values_dtype", ["int8", "float8_e4m3fn"])
def test_quantised(rng, values_dtype):
    trained = nn.Dense(24).init(jax.random.key(0), jnp.ones((1, 40)))
    variables = NMSparseDense.from_dense(trained, "2:4", values_dtype=values_dtype)
    layer: Any = NMSparseDense(24, pattern="2:4", values_dtype=values_dtype)
    assert set(variables["params"]) == {"scales", "bias"}
    assert variables[MASK_COLLECTION]["values"].dtype == values_dtype
    oracle.assert_same_bits(layer.init(jax.random.key(0), jnp.ones((1, 40))), variables)
    x = oracle.normal(rng, (3, 40))
    want = oracle.spmm(x, layer.bind(variables).weight(), bias=variables["params"]["bias"])
    oracle.assert_close(layer.apply(variables, x), want, depth=40)
    half = layer.clone(dtype=jnp.bfloat16)
    assert half.apply(variables, x).dtype == jnp.bfloat16

    constants = {MASK_COLLECTION: variables[MASK_COLLECTION]}
    grads = jax.grad(lambda params: layer.apply({"params": params, **constants}, x).sum())(variables["params"])
    unit = oracle.spmm(x, NMSparseDense.to_weight(variables)._replace(scales=jnp.ones(24)))
    oracle.assert_close(grads["scales"], unit.sum(0), depth=120)


# Conversion.


def test_round_trip_with_dense():
    trained = nn.Dense(24, bias_init=nn.initializers.normal()).init(jax.random.key(0), jnp.ones((1, 40)))
    variables = NMSparseDense.from_dense(trained["params"], "2:4")
    back = NMSparseDense.to_dense(variables)
    np.testing.assert_array_equal(back["bias"], trained["params"]["bias"])
    assert int((back["kernel"] != 0).sum()) == 20 * 24
    oracle.assert_same_bits(NMSparseDense.from_dense(back, nms.NMPattern(2, 4), exact=True), variables)
    with pytest.raises(ValueError, match="more than 2 nonzero"):
        NMSparseDense.from_dense(trained, "2:4", exact=True)
    with pytest.raises(ValueError, match=r"holds \['Dense_0'\]"):
        NMSparseDense.from_dense({"params": {"Dense_0": trained["params"]}}, "2:4")


def test_boolean_masks_of_other_libraries_run_fast(rng):
    """jaxpruner#4, #8: a boolean mask becomes a weight with the same logits."""
    kernel = oracle.normal(rng, (64, 12))
    keep = oracle.draw(rng, (64, 12), "2:4", fill=lambda rng, shape, dtype: np.ones(shape, dtype)).keep()
    variables = NMSparseDense.from_dense({"kernel": kernel}, "2:4", scores=keep)
    x = oracle.normal(rng, (5, 64))
    got = NMSparseDense(12, pattern="2:4", use_bias=False).apply(variables, x)
    oracle.assert_close(got, x.astype(np.float64) @ np.where(keep, kernel, 0), depth=32)


@pytest.mark.parametrize("pattern", ["2:4", "8:32", "16:32/1x32"])
def test_sparse_weights_save_memory(pattern):
    """pytorch#115008, sparsegpt#1: density + mask bits of the dense bytes, and no dense copy stays alive."""
    pattern = nms.NMPattern.parse(pattern)
    kernel = jax.random.normal(jax.random.key(0), (256, 512))
    dense_bytes = kernel.nbytes
    variables = NMSparseDense.from_dense({"kernel": kernel}, pattern)
    got = sum(leaf.nbytes for leaf in jax.tree.leaves(variables))
    mask_bytes = 256 * 512 // 8 // (pattern.block[0] * pattern.block[1])
    assert got == dense_bytes * pattern.density + mask_bytes + 4
    del kernel
    gc.collect()
    assert not [a for a in jax.live_arrays() if a.shape == (256, 512)]


# Transformations of Flax.


class Block(nn.Module):
    """A residual layer, as a body of nn.scan: (carry, None) -> (carry, None)."""

    features: int = 32

    @nn.compact
    def __call__(self, x, _=None):
        return x + NMSparseDense(self.features, pattern="8:32/1x8", activation="gelu", name="mlp")(x), None


class Stack(nn.Module):
    transform: str

    @nn.compact
    def __call__(self, x):
        block = nn.remat(Block, prevent_cse=False) if self.transform == "remat of scan" else Block
        layers = nn.scan(block, variable_axes=COLLECTIONS, split_rngs={"params": True}, length=3)
        return layers(name="layers")(x, None)[0]


@pytest.mark.parametrize("transform", ["scan", "remat of scan"])
def test_scan_over_stacked_layers(rng, transform):
    x = oracle.normal(rng, (4, 32))
    model: Any = Stack(transform)
    variables = jax.jit(model.init)(jax.random.key(0), x)
    w = NMSparseDense.to_weight({c: variables[c]["layers"]["mlp"] for c in COLLECTIONS}).validate()
    assert w.shape == (3, 32, 32)
    assert len(np.unique(np.asarray(w.values).reshape(3, -1), axis=0)) == 3, "every layer draws its own values"

    def unrolled(params):
        y = x
        for i in range(3):
            one = {"params": params["layers"]["mlp"], MASK_COLLECTION: variables[MASK_COLLECTION]["layers"]["mlp"]}
            y = y + NMSparseDense(32, pattern="8:32/1x8", activation="gelu").apply(
                jax.tree.map(lambda leaf, i=i: leaf[i], one), y
            )
        return (y**2).sum(), y

    def scanned(params):
        y = model.apply({"params": params, MASK_COLLECTION: variables[MASK_COLLECTION]}, x)
        return (y**2).sum(), y

    got, y = jax.jit(jax.grad(scanned, has_aux=True))(variables["params"])
    want, expected = jax.jit(jax.grad(unrolled, has_aux=True))(variables["params"])
    oracle.assert_close(y, expected, depth=96)
    jax.tree.map(lambda a, b: oracle.assert_close(a, b, depth=96), got, want)


def test_vmap_makes_an_ensemble(rng):
    x = oracle.normal(rng, (4, 40))
    vmap: Any = nn.vmap
    layers = vmap(NMSparseDense, variable_axes=COLLECTIONS, split_rngs={"params": True}, in_axes=None, axis_size=3)
    layers = layers(24, pattern="2:4")
    variables = layers.init(jax.random.key(0), x)
    w = NMSparseDense.to_weight(variables)
    assert w.shape == (3, 40, 24)
    oracle.assert_close(layers.apply(variables, x), oracle.spmm(np.broadcast_to(x, (3, 4, 40)), w), depth=40)
    with pytest.raises(ValueError, match=r"variable_axes names both collections, 'params' and 'nm_mask'"):
        NMSparseDense(24, pattern="2:4").apply(variables, x)


def test_remat_and_gradients_without_integer_leaves(rng):
    """haiku#513: the mask is not among the params, so jax.grad runs on them untouched."""
    x = oracle.normal(rng, (4, 40))
    plain, variables = make()
    layer = nn.remat(NMSparseDense)(24, pattern="2:4")
    constants = {MASK_COLLECTION: variables[MASK_COLLECTION]}
    assert all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(variables["params"]))

    def loss(params, layer):
        return layer.apply({"params": params, **constants}, x).sum()

    for one in (plain, layer):
        grads = jax.grad(loss)(variables["params"], one)
        want = oracle.sddmm(x, np.ones((4, 24)), plain.bind(variables).weight())
        oracle.assert_close(grads["values"], want, depth=4)


def test_partitioning_metadata_follows_the_axes():
    init = nn.with_partitioning(nn.initializers.normal(), ("in", "out"))
    layer: Any = NMSparseDense(24, pattern="2:4", kernel_init=init)
    variables = layer.init(jax.random.key(0), jnp.ones((1, 40)))
    specs = nn.get_partition_spec(variables)
    assert specs["params"]["values"] == jax.P("in", "out", None, None, None)
    assert specs[MASK_COLLECTION]["mask"] == jax.P("in", "out")
    assert layer.apply(variables, jnp.ones((3, 40))).shape == (3, 24)
    quantised = NMSparseDense(24, pattern="4:64", kernel_init=init, values_dtype=jnp.int8)
    specs = nn.get_partition_spec(quantised.init(jax.random.key(0), jnp.ones((1, 40))))
    assert specs["params"]["scales"] == jax.P("out")
    assert specs[MASK_COLLECTION]["mask"] == jax.P("in", "out", None)


# Training.


class Classifier(nn.Module):
    pattern: str | None

    @nn.compact
    def __call__(self, x):
        def dense(features):
            return NMSparseDense(features, pattern=self.pattern) if self.pattern else nn.Dense(features)

        return dense(3)(nn.relu(dense(48)(x)))


@pytest.mark.parametrize("pattern", ["2:4", "8:32/1x4"])
def test_backward_twenty_steps_equal_masked_dense_training(rng, pattern):
    """pytorch#126420: the losses of N:M training are those of dense training with masked kernels and gradients.

    apex#1474, llm-compressor#952: and the weights still satisfy the pattern afterwards.
    """
    x, labels = oracle.normal(rng, (64, 40)), rng.integers(0, 3, 64)
    sparse, dense = Classifier(pattern), Classifier(None)
    variables = jax.jit(sparse.init)(jax.random.key(0), x)
    names = {"NMSparseDense_0": "Dense_0", "NMSparseDense_1": "Dense_1"}

    def weight(name, params):
        return NMSparseDense.to_weight({"params": params[name], MASK_COLLECTION: variables[MASK_COLLECTION][name]})

    kernels, keep = {}, {}
    for name, twin in names.items():
        w = weight(name, variables["params"])
        bias = variables["params"][name]["bias"]
        kernels[twin] = {"kernel": oracle.dense(w).astype(np.float32), "bias": bias}
        ones = oracle.dense(w._replace(values=jnp.ones(w.values.shape)))
        keep[twin] = {"kernel": ones != 0, "bias": np.ones(bias.shape, bool)}
    optimiser = optax.adamw(1e-2, weight_decay=1e-2)

    def train(model, params, constants, mask):
        def loss(params):
            logits = model.apply({"params": params, **constants}, x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        @jax.jit
        def step(params, state):
            value, grads = jax.value_and_grad(loss)(params)
            if mask is not None:
                grads = jax.tree.map(lambda g, keep: jnp.where(keep, g, 0), grads, mask)
            updates, state = optimiser.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value

        state, losses = optimiser.init(params), []
        for _ in range(20):
            params, state, value = step(params, state)
            losses.append(value)
        return params, jnp.stack(losses)

    params, losses = train(sparse, variables["params"], {MASK_COLLECTION: variables[MASK_COLLECTION]}, None)
    want, expected = train(dense, kernels, {}, keep)
    assert losses[-1] < 0.7 * losses[0]
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    for name, twin in names.items():
        w = weight(name, params).validate()
        np.testing.assert_allclose(oracle.dense(w), want[twin]["kernel"], rtol=1e-3, atol=1e-4)


# Checkpoints.


def test_checkpoint_says_its_pattern_orbax(tmp_path):
    """llm-compressor#72, in orbax: restored with and without a target, and self-describing."""
    layer, variables = make(pattern="4:64/1x8")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "step", variables)
    with ocp.StandardCheckpointer() as checkpointer:
        abstract = jax.eval_shape(layer.init, jax.random.key(0), jnp.ones((1, 40)))
        abstract = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(
                a.shape, a.dtype, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0])
            ),
            abstract,
        )
        restored = checkpointer.restore(tmp_path / "step", abstract)
    oracle.assert_same_bits(restored, variables)
    assert repr(NMSparseDense.to_weight(restored).validate()) == "NMSparse(40x24, 4:64/1x8, float32)"


def test_checkpoint_says_its_pattern_msgpack():
    """llm-compressor#72, in flax.serialization; a target with another pattern of the same array shapes is refused."""
    layer, variables = make(pattern="16:32")
    data = serialization.to_bytes(variables)
    restored = serialization.from_bytes(variables, data)
    oracle.assert_same_bits(restored, variables)
    alone: Any = serialization.msgpack_restore(data)
    assert str(NMSparseDense.to_weight(alone).pattern) == "16:32"
    _, other = make(pattern="2:4")
    assert jax.tree.map(jnp.shape, other["params"]) == jax.tree.map(jnp.shape, variables["params"])
    with pytest.raises(ValueError, match="do not match"):
        serialization.from_bytes(other, data)


def test_groups_run_along_the_contraction_axis(rng):
    """jaxpruner NByM: square kernels tell the axes apart."""
    for in_features, features in ((32, 32), (32, 64)):
        variables = NMSparseDense.from_dense({"kernel": oracle.normal(rng, (in_features, features))}, "2:4")
        kept = oracle.dense(NMSparseDense.to_weight(variables)) != 0
        assert (kept.reshape(-1, 4, features).sum(1) == 2).all()
