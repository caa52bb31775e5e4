"""`NMSparseLinear` and `NMSparseLinearGeneral` beside the dense ones, and what NNX and checkpoints do to them."""

import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import jax_nmsparse as nms
from jax_nmsparse import checkpoint
from jax_nmsparse.nnx import NMMask, NMSparseLinear, NMSparseLinearGeneral

FLOATS = ("float32", "bfloat16", "float16", "float64")


def integer_init(key, shape, dtype):
    return jax.random.randint(key, shape, -3, 4).astype(dtype)


def make(in_features=40, out_features=24, pattern="2:4", seed=0, **arguments: Any) -> Any:
    return NMSparseLinear(in_features, out_features, pattern=pattern, rngs=nnx.Rngs(seed), **arguments)


def pure(model) -> dict[str, Any]:
    return nnx.to_pure_dict(nnx.state(model))


# Promotion, initial values, results.


@pytest.mark.parametrize(("dtype", "param_dtype"), [(None, "float32"), (None, "bfloat16"), ("float16", "float64")])
def test_promotes_as_linear(x64, rng, dtype, param_dtype):
    """flax#3945, in NNX: for every dtype, param_dtype and input dtype the same result dtype, and the same integers."""
    options = {"dtype": dtype, "param_dtype": param_dtype, "kernel_init": integer_init, "bias_init": integer_init}
    sparse = make(16, 6, **options)
    dense = sparse.to_dense()
    assert sparse.values.dtype == param_dtype and dense.kernel.dtype == param_dtype
    for x_dtype in (*FLOATS, "int8", "int32"):
        x = jnp.zeros((2, 16), x_dtype)
        assert jax.eval_shape(sparse, x) == jax.eval_shape(dense, x), x_dtype
    if dtype in (None, "float16"):
        x = oracle.integers(rng, (5, 16))
        oracle.assert_same_bits(sparse(x), dense(x))


@pytest.mark.parametrize("pattern", ["2:4", "8:32/1x64"])
def test_init_prunes_the_draw_of_linear(rng, pattern):
    options: Any = {"bias_init": nnx.initializers.normal()}
    dense: Any = nnx.Linear(40, 24, rngs=nnx.Rngs(3), **options)
    got, want = make(pattern=pattern, seed=3, **options), NMSparseLinear.from_dense(dense, pattern)
    back: Any = want.to_dense()
    oracle.assert_same_bits(pure(got), pure(want))
    x = oracle.normal(rng, (2, 3, 40))
    oracle.assert_close(got(x), oracle.spmm(x, got.weight, bias=dense.bias[...]), depth=40)
    oracle.assert_close(dense(x), back(x) + x @ (dense.kernel[...] - want.weight.todense()), depth=80)


def test_arguments_reach_the_product(rng):
    x = oracle.normal(rng, (3, 40))
    layer = make(use_bias=False, activation="silu", implementation="dense", preferred_element_type="float16")
    assert layer.bias is None
    assert "implementation=dense" in str(jax.make_jaxpr(lambda x: layer(x))(x))
    want = oracle.spmm(x, layer.weight, activation="silu")
    got = layer(x)
    assert got.dtype == jnp.float16
    oracle.assert_close(got, want, depth=40)


@pytest.mark.parametrize("values_dtype", ["int8", "float8_e4m3fn"])
def test_quantised_values_are_no_parameters(rng, values_dtype):
    layer = make(values_dtype=values_dtype, dtype=jnp.bfloat16)
    assert set(nnx.to_pure_dict(nnx.state(layer, nnx.Param))) == {"scales", "bias"}
    assert isinstance(layer.values, NMMask) and layer.values.dtype == values_dtype
    x = oracle.normal(rng, (3, 40), jnp.bfloat16)
    y = layer(x)
    assert y.dtype == jnp.bfloat16
    oracle.assert_close(y, oracle.spmm(x, layer.weight), depth=40)


# General.

GENERAL = [
    ((3, 6), (2, 4), {"axis": (1, -1)}),
    (6, 7, {}),
    ((4, 6), 7, {"axis": (-2, -1)}),
    ((4, 6), (7, 2), {"axis": (3, -1), "batch_axis": {0: 2, 1: 3}}),
    (5, 5, {"axis": 2, "batch_axis": {0: 2}}),
]


@pytest.mark.parametrize(("in_features", "out_features", "options"), GENERAL, ids=str)
def test_general_equals_linear_general(rng, in_features, out_features, options):
    options = {**options, "kernel_init": integer_init, "bias_init": integer_init, "rngs": nnx.Rngs(1)}
    dense = nnx.LinearGeneral(in_features, out_features, **options)
    options["rngs"] = nnx.Rngs(1)
    sparse = NMSparseLinearGeneral(in_features, out_features, pattern="2:4", **options)
    oracle.assert_same_bits(pure(NMSparseLinearGeneral.from_dense(dense, "2:4")), pure(sparse))
    back: Any = sparse.to_dense()
    assert jax.tree.map(jnp.shape, pure(back)) == jax.tree.map(jnp.shape, pure(dense))
    x = oracle.integers(rng, (2, 3, 5, 4, 6))
    oracle.assert_same_bits(nnx.jit(lambda m, x: m(x))(sparse, x), back(x))


def test_general_groups_run_along_the_contracted_axes(rng):
    """jaxpruner NByM: with every axis of the same size, only the contracted ones hold groups."""
    dense = nnx.LinearGeneral((8, 8), (8, 8), axis=(-2, -1), rngs=nnx.Rngs(0))
    kernel = np.asarray(NMSparseLinearGeneral.from_dense(dense, "2:8").to_dense().kernel[...])
    assert ((kernel != 0).sum(1) == 2).all()


def test_attention_of_flax_runs_with_sparse_projections(rng):
    attention: Any = nnx.MultiHeadAttention(4, 32, decode=False, rngs=nnx.Rngs(0))
    x = oracle.normal(rng, (2, 5, 32))
    for name in ("query", "key", "value", "out"):
        setattr(attention, name, NMSparseLinearGeneral.from_dense(getattr(attention, name), "2:4"))
    got = attention(x)
    for name in ("query", "key", "value", "out"):
        setattr(attention, name, getattr(attention, name).to_dense())
    oracle.assert_close(got, attention(x), depth=256)


@pytest.mark.parametrize("options", [{"activation": "tanh"}, {"implementation": "gpu"}])
def test_unknown_options_raise_at_construction(options):
    ((name, given),) = options.items()
    for make in (
        lambda: NMSparseLinear(8, 4, pattern="2:4", rngs=nnx.Rngs(0), **options),
        lambda: NMSparseLinearGeneral(8, (2, 2), pattern="2:4", rngs=nnx.Rngs(0), **options),
    ):
        with pytest.raises(
            ValueError, match=rf"NMSparseLinear(General)?: {name} is '{given}', expected None or one of"
        ):
            make()


def test_general_says_what_does_not_fit():
    layer = NMSparseLinearGeneral((4, 6), 7, axis=(-2, -1), pattern="2:4", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"x has sizes \(6, 4\) along axes \(1, 2\), expected \(4, 6\)"):
        layer(jnp.ones((2, 6, 4)))
    with pytest.raises(ValueError, match="expected distinct axes of x, which has 1"):
        layer(jnp.ones(24))
    with pytest.raises(ValueError, match=r"in_features is \(4,\) and axis \(0, 1\)"):
        NMSparseLinearGeneral(4, 7, axis=(0, 1), pattern="2:4", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="batch axes are .1,.. expected leading axes"):
        NMSparseLinearGeneral(4, 7, batch_axis={1: 3}, pattern="2:4", rngs=nnx.Rngs(0))
    w = nms.prune(jnp.ones((24, 8)), "2:4")
    with pytest.raises(ValueError, match=r"in_features \(4, 5\) .* do not multiply to the axes of NMSparse\(24x8"):
        NMSparseLinearGeneral.from_weight(w, in_features=(4, 5))


# Transformations of NNX.


def test_stacked_layers_scan(rng):
    x = oracle.normal(rng, (4, 32))
    keys = jax.random.split(jax.random.key(0), 3)
    stack = nnx.vmap(lambda key: NMSparseLinear(32, 32, pattern="2:4/1x8", rngs=nnx.Rngs(key)))(keys)
    w = stack.weight.validate()
    assert w.shape == (3, 32, 32)

    @nnx.jit
    def run(stack, x):
        return nnx.scan(lambda x, layer: (x + layer(x), None), in_axes=(nnx.Carry, 0))(x, stack)[0]

    want = x.astype(np.float64)
    for i in range(3):
        want = want + oracle.spmm(want, jax.tree.map(lambda leaf, i=i: leaf[i], w))
    oracle.assert_close(run(stack, x), want, depth=96)
    with pytest.raises(ValueError, match="expected .* of stacked layers, which nnx.scan and nnx.vmap slice"):
        stack(x)
    held = NMSparseLinear.from_weight(w)
    oracle.assert_same_bits(pure(held)["values"], w.values)
    oracle.assert_same_bits(nnx.to_pure_dict(nnx.state(stack.to_dense()))["kernel"], w.todense())


def test_training_leaves_the_mask_alone(rng):
    """haiku#513, apex#1474: an optimiser over nnx.Param runs untouched, and equals masked-dense training."""
    x, labels = oracle.normal(rng, (64, 40)), rng.integers(0, 3, 64)
    sparse = nnx.Sequential(make(40, 48), nnx.relu, make(48, 3, "8:32/1x1", 1))
    dense = nnx.Sequential(sparse.layers[0].to_dense(), nnx.relu, sparse.layers[2].to_dense())
    keep = [np.asarray(sparse.layers[i].weight.keep()) for i in (0, 2)]
    masks = [np.asarray(sparse.layers[i].mask[...]) for i in (0, 2)]

    def loss(model):
        return optax.softmax_cross_entropy_with_integer_labels(model(x), labels).mean()

    def train(model, masked):
        optimiser = nnx.Optimizer(model, optax.adamw(1e-2, weight_decay=1e-2), wrt=nnx.Param)

        @nnx.jit
        def step(model, optimiser):
            value, grads = nnx.value_and_grad(loss)(model)
            if masked:
                for i, one in zip((0, 2), keep, strict=True):
                    grad = grads["layers"][i]["kernel"]
                    grad.set_value(jnp.where(one, grad[...], 0))
            optimiser.update(model, grads)
            return value

        return np.array([step(model, optimiser) for _ in range(10)])

    losses, expected = train(sparse, False), train(dense, True)
    assert losses[-1] < 0.8 * losses[0]
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    for i, mask in zip((0, 2), masks, strict=True):
        np.testing.assert_array_equal(sparse.layers[i].mask[...], mask)
        w = sparse.layers[i].weight.validate()
        np.testing.assert_allclose(oracle.dense(w), dense.layers[i].kernel[...], rtol=1e-3, atol=1e-4)


def test_sharding_metadata_follows_the_axes():
    init = nnx.with_partitioning(nnx.initializers.normal(), ("in", "out"))
    mesh = jax.make_mesh((1, 1), ("in", "out"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        plain, quantised = make(kernel_init=init), make(kernel_init=init, values_dtype=jnp.int8, pattern="4:64")
        general = NMSparseLinearGeneral(
            (4, 8),
            (2, 3),
            axis=(-2, -1),
            pattern="2:4",
            rngs=nnx.Rngs(0),
            kernel_metadata={"out_sharding": (None, "in", "out", None)},
        )
    assert plain.values.out_sharding == ("in", "out", None, None, None)
    assert plain.mask.out_sharding == general.mask.out_sharding == ("in", "out")
    assert quantised.scales.out_sharding == ("out",)
    assert quantised.mask.out_sharding == ("in", "out", None)


# Conversion and checkpoints.


def test_conversion_keeps_no_dense_copy():
    """pytorch#115008: density + mask bits of the dense bytes."""
    dense = nnx.Linear(256, 512, use_bias=False, rngs=nnx.Rngs(0))
    nbytes = dense.kernel[...].nbytes
    layer = NMSparseLinear.from_dense(dense, "8:32")
    assert layer.weight.nbytes == nbytes // 4 + nbytes // 32
    del dense
    gc.collect()
    assert not [a for a in jax.live_arrays() if a.shape == (256, 512)]


def test_conversion_refuses():
    dense: Any = nnx.Linear(40, 24, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="more than 2 nonzero"):
        NMSparseLinear.from_dense(dense, "2:4", exact=True)
    with pytest.raises(ValueError, match="scores choose what to drop, exact=True drops nothing"):
        NMSparseLinear.from_dense(dense, "2:4", exact=True, scores=np.ones((40, 24)))
    other: Any = nnx.Embed(4, 4, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="the layer is a Embed, expected an nnx.Linear"):
        NMSparseLinear.from_dense(other, "2:4")
    with pytest.raises(TypeError, match="w is a Linear"):
        NMSparseLinear.from_weight(dense)
    with pytest.raises(ValueError, match=r"bias has shape \(3,\), expected \(24,\)"):
        NMSparseLinear.from_weight(make().weight, jnp.ones(3))
    with pytest.raises(ValueError, match="x has no axes"):
        make()(jnp.float32(1))
    with pytest.raises(ValueError, match=r"x has trailing size 39, expected 40"):
        make()(jnp.ones((2, 39)))


class Model(nnx.Module):
    def __init__(self, pattern, seed=0):
        rngs = nnx.Rngs(seed)
        self.layers = nnx.List(NMSparseLinear(32, 32, pattern=pattern, rngs=rngs) for _ in range(2))
        self.heads = NMSparseLinearGeneral(32, (4, 8), pattern=pattern, rngs=rngs)


def test_a_state_of_another_pattern_is_refused():
    """The arrays of 2:4 and 16:32 have the same shapes: only the description tells."""
    model, other = Model("2:4"), Model("16:32")
    assert jax.tree.leaves(jax.tree.map(jnp.shape, pure(model))) == jax.tree.leaves(
        jax.tree.map(jnp.shape, pure(other))
    )
    for state in (nnx.state(other), pure(other)):
        with pytest.raises(ValueError, match="have pattern 16:32, expected 2:4"):
            nnx.update(Model("2:4"), state)
    mixed = nnx.merge(nnx.graphdef(model), nnx.state(other))
    for layer in (*mixed.layers, mixed.heads):
        with pytest.raises(ValueError, match="have pattern 16:32, expected 2:4"):
            nnx.jit(lambda layer: layer(jnp.ones(32)))(layer)
    fresh = Model("2:4", 1)
    nnx.update(fresh, nnx.state(model))
    oracle.assert_same_bits(pure(fresh), pure(model))
    wrong = make(24, 24)
    with pytest.raises(ValueError, match="features is 24, expected 32|has trailing size 24, expected 32"):
        nnx.update(wrong, nnx.state(model.layers[0]))


def test_checkpoint_orbax(tmp_path):
    model = Model("2:4")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "step", pure(model))
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "step", pure(Model("2:4", 1)))
        with pytest.raises(ValueError):
            checkpointer.restore(tmp_path / "step", pure(Model("16:32")))
    fresh = Model("2:4", 2)
    nnx.update(fresh, restored)
    oracle.assert_same_bits(pure(fresh), pure(model))


def test_checkpoint_safetensors(tmp_path):
    model, path = Model("2:4"), tmp_path / "model.safetensors"
    checkpoint.save(path, pure(model))
    restored = checkpoint.load(path, like=pure(Model("2:4", 1)))
    assert set(restored["layers"]) == {0, 1}
    fresh = Model("2:4", 2)
    nnx.update(fresh, restored)
    oracle.assert_same_bits(pure(fresh), pure(model))
    with pytest.raises(ValueError, match=r"lacks .*heads\.format\.v1_16:32_1x1_32x4,8"):
        checkpoint.load(path, like=pure(Model("16:32")))
    assert set(checkpoint.load(path)["layers"]) == {"0", "1"}
