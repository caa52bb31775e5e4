"""Data, column and row parallel products under shard_map; gradients equal those of one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

import jax_nmsparse as nms

P = PartitionSpec
DEVICES = 4
IN, OUT, TOKENS = 32 * DEVICES, 8 * DEVICES, 2 * DEVICES

pytestmark = pytest.mark.skipif(jax.device_count() < DEVICES, reason=f"fewer than {DEVICES} devices")


@pytest.fixture
def mesh() -> Mesh:
    return jax.make_mesh((DEVICES,), ("d",), devices=jax.devices()[:DEVICES], axis_types=(AxisType.Auto,))


def _local(values, mask, in_features, out_features):
    return nms.NMSparse(values, mask, shape=(in_features, out_features), pattern="8:32")


def _data(x, values, mask, bias):
    return nms.spmm(x, _local(values, mask, IN, OUT), bias=bias, activation="relu")


def _column(x, values, mask, bias):
    return nms.spmm(x, _local(values, mask, IN, OUT // DEVICES), bias=bias, activation="relu")


def _row(x, values, mask, bias):
    partial = nms.spmm(x, _local(values, mask, IN // DEVICES, OUT))
    return jax.nn.relu(jax.lax.psum(partial, "d") + bias)


SCHEMES = {
    "data": (_data, (P("d"), P(), P(), P()), P("d")),
    "column": (_column, (P(), P(None, "d"), P(None, "d"), P("d")), P(None, "d")),
    "row": (_row, (P(None, "d"), P("d"), P("d"), P()), P()),
}


def _problem(rng):
    w = oracle.draw(rng, (IN, OUT), "8:32")
    x, bias = oracle.integers(rng, (TOKENS, IN)), oracle.integers(rng, (OUT,))
    ct = oracle.integers(rng, (TOKENS, OUT))
    return w, x, bias, ct


def _wanted_gradients(w, x, bias, ct):
    g = np.where(oracle.spmm(x, w, bias=bias) > 0, ct, 0)
    return oracle.spmm(g, w, transpose=True), oracle.sddmm(x, g, w), g.sum(0)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_values_and_gradients(rng, mesh, scheme, check_vma):
    """Gradients taken outside shard_map, of replicated operands too."""
    w, x, bias, ct = _problem(rng)
    function, in_specs, out_specs = SCHEMES[scheme]
    sharded = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)

    def loss(x, values, bias):
        y = sharded(x, values, w.mask, bias)
        return jnp.sum(ct * y), y

    (_, y), got = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(x, w.values, bias)
    np.testing.assert_array_equal(y, oracle.spmm(x, w, bias=bias, activation="relu"))
    for gradient, want in zip(got, _wanted_gradients(w, x, bias, ct), strict=True):
        np.testing.assert_array_equal(gradient, want)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_gradients_taken_inside(rng, mesh, scheme):
    """With check_vma the gradient of a replicated operand is summed over the devices by itself."""
    w, x, bias, ct = _problem(rng)
    function, in_specs, out_specs = SCHEMES[scheme]

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(*in_specs, out_specs),
        out_specs=(in_specs[0], in_specs[1], in_specs[3]),
    )
    def gradients(x, values, mask, bias, ct):
        loss = lambda x, values, bias: jnp.sum(ct * function(x, values, mask, bias))  # noqa: E731
        return jax.grad(loss, argnums=(0, 1, 2))(x, values, bias)

    got = jax.jit(gradients)(x, w.values, w.mask, bias, ct)
    for gradient, want in zip(got, _wanted_gradients(w, x, bias, ct), strict=True):
        np.testing.assert_array_equal(gradient, want)


def test_operands_that_vary_over_different_axes(rng):
    """x over one mesh axis and the weight over another: every gradient is summed over the axis that it lacks."""
    mesh = jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4], axis_types=(AxisType.Auto,) * 2)
    w, x, bias, ct = _problem(rng)

    def function(x, values, mask, bias):
        return nms.spmm(x, _local(values, mask, IN, OUT // 2), bias=bias, activation="relu")

    sharded = jax.shard_map(
        function, mesh=mesh, in_specs=(P("a"), P(None, "b"), P(None, "b"), P("b")), out_specs=P("a", "b")
    )
    loss = lambda x, values, bias: jnp.sum(ct * sharded(x, values, w.mask, bias))  # noqa: E731
    got = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(x, w.values, bias)
    for gradient, want in zip(got, _wanted_gradients(w, x, bias, ct), strict=True):
        np.testing.assert_array_equal(gradient, want)


def test_transposed_and_sampled_products(rng, mesh):
    """spmm with transpose over columns, and sddmm over tokens, with the sums written by the user."""
    w, x, _, g = _problem(rng)

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(None, "d"), P(None, "d"), P(None, "d")),
        out_specs=P(),
    )
    def backward(g, values, mask):
        dx = nms.spmm(g, _local(values, mask, IN, OUT // DEVICES), transpose=True)
        return jax.lax.psum(dx, "d")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P("d"), P("d"), P(), P()), out_specs=P())
    def weights(x, g, values, mask):
        return jax.lax.psum(nms.sddmm(x, g, _local(values, mask, IN, OUT)), "d")

    np.testing.assert_array_equal(backward(g, w.values, w.mask), oracle.spmm(g, w, transpose=True))
    np.testing.assert_array_equal(weights(x, g, w.values, w.mask), oracle.sddmm(x, g, w))
