"""Meshes of explicit axis types: types, results, gradients, collectives and errors; conversions of placed weights."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_nmsparse as nms
from jax_nmsparse.collectives import collectives

P = PartitionSpec
DATA, TENSOR = 2, 4
IN, OUT, TOKENS = 32 * TENSOR, 16 * TENSOR, 8 * DATA

pytestmark = pytest.mark.skipif(jax.device_count() < DATA * TENSOR, reason="fewer than 8 devices")


@pytest.fixture(autouse=True)
def mesh():
    devices = jax.devices()[: DATA * TENSOR]
    mesh = jax.make_mesh((DATA, TENSOR), ("data", "tensor"), devices=devices, axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        yield mesh


def _put(array, *spec):
    return jax.device_put(array, P(*spec))


def _weight(w, *spec):
    return w._replace(values=_put(w.values, *spec), mask=_put(w.mask, *spec))


def _run(function, *operands):
    compiled = jax.jit(function).lower(*operands).compile()
    return compiled(*operands), sorted((c.kind, c.bytes) for c in collectives(compiled))


def _spec(array):
    return jax.typeof(array).sharding.spec


@pytest.mark.parametrize(
    ("x_spec", "w_spec", "out", "y_spec", "moved"),
    [
        (("data",), (), None, ("data", None), []),
        ((), (None, "tensor"), None, (None, "tensor"), []),
        (("data",), (None, "tensor"), None, ("data", "tensor"), []),
        (("data", "tensor"), ("tensor",), ("data",), ("data", None), [("all-reduce", TOKENS // DATA * OUT * 4)]),
        ((None, "tensor"), (), (), (None, None), [("all-reduce", TOKENS * OUT * 4)]),
        (
            ("data", "tensor"),
            ("tensor",),
            ("data", "tensor"),
            ("data", "tensor"),
            [("reduce-scatter", TOKENS // DATA * OUT * 4)],
        ),
        (
            ("data", "tensor"),
            ("tensor",),
            (("data", "tensor"),),
            (("data", "tensor"), None),
            [("reduce-scatter", TOKENS // DATA * OUT * 4)],
        ),
    ],
    ids=["data", "columns", "both", "rows", "x alone", "rows to columns", "rows to tokens"],
)
def test_products(rng, x_spec, w_spec, out, y_spec, moved):
    w, x, bias = oracle.draw(rng, (IN, OUT), "8:32"), oracle.integers(rng, (TOKENS, IN)), oracle.integers(rng, (OUT,))

    def f(x, w, b):
        sharding = None if out is None else P(*out)
        y = nms.spmm(x, w, bias=b, activation="relu", out_sharding=sharding)
        assert _spec(y) == P(*y_spec)  # while tracing
        return y

    y, got = _run(f, _put(x, *x_spec), _weight(w, *w_spec), bias)
    np.testing.assert_array_equal(y, oracle.spmm(x, w, bias=bias, activation="relu"))
    assert got == moved


def test_eager_products_and_a_named_sharding(rng, mesh):
    w, x = oracle.draw(rng, (IN, OUT), "8:32"), oracle.integers(rng, (TOKENS, IN))
    y = _put(x, "data") @ _weight(w, None, "tensor")
    assert _spec(y) == P("data", "tensor")
    np.testing.assert_array_equal(y, oracle.spmm(x, w))
    wanted = NamedSharding(mesh, P(None, "data"))
    y = nms.spmm(_put(x, None, "tensor"), _weight(w, "tensor"), out_sharding=wanted)
    assert _spec(y) == P(None, "data")
    np.testing.assert_array_equal(y, oracle.spmm(x, w))
    y = nms.spmm(_put(x), _weight(w), out_sharding=wanted)
    assert _spec(y) == P(None, "data")


@pytest.mark.parametrize("scheme", ["data", "columns", "rows"])
def test_gradients_are_placed_as_their_operands(rng, scheme):
    """Sums over the data axis, which no one wrote, and the dual of each scheme."""
    x_spec, w_spec, g_spec = {
        "data": (("data",), (), ("data",)),
        "columns": (("data",), (None, "tensor"), ("data", "tensor")),
        "rows": (("data", "tensor"), ("tensor",), ("data",)),
    }[scheme]
    w, x = oracle.draw(rng, (IN, OUT), "8:32"), oracle.integers(rng, (TOKENS, IN))
    g, bias = oracle.integers(rng, (TOKENS, OUT)), oracle.integers(rng, (OUT,))

    def loss(x, w, b, g):
        y = nms.spmm(x, w, bias=b, activation="relu", out_sharding=P("data") if scheme == "rows" else None)
        return jnp.sum(g * y)

    operands = (_put(x, *x_spec), _weight(w, *w_spec), _put(bias, *g_spec[1:]), _put(g, *g_spec))
    (dx, dw, db), got = _run(nms.grad(loss, argnums=(0, 1, 2)), *operands)
    g = np.where(oracle.spmm(x, w, bias=bias) > 0, g, 0)
    np.testing.assert_array_equal(dx, oracle.spmm(g, w, transpose=True))
    np.testing.assert_array_equal(dw.values, oracle.sddmm(x, g, w))
    np.testing.assert_array_equal(db, g.sum(0))
    for gradient, operand in ((dx, operands[0]), (dw.values, operands[1].values), (db, operands[2])):
        assert _spec(gradient) == _spec(operand)
    assert "all-gather" not in {kind for kind, _ in got}


def test_transposed_and_sampled_products(rng):
    w, x = oracle.draw(rng, (IN, OUT), "8:32"), oracle.integers(rng, (2, TOKENS, IN))
    g = oracle.integers(rng, (2, TOKENS, OUT))
    placed = _weight(w, None, "tensor")
    dx = nms.spmm(_put(g, None, "data", "tensor"), placed, transpose=True, out_sharding=P(None, "data"))
    np.testing.assert_array_equal(dx, oracle.spmm(g, w, transpose=True))
    dv = nms.sddmm(_put(x, None, "data"), _put(g, None, "data", "tensor"), placed, out_sharding=P(None, "tensor"))
    np.testing.assert_array_equal(dv, oracle.sddmm(x, g, w))
    assert _spec(dv) == P(None, "tensor", None, None, None)
    with pytest.raises(ValueError, match="sddmm: an axis that is summed over .*'data'.*out_sharding"):
        nms.sddmm(_put(x, None, "data"), _put(g, None, "data"), placed)


def test_half_precision_sums_keep_their_accuracy(rng):
    """Parts of a bfloat16 product are added up in float32."""
    w = oracle.draw(rng, (IN, OUT), "8:32", jnp.bfloat16, fill=oracle.normal)
    x = oracle.normal(rng, (TOKENS, IN), jnp.bfloat16)
    y = nms.spmm(_put(x, None, "tensor"), _weight(w, "tensor"), out_sharding=P())
    assert y.dtype == jnp.bfloat16
    oracle.assert_close(y, oracle.spmm(x, w), depth=IN)


def test_quantised_weights(rng):
    w = nms.quantize(oracle.draw(rng, (IN, OUT), "8:32", fill=oracle.normal), jnp.int8)
    x = oracle.normal(rng, (TOKENS, IN))
    placed = _weight(w, "tensor")._replace(scales=_put(w.scales))
    y = nms.spmm(_put(x, None, "tensor"), placed, out_sharding=P(None, "tensor"), activation="silu")
    oracle.assert_close(y, oracle.spmm(x, w, activation="silu"), depth=IN)
    placed = _weight(w, None, "tensor")._replace(scales=_put(w.scales, "tensor"))
    g = oracle.normal(rng, (TOKENS, OUT))
    dx = nms.spmm(_put(g, "data", "tensor"), placed, transpose=True, out_sharding=P("data"))
    oracle.assert_close(dx, oracle.spmm(g, w, transpose=True), depth=OUT)


def test_vmap_over_a_sharded_axis(rng):
    """Examples, with gradients of a shared weight; and experts."""
    w, x = oracle.draw(rng, (IN, OUT), "8:32"), oracle.integers(rng, (2 * DATA, 3, IN))
    placed, examples = _weight(w), _put(x, "data")
    y, got = _run(lambda x, w: jax.vmap(lambda x: nms.spmm(x, w))(x), examples, placed)
    np.testing.assert_array_equal(y, oracle.spmm(x, w))
    assert got == []
    dw, got = _run(lambda x, w: nms.grad(lambda w: jax.vmap(lambda x: nms.spmm(x, w))(x).sum())(w), examples, placed)
    np.testing.assert_array_equal(dw.values, oracle.sddmm(x, np.ones((2 * DATA, 3, OUT)), w))
    assert {kind for kind, _ in got} == {"all-reduce"}
    y = jax.jit(lambda x, w: jax.vmap(lambda x: nms.spmm(x, w))(x))(examples, _weight(w, None, "tensor"))
    np.testing.assert_array_equal(y, oracle.spmm(x, w))
    experts = oracle.draw(rng, (TENSOR, IN, OUT), "8:32")
    x = oracle.integers(rng, (TENSOR, TOKENS, IN))
    y, got = _run(jax.vmap(nms.spmm), _put(x, "tensor"), _weight(experts, "tensor"))
    np.testing.assert_array_equal(y, oracle.spmm(x, experts))
    assert got == []


def test_scan_and_remat(rng):
    w, x = oracle.draw(rng, (2, IN, IN), "8:32", fill=oracle.normal), oracle.normal(rng, (TOKENS, IN))

    def loss(w, x):
        layer = jax.checkpoint(lambda x, w: nms.spmm(x, w, activation="relu") / 8)
        y, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, w)
        return jnp.sum(y**2)

    got = jax.jit(nms.grad(loss))(_weight(w), _put(x, "data"))
    want = nms.grad(loss)(w, x)
    oracle.assert_close(got.values, want.values, depth=IN)


@pytest.mark.parametrize("spec", [("tensor",), (None, "tensor"), ("data", "tensor")])
def test_conversions_of_placed_weights(rng, spec):
    """Each device converts its own windows and columns; no weight is gathered."""
    w = oracle.draw(rng, (IN, OUT), "8:32", fill=oracle.normal)
    placed, dense = _weight(w, *spec), oracle.dense(w).astype(np.float32)
    for name in ("todense", "keep", "indices"):
        got, moved = _run(lambda w, name=name: getattr(w, name)(), placed)
        np.testing.assert_array_equal(got, getattr(w, name)())
        assert tuple(_spec(got))[: len(spec)] == spec
        assert moved == []
    for made in (nms.prune(_put(dense, *spec), "8:32"), nms.NMSparse.fromdense(_put(dense, *spec), "8:32")):
        np.testing.assert_array_equal(made.todense(), dense)
        assert tuple(_spec(made.values))[: len(spec)] == spec
    placed.with_values(2 * placed.values).validate()
    quantised = nms.quantize(placed, jnp.int8)
    np.testing.assert_array_equal(quantised.todense(), nms.quantize(w, jnp.int8).todense())


def test_batched_conversions(rng):
    w = oracle.draw(rng, (TENSOR, IN, OUT), "8:32")
    np.testing.assert_array_equal(_weight(w, "tensor", "data").todense(), oracle.dense(w))


def test_explain_sees_the_whole_product(rng):
    w = _weight(oracle.draw(rng, (IN, OUT), "8:32"), None, "tensor")
    assert nms.explain(_put(np.ones((TOKENS, IN), np.float32), "data"), w).call.tokens == TOKENS


def test_errors(rng, mesh):
    w, x = oracle.draw(rng, (IN, OUT), "8:32"), oracle.integers(rng, (TOKENS, IN))
    with pytest.raises(ValueError, match="spmm: an axis that is summed over is sharded .*'tensor'.*out_sharding"):
        nms.spmm(_put(x, None, "tensor"), _weight(w, "tensor"))
    with pytest.raises(ValueError, match="spmm: one axis is sharded over .*'data'.* and over .*'tensor'"):
        nms.spmm(_put(x, None, "data"), _weight(w, "tensor"), out_sharding=P())
    with pytest.raises(ValueError, match="spmm: mesh axis 'data' shards two different axes.*reshard"):
        nms.spmm(_put(x, "data"), _weight(w, None, "data"))
    with pytest.raises(ValueError, match="spmm: out_sharding is 3, expected a NamedSharding or a PartitionSpec"):
        nms.spmm(_put(x, "data"), _weight(w), out_sharding=3)
    with pytest.raises(
        ValueError, match="spmm: in_features is 64, expected a multiple of 128 .*4 parts of whole windows"
    ):
        nms.spmm(_put(x[:, :64], None, "tensor"), _weight(oracle.draw(rng, (64, OUT), "8:32")), out_sharding=P())
    with pytest.raises(ValueError, match="sharded over .*'data'.* inside its windows"):
        nms.spmm(x, w._replace(values=_put(w.values, None, None, "data"), mask=_put(w.mask)))
    auto = jax.make_mesh((8,), ("d",), devices=jax.devices()[:8], axis_types=(AxisType.Auto,))
    with pytest.raises(ValueError, match="out_sharding is given, but the mesh has no explicit axes"):
        nms.spmm(x, w, out_sharding=NamedSharding(auto, P("d")))
