"""Products that jax.jit spreads over devices: results, gradients, and the collectives in the compiled program."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jax_nmsparse as nms

P = PartitionSpec
DEVICES = 4
IN, OUT, TOKENS = 32 * DEVICES, 8 * DEVICES, 2 * DEVICES
_COLLECTIVE = re.compile(r"= \S+ (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")

pytestmark = pytest.mark.skipif(jax.device_count() < DEVICES, reason=f"fewer than {DEVICES} devices")


@pytest.fixture
def mesh() -> Mesh:
    return jax.make_mesh((DEVICES,), ("d",), devices=jax.devices()[:DEVICES], axis_types=(AxisType.Auto,))


def _put(mesh, array, *spec):
    return jax.device_put(array, NamedSharding(mesh, P(*spec)))


def _put_weight(mesh, w, *spec):
    return w._replace(values=_put(mesh, w.values, *spec), mask=_put(mesh, w.mask, *spec))


def _collectives(compiled) -> list[str]:
    return sorted(_COLLECTIVE.findall(compiled.as_text()))


IMPLEMENTATIONS = [i for i in oracle.IMPLEMENTATIONS if i != "dense"]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_batch_sharded_operands_need_no_collective(rng, mesh, implementation):
    """An operand of a custom call must not be gathered behind the user's back."""
    w = oracle.draw(rng, (IN, OUT), "8:32")
    x, bias = oracle.integers(rng, (TOKENS, IN)), oracle.integers(rng, (OUT,))
    f = jax.jit(lambda x, w, b: nms.spmm(x, w, bias=b, activation="relu", implementation=implementation))
    operands = (_put(mesh, x, "d"), _put_weight(mesh, w), _put(mesh, bias))
    compiled = f.lower(*operands).compile()
    assert _collectives(compiled) == []
    y = compiled(*operands)
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, P("d")), 2)
    np.testing.assert_array_equal(y, oracle.spmm(x, w, bias=bias, activation="relu"))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradients_of_batch_sharded_operands(rng, mesh, implementation):
    """One all-reduce, for the sum of the weight's gradient over the batch."""
    w = oracle.draw(rng, (IN, OUT), "8:32")
    x, g = oracle.integers(rng, (TOKENS, IN)), oracle.integers(rng, (TOKENS, OUT))

    def loss(x, values, mask, g):
        w = nms.NMSparse(values, mask, shape=(IN, OUT), pattern="8:32")
        return jnp.sum(g * nms.spmm(x, w, implementation=implementation))

    operands = (_put(mesh, x, "d"), _put(mesh, w.values), _put(mesh, w.mask), _put(mesh, g, "d"))
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*operands).compile()
    assert set(_collectives(compiled)) == {"all-reduce"}
    dx, dv = compiled(*operands)
    np.testing.assert_array_equal(dx, oracle.spmm(g, w, transpose=True))
    np.testing.assert_array_equal(dv, oracle.sddmm(x, g, w))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("x_spec", "w_spec", "collectives"), [((), (None, "d"), set()), ((None, "d"), ("d",), {"all-reduce"})]
)
def test_tensor_parallel_weights_are_never_gathered(rng, mesh, x_spec, w_spec, collectives, implementation):
    """Columns: no collective. Rows: one all-reduce of the result."""
    w = oracle.draw(rng, (IN, OUT), "8:32")
    x = oracle.integers(rng, (TOKENS, IN))
    operands = (_put(mesh, x, *x_spec), _put_weight(mesh, w, *w_spec))
    compiled = jax.jit(lambda x, w: nms.spmm(x, w, implementation=implementation)).lower(*operands).compile()
    np.testing.assert_array_equal(compiled(*operands), oracle.spmm(x, w))
    if implementation != "xla":
        assert set(_collectives(compiled)) == collectives


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_scan_over_stacked_layers(rng, mesh, implementation):
    w = oracle.draw(rng, (3, IN, IN), "8:32", fill=oracle.normal)
    x = oracle.normal(rng, (TOKENS, IN))

    def loss(values, mask, x):
        w = nms.NMSparse(values, mask, shape=(3, IN, IN), pattern="8:32")
        y, _ = jax.lax.scan(lambda x, w: (jnp.tanh(nms.spmm(x, w, implementation=implementation) / 8), None), x, w)
        return jnp.sum(y**2)

    operands = (_put(mesh, w.values), _put(mesh, w.mask), _put(mesh, x, "d"))
    loss_value, dv = jax.jit(jax.value_and_grad(loss))(*operands)
    to_dense = oracle.scatter(w)

    def dense_loss(values):
        y = x
        for layer in to_dense(values):
            y = jnp.tanh(y @ layer / 8)
        return jnp.sum(y**2)

    want, dwant = jax.jit(jax.value_and_grad(dense_loss))(w.values)
    oracle.assert_close(loss_value, want, depth=IN * TOKENS)
    oracle.assert_close(dv, dwant, depth=IN * TOKENS)


def test_explicit_mesh_axes(rng):
    """Under a mesh of explicit axes the result's sharding follows from the operands, and lost sums are refused."""
    mesh = jax.make_mesh((DEVICES,), ("d",), devices=jax.devices()[:DEVICES], axis_types=(AxisType.Explicit,))
    w = oracle.draw(rng, (IN, OUT), "8:32")
    x = oracle.integers(rng, (TOKENS, IN))
    with jax.set_mesh(mesh):
        weight = _put_weight(mesh, w)
        y = jax.jit(lambda x, w: nms.spmm(x, w, implementation="xla"))(_put(mesh, x, "d"), weight)
        assert jax.typeof(y).sharding.spec == P("d", None)
        np.testing.assert_array_equal(y, oracle.spmm(x, w))
        with pytest.raises(
            ValueError, match="spmm: an axis that is summed over is sharded .*'d'.*reshard it, or write"
        ):
            jax.jit(lambda x, w: nms.spmm(x, w))(_put(mesh, x, None, "d"), weight)
