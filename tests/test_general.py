"""`NMSparseDenseGeneral` beside `nn.DenseGeneral`, and the embeddings of both Flax APIs beside theirs."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from flax import nnx

import jax_nmsparse as nms
from jax_nmsparse import checkpoint
from jax_nmsparse import nnx as nms_nnx
from jax_nmsparse.embedding import lookup
from jax_nmsparse.linen import MASK_COLLECTION, NMSparseDense, NMSparseDenseGeneral, NMSparseEmbed


def integer_init(key, shape, dtype=jnp.float32):
    return jax.random.randint(key, shape, -3, 4).astype(dtype)


INTEGERS: dict[str, Any] = {"kernel_init": integer_init, "bias_init": integer_init}

GENERAL = [
    ({"features": (2, 4), "axis": (-1, 1)}, 2, 0),
    ({"features": 7}, 1, 0),
    ({"features": 7, "axis": (-2, -1), "use_bias": False}, 2, 0),
    ({"features": (7, 2), "axis": (3, -1), "batch_dims": (0, 1)}, 2, 2),
    ({"features": 5, "axis": 2, "batch_dims": (0,)}, 1, 1),
]


@pytest.mark.parametrize(("options", "contracted", "stacked"), GENERAL, ids=str)
def test_general_equals_dense_general(rng, options, contracted, stacked):
    """The same draw, the same integers, the same variables from conversion, and there and back."""
    sparse, dense = NMSparseDenseGeneral(**options, **INTEGERS, pattern="2:4"), nn.DenseGeneral(**options, **INTEGERS)
    x = oracle.integers(rng, (2, 3, 5, 4, 6))
    variables, trained = (jax.jit(m.init)(jax.random.key(0), x) for m in (sparse, dense))
    converted = NMSparseDenseGeneral.from_dense(trained, "2:4", contracted=contracted, stacked=stacked)
    oracle.assert_same_bits(converted, variables)
    back = NMSparseDenseGeneral.to_dense(variables)
    assert jax.tree.map(jnp.shape, {"params": back}) == jax.tree.map(jnp.shape, trained)
    again = NMSparseDenseGeneral.from_dense(back, "2:4", contracted=contracted, stacked=stacked, exact=True)
    oracle.assert_same_bits(again, variables)
    oracle.assert_same_bits(*jax.jit(lambda v: (sparse.apply(v, x), dense.apply({"params": back}, x)))(variables))
    w: Any = sparse.bind(variables).weight()
    assert w.shape[-2:] == (np.prod(back["kernel"].shape[stacked : stacked + contracted]), np.prod(options["features"]))


def test_general_of_one_axis_is_dense(rng):
    x = oracle.normal(rng, (3, 40))
    general, dense = NMSparseDenseGeneral(24, pattern="2:4"), NMSparseDense(24, pattern="2:4")
    variables = general.init(jax.random.key(0), x)
    oracle.assert_same_bits(variables, dense.init(jax.random.key(0), x))
    oracle.assert_same_bits(general.apply(variables, x), dense.apply(variables, x))


def test_general_quantised_and_scanned(rng):
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _=None):
            y = NMSparseDenseGeneral((2, 16), pattern="2:4", values_dtype=jnp.int8, activation="relu", name="q")(x)
            return x + NMSparseDenseGeneral(32, axis=(-2, -1), pattern="4:8/2x4", name="o")(y), None

    axes: dict[Any, Any] = {"params": 0, MASK_COLLECTION: 0}
    stack: Any = nn.scan(Layer, variable_axes=axes, split_rngs={"params": True}, length=2)()
    x = oracle.normal(rng, (3, 32))
    variables = stack.init(jax.random.key(0), x, None)
    q, o = (NMSparseDenseGeneral.to_weight({c: variables[c][name] for c in axes}) for name in ("q", "o"))
    assert (q.shape, q.dtype, o.shape, str(o.pattern)) == ((2, 32, 32), jnp.int8, (2, 32, 32), "4:8/2x4")
    want = x.astype(np.float64)
    for i in range(2):
        first, second = (jax.tree.map(lambda leaf, i=i: leaf[i], w) for w in (q, o))
        want = want + oracle.spmm(oracle.spmm(want, first, activation="relu"), second)
    oracle.assert_close(stack.apply(variables, x, None)[0], want, depth=128)


def test_general_partitioning_folds_the_names():
    init = nn.with_partitioning(integer_init, ("tp", None, "embed"))
    layer = NMSparseDenseGeneral(16, axis=(-2, -1), kernel_init=init, pattern="2:4")
    specs = nn.get_partition_spec(layer.init(jax.random.key(0), jnp.ones((4, 8))))
    assert specs["params"]["values"] == jax.P("tp", "embed", None, None, None)
    assert specs[MASK_COLLECTION]["mask"] == jax.P("tp", "embed")
    init = nn.with_partitioning(integer_init, (None, "a", "b"))
    layer = NMSparseDenseGeneral((4, 8), kernel_init=init, pattern="2:4", values_dtype=jnp.int8)
    specs = nn.get_partition_spec(layer.init(jax.random.key(0), jnp.ones(16)))
    assert specs["params"]["scales"] == jax.P(("a", "b"))


def test_general_says_what_does_not_fit():
    layer = NMSparseDenseGeneral(7, axis=(-2, -1), pattern="2:4", name="out")
    variables = layer.init(jax.random.key(0), jnp.ones((4, 6)))
    cases = [
        (layer, (6, 4), r"General: x has contracted sizes \(6, 4\), expected \(4, 6\)"),
        (layer.clone(pattern="1:4"), (4, 6), "have pattern 2:4, expected 1:4"),
        (layer.clone(features=(7, 1)), (4, 6), r"features is \(7, 1\), expected 7"),
        (layer.clone(axis=(-1, -1)), (4, 6), "expected distinct axes"),
        (layer.clone(batch_dims=(1,)), (4, 6), "expected leading axes"),
        (layer.clone(axis=(0, 1), batch_dims=(0,)), (4, 6), "overlap"),
    ]
    for module, shape, message in cases:
        with pytest.raises(ValueError, match=message):
            jax.jit(module.apply)(variables, jnp.ones(shape))
    with pytest.raises(ValueError, match="expected at least one contracted axis, and one axis more"):
        NMSparseDenseGeneral.from_dense({"kernel": jnp.ones((4, 6))}, "2:4", contracted=2)
    with pytest.raises(ValueError, match=r"in_sizes \(5,\) and features \(7,\) do not multiply"):
        NMSparseDenseGeneral.from_weight(NMSparseDenseGeneral.to_weight(variables), in_sizes=(5,))


def test_checkpoints_tell_the_axes_apart(tmp_path):
    """Projections to (4, 8) and (8, 4) heads, and the table of a tied head, have arrays of the same shapes."""
    x, path = jnp.ones((2, 32)), tmp_path / "layer.safetensors"
    layers = [NMSparseDenseGeneral(features, pattern="2:4", use_bias=False) for features in ((4, 8), (8, 4))]
    first, second = (layer.init(jax.random.key(0), x) for layer in layers)
    table = NMSparseEmbed(32, 32, pattern="2:4").init(jax.random.key(0), jnp.array([0]))
    assert jax.tree.map(jnp.shape, first["params"]) == jax.tree.map(jnp.shape, table["params"])
    checkpoint.save(path, first)
    oracle.assert_same_bits(checkpoint.load(path, like=first), first)
    for other in (second, table):
        with pytest.raises(ValueError, match="lacks .*format.v1_2:4_1x1_32x"):
            checkpoint.load(path, like=other)
    with pytest.raises(ValueError, match=r"features is \(8, 4\), expected \(4, 8\)"):
        layers[1].apply(first, x)
    with pytest.raises(ValueError, match="the variables stand for a dense embedding, expected a kernel"):
        layers[0].clone(features=(4, 8)).apply(table, x)


# Embeddings.


@pytest.mark.parametrize("pattern", ["2:4", "3:6/1x8", "4:64/2x3"])
def test_lookup_equals_rows_of_the_table(rng, pattern):
    w = oracle.draw(rng, (70, 101), pattern)
    table = oracle.dense(w).T
    ids = np.array([[0, 100, 57], [-1, -101, 3]])
    np.testing.assert_array_equal(jax.jit(lookup)(w, ids), table[ids])
    assert bool(jnp.isnan(lookup(w, np.array([101, -102]))).all())
    assert lookup(w, np.zeros((2, 0), int)).shape == (2, 0, 70)


def test_lookup_makes_no_dense_table(rng):
    """The bytes of temporaries depend on the ids, not on the size of the table."""
    w = nms.prune(oracle.normal(rng, (64, 4096)), "2:4")
    compiled = jax.jit(lookup).lower(w, jnp.zeros(4, jnp.int32)).compile()
    memory: Any = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 64 * 4096 * 4 / 16
    assert "64,4096" not in str(compiled.as_text())


def test_lookup_is_differentiated_as_a_gather(rng):
    w = oracle.draw(rng, (32, 9), "2:4/1x4")
    ids, g = np.array([3, 8, 3]), oracle.integers(rng, (3, 32))
    grads = nms.grad(lambda w: (lookup(w, ids) * g).sum())(w)
    whole = np.zeros((9, 32))
    np.add.at(whole, ids, g)
    want = oracle.sddmm(np.eye(32), whole.T, w)
    np.testing.assert_array_equal(grads.values, want)


def test_lookup_refuses():
    w = nms.prune(jnp.ones((8, 8)), "2:4")
    with pytest.raises(TypeError, match="indices have dtype float32, expected integers"):
        lookup(w, jnp.ones(2))
    with pytest.raises(ValueError, match="w has 3 axes, expected 2"):
        lookup(nms.prune(jnp.ones((2, 8, 8)), "2:4"), jnp.array(0))
    with pytest.raises(TypeError, match="integers without scales"):
        lookup(w._replace(values=w.values.astype(jnp.int8)), jnp.array(0))
    with pytest.raises(TypeError, match="w is a ndarray"):
        lookup(np.ones((4, 4)), jnp.array(0))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("dtype", "values_dtype"), [(None, None), ("bfloat16", None), ("bfloat16", "int8")])
def test_embeddings_equal_those_of_flax(rng, dtype, values_dtype):
    """Linen and NNX: the same draw, rows and products as the dense table holds; tied heads from one weight."""
    ids, x = np.array([[0, 100, 5], [-1, 101, 3]]), oracle.integers(rng, (3, 32))
    options = {"dtype": dtype, "embedding_init": integer_init}
    layer: Any = NMSparseEmbed(101, 32, pattern="2:4/1x8", values_dtype=values_dtype, **options)
    got: Any
    want: Any
    variables = layer.init(jax.random.key(0), ids)
    dense = nn.Embed(101, 32, **options)
    oracle.assert_same_bits(
        NMSparseEmbed.from_dense(dense.init(jax.random.key(0), ids), "2:4/1x8", values_dtype=values_dtype), variables
    )
    table = {"params": NMSparseEmbed.to_dense(variables)}
    other = nms_nnx.NMSparseEmbed.from_weight(layer.bind(variables).weight(), dtype=dtype)
    twin: Any = other.to_dense()
    assert twin.embedding.shape == (101, 32)
    for got, want in (
        (layer.apply(variables, ids), dense.apply(table, ids)),
        (layer.apply(variables, x, method="attend"), dense.apply(table, x, method="attend")),
        (other(ids), twin(ids)),
        (other.attend(x), twin.attend(x)),
    ):
        if values_dtype is None:
            oracle.assert_same_bits(got, want)
        else:
            assert got.dtype == want.dtype
            oracle.assert_close(got, want, depth=32, dtype=dtype)


def test_embed_of_nnx_draws_as_embed(rng):
    dense = nnx.Embed(50, 12, rngs=nnx.Rngs(4))
    sparse = nms_nnx.NMSparseEmbed(50, 12, pattern="2:4", rngs=nnx.Rngs(4))
    converted = nms_nnx.NMSparseEmbed.from_dense(dense, "2:4")
    oracle.assert_same_bits(nnx.to_pure_dict(nnx.state(sparse)), nnx.to_pure_dict(nnx.state(converted)))
    groups = np.asarray(sparse.to_dense().embedding[...]).reshape(50, 3, 4)
    assert ((groups != 0).sum(-1) == 2).all(), "groups run along features, which the head contracts"


def test_embed_says_what_does_not_fit():
    layer: Any = NMSparseEmbed(8, 12, pattern="2:4")
    variables = layer.init(jax.random.key(0), jnp.array([0]))
    with pytest.raises(ValueError, match="ids have dtype float32, expected integers"):
        layer.apply(variables, jnp.ones(3))
    with pytest.raises(ValueError, match="have pattern 2:4, expected 1:4"):
        layer.clone(pattern="1:4").apply(variables, jnp.array([0]))
    with pytest.raises(ValueError, match="holds a dense 'embedding', expected 'values'"):
        layer.apply(nn.Embed(8, 12).init(jax.random.key(0), jnp.array([0])), jnp.array([0]))
    one: Any = NMSparseEmbed(1, 12, pattern="2:4")
    row = one.init(jax.random.key(0), jnp.array([0]))
    oracle.assert_same_bits(one.apply(row, jnp.array([7])), one.apply(row, jnp.array([0])))
