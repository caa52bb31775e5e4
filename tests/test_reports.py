"""Faults that users reported, one test each."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_nmsparse as nms


def _operands(rng, shape=(256, 24), pattern="2:4", tokens=8):
    w = nms.prune(jnp.asarray(rng.normal(size=shape), jnp.float32), pattern)
    return jnp.asarray(rng.normal(size=(tokens, shape[0])), jnp.float32), w


def test_auto_mesh_with_nothing_sharded(rng):
    x, w = _operands(rng)
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        y = jax.jit(nms.spmm)(x, w)
        g = jax.jit(jax.grad(lambda x: jnp.sum(x @ w)))(x)
    oracle.assert_close(y, oracle.spmm(x, w), depth=256)
    oracle.assert_close(g, oracle.spmm(np.ones_like(y), w, transpose=True), depth=24)


def test_explicit_mesh_with_an_unplaced_operand(rng):
    x, w = _operands(rng)
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Explicit,))
    placed = jax.tree.map(lambda a: jax.device_put(a, NamedSharding(mesh, PartitionSpec(None, "a"))), w)
    with jax.set_mesh(mesh):
        y = jax.jit(nms.spmm)(x, placed)
    oracle.assert_close(y, oracle.spmm(x, w), depth=256)


def test_nan_weight_is_valid():
    dense = np.zeros((8, 1), np.float32)
    dense[0] = np.nan
    w = nms.NMSparse.fromdense(dense, "2:4").validate()
    np.testing.assert_array_equal(w.todense(), dense)


def test_leaves_sliced_alone_raise_while_tracing(rng):
    x, w = _operands(rng)
    sliced = jax.tree.map(lambda leaf: leaf[:, :12], w)
    with pytest.raises(ValueError, match="spmm: w is inconsistent .*values has shape .*expected"):
        jax.eval_shape(nms.spmm, x, sliced)
    w.values = w.values[:, :, :8]
    with pytest.raises(ValueError, match="spmm: w is inconsistent"):
        nms.spmm(x, w)


def test_float_mask_raises_while_tracing(rng):
    x, w = _operands(rng)
    stepped = jax.tree.map(lambda leaf: leaf - 0.1 * leaf, w)
    with pytest.raises(TypeError, match="mask has dtype float32, expected uint32"):
        jax.eval_shape(nms.spmm, x, stepped)


def test_vmap_over_nothing(rng):
    _, w = _operands(rng, (48, 20))
    assert jax.vmap(lambda x: x @ w)(jnp.zeros((0, 2, 48))).shape == (0, 2, 20)
    none = jax.tree.map(lambda leaf: leaf[None][:0], w)
    assert jax.vmap(nms.spmm)(jnp.zeros((0, 2, 48)), none).shape == (0, 2, 20)
    assert nms.prune(jnp.zeros((0, 4, 4)), "2:4").todense().shape == (0, 4, 4)


@pytest.mark.parametrize("shape", [(48.7, 20), 48])
def test_shape_that_is_none(rng, shape):
    _, w = _operands(rng, (48, 20))
    with pytest.raises(TypeError, match="NMSparse: shape is"):
        nms.NMSparse(w.values, w.mask, shape=shape, pattern="2:4")


def test_export_with_a_weight_as_argument(rng):
    from jax_nmsparse.aot import disabled_checks

    x, w = _operands(rng, (48, 20), "8:32/1x4")
    exported = jax.export.export(jax.jit(nms.spmm), disabled_checks=disabled_checks())(x, w)
    y = jax.export.deserialize(exported.serialize()).call(x, w)
    oracle.assert_close(y, oracle.spmm(x, w), depth=48)
