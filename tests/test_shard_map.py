"""Data, column and row parallel products under shard_map; gradients equal those of one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

import jax_nmsparse as nms
from jax_nmsparse import placement

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


# Each: specs of x, g, w and of the results y, dx, dvalues; the axes of the sums that the user writes for each.
EVERY_OP = {
    "data": (P("d"), P("d"), P(), (P("d"), P("d"), P()), (False, False, True)),
    "column": (P(), P(None, "d"), P(None, "d"), (P(None, "d"), P(), P(None, "d")), (False, True, False)),
    "row": (P(None, "d"), P(), P("d"), (P(), P(None, "d"), P("d")), (True, False, False)),
}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("scheme", EVERY_OP)
def test_every_operation(rng, mesh, scheme, check_vma):
    """spmm, its transpose and sddmm, with the weight cut by shard_map itself and its sums written by the user."""
    w, x, _, g = _problem(rng)
    x_spec, g_spec, w_spec, out_specs, sums = EVERY_OP[scheme]

    def products(x, g, w):
        w = placement.local(w)
        results = nms.spmm(x, w), nms.spmm(g, w, transpose=True), nms.sddmm(x, g, w)
        return tuple(jax.lax.psum(r, "d") if add else r for r, add in zip(results, sums, strict=True))

    sharded = jax.shard_map(
        products, mesh=mesh, in_specs=(x_spec, g_spec, w_spec), out_specs=out_specs, check_vma=check_vma
    )
    y, dx, dv = jax.jit(sharded)(x, g, w)
    np.testing.assert_array_equal(y, oracle.spmm(x, w))
    np.testing.assert_array_equal(dx, oracle.spmm(g, w, transpose=True))
    np.testing.assert_array_equal(dv, oracle.sddmm(x, g, w))


@pytest.mark.parametrize("check_vma", [True, False])
def test_expert_parallel(rng, mesh, check_vma):
    """Experts over the devices, two on each; tokens go to their expert and back by all_to_all."""
    experts, capacity = 2 * DEVICES, 2
    w = oracle.draw(rng, (experts, IN, OUT), "8:32")
    # From every device to every expert.
    x = oracle.integers(rng, (DEVICES, experts, capacity, IN))
    ct = oracle.integers(rng, (DEVICES, experts, capacity, OUT))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P("d"), P("d")), out_specs=P("d"), check_vma=check_vma)
    def layer(x, w):
        sent = jax.lax.all_to_all(x[0], "d", 0, 1, tiled=True)
        return jax.lax.all_to_all(nms.spmm(sent, placement.local(w)), "d", 1, 0, tiled=True)[None]

    def loss(x, w):
        y = layer(x, w)
        return jnp.sum(ct * y), y

    (_, y), (dx, dw) = jax.jit(nms.value_and_grad(loss, argnums=(0, 1), has_aux=True))(x, w)
    by_expert = np.moveaxis(x, 0, 1)
    np.testing.assert_array_equal(np.moveaxis(y, 0, 1), oracle.spmm(by_expert, w))
    g = np.moveaxis(ct, 0, 1)
    np.testing.assert_array_equal(np.moveaxis(dx, 0, 1), oracle.spmm(g, w, transpose=True))
    np.testing.assert_array_equal(dw.values, oracle.sddmm(by_expert, g, w))


def test_cut_inside_a_padded_axis(rng, mesh):
    """in_features that are no whole windows cannot be cut, and the error says what to do."""
    w = oracle.draw(rng, (IN - 1, OUT), "8:32")
    with pytest.raises(ValueError, match="local: in_features is 127, expected a multiple of 32 where it is cut.*pad"):
        jax.shard_map(
            lambda x, w: jax.lax.psum(x @ placement.local(w), "d"), mesh=mesh, in_specs=(P(), P("d")), out_specs=P()
        )(jnp.ones((1, 32)), w)
