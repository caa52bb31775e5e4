"""Products that jax.jit spreads over devices: results, gradients, and the collectives in the compiled program."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jax_nmsparse as nms
from jax_nmsparse.collectives import collectives

P = PartitionSpec
DATA, TENSOR = 2, 4
IN, OUT, TOKENS = 32 * TENSOR, 16 * TENSOR, 8 * DATA
IMPLEMENTATIONS = (None, "xla")
"""The native kernel where its module is loaded, and plain JAX."""

pytestmark = pytest.mark.skipif(jax.device_count() < DATA * TENSOR, reason="fewer than 8 devices")


@pytest.fixture
def mesh() -> Mesh:
    devices = jax.devices()[: DATA * TENSOR]
    return jax.make_mesh((DATA, TENSOR), ("data", "tensor"), devices=devices, axis_types=(AxisType.Auto,) * 2)


def _put(mesh, array, *spec):
    return jax.device_put(array, NamedSharding(mesh, P(*spec)))


def _weight(mesh, w, *spec):
    return w._replace(values=_put(mesh, w.values, *spec), mask=_put(mesh, w.mask, *spec))


def _run(function, *operands):
    """The results, and (kind, bytes) of every collective."""
    compiled = jax.jit(function).lower(*operands).compile()
    return compiled(*operands), sorted((c.kind, c.bytes) for c in collectives(compiled))


def _integers(rng, shape):
    return oracle.integers(rng, shape)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("x_spec", "w_spec", "y_spec", "moved"),
    [
        (("data",), (), ("data",), []),
        (("data",), (None, "tensor"), ("data", "tensor"), []),
        (("data", "tensor"), ("tensor",), ("data",), [("all-reduce", TOKENS // DATA * OUT * 4)]),
        ((None, "data"), ("data", "tensor"), (None, "tensor"), [("all-reduce", TOKENS * OUT // TENSOR * 4)]),
    ],
    ids=["data", "columns", "rows", "rows and columns"],
)
def test_forward(rng, mesh, implementation, x_spec, w_spec, y_spec, moved):
    """Data and columns: nothing moves. Rows: one all-reduce of each device's part of the result."""
    w, x, bias = oracle.draw(rng, (IN, OUT), "8:32"), _integers(rng, (TOKENS, IN)), _integers(rng, (OUT,))
    columns = w_spec[1] if len(w_spec) > 1 else None
    operands = (_put(mesh, x, *x_spec), _weight(mesh, w, *w_spec), _put(mesh, bias, columns))
    y, got = _run(lambda x, w, b: nms.spmm(x, w, bias=b, activation="relu", implementation=implementation), *operands)
    np.testing.assert_array_equal(y, oracle.spmm(x, w, bias=bias, activation="relu"))
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, P(*y_spec)), 2)
    assert got == moved


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("y_spec", [(("data", "tensor"),), ("data", "tensor")], ids=["tokens", "columns"])
def test_result_that_stays_split_is_one_reduce_scatter(rng, mesh, implementation, y_spec):
    w, x, bias = oracle.draw(rng, (IN, OUT), "8:32"), _integers(rng, (TOKENS, IN)), _integers(rng, (OUT,))

    def f(x, w, b):
        y = nms.spmm(x, w, bias=b, activation="relu", implementation=implementation)
        return jax.lax.with_sharding_constraint(y, NamedSharding(mesh, P(*y_spec)))

    y, got = _run(f, _put(mesh, x, "data", "tensor"), _weight(mesh, w, "tensor"), _put(mesh, bias))
    np.testing.assert_array_equal(y, oracle.spmm(x, w, bias=bias, activation="relu"))
    assert got == [("reduce-scatter", TOKENS // DATA * OUT * 4)]


def test_split_in_another_order_than_the_sum_leaves_is_still_right(rng, mesh):
    w, x = oracle.draw(rng, (IN, OUT), "8:32"), _integers(rng, (TOKENS, IN))

    def f(x, w):
        return jax.lax.with_sharding_constraint(nms.spmm(x, w), NamedSharding(mesh, P(("tensor", "data"))))

    y, _ = _run(f, _put(mesh, x, "data", "tensor"), _weight(mesh, w, "tensor"))
    np.testing.assert_array_equal(y, oracle.spmm(x, w))


VALUES = IN // 32 * OUT * 8 * 4
"""Bytes of the whole weight's values."""
PARTS = {
    # Each: x, weight, cotangent, then what moves for dx and for dvalues.
    "data": (("data",), (), ("data",), None, ("all-reduce", VALUES)),
    "columns": (
        ("data",),
        (None, "tensor"),
        ("data", "tensor"),
        ("all-reduce", TOKENS // DATA * IN * 4),
        ("all-reduce", VALUES // TENSOR),
    ),
    "rows": (("data", "tensor"), ("tensor",), ("data",), None, ("all-reduce", VALUES // TENSOR)),
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("scheme", PARTS)
def test_backward_is_the_dual(rng, mesh, scheme, implementation):
    """Columns add dx up, rows do not; dvalues is added up over the data axis alone, never gathered."""
    x_spec, w_spec, g_spec, for_x, for_values = PARTS[scheme]
    w, x, g = oracle.draw(rng, (IN, OUT), "8:32"), _integers(rng, (TOKENS, IN)), _integers(rng, (TOKENS, OUT))

    def gradients(x, w, g):
        loss = lambda x, w: jnp.sum(g * nms.spmm(x, w, implementation=implementation))  # noqa: E731
        dx, dw = nms.grad(loss, argnums=(0, 1))(x, w)
        return dx, dw.values

    operands = (_put(mesh, x, *x_spec), _weight(mesh, w, *w_spec), _put(mesh, g, *g_spec))
    (dx, dv), got = _run(gradients, *operands)
    np.testing.assert_array_equal(dx, oracle.spmm(g, w, transpose=True))
    np.testing.assert_array_equal(dv, oracle.sddmm(x, g, w))
    assert got == sorted(m for m in (for_x, for_values) if m)


def test_gradient_split_as_the_tokens_are_moves_activations(rng, mesh):
    """An optimiser sharded over the data axis: tokens and windows want one axis, and the windows keep it."""
    w, x, g = oracle.draw(rng, (IN, OUT), "8:32"), _integers(rng, (TOKENS, IN)), _integers(rng, (TOKENS, OUT))

    def gradient(x, w, g):
        return jax.lax.with_sharding_constraint(nms.sddmm(x, g, w), NamedSharding(mesh, P("data")))

    dv, got = _run(gradient, _put(mesh, x, "data"), _weight(mesh, w), _put(mesh, g, "data"))
    np.testing.assert_array_equal(dv, oracle.sddmm(x, g, w))
    assert sum(size for _, size in got) <= x.nbytes + g.nbytes, got


def _mlp(up, down, x):
    return nms.spmm(nms.spmm(x, up, activation="relu"), down)


def _mlp_problem(rng, mesh, lead=()):
    up, down = oracle.draw(rng, (*lead, IN, 2 * IN), "8:32"), oracle.draw(rng, (*lead, 2 * IN, IN), "8:32")
    x = oracle.integers(rng, (2 * DATA, TENSOR, IN), largest=1)
    rest = (None,) * len(lead)
    placed = (_weight(mesh, up, *rest, None, "tensor"), _weight(mesh, down, *rest, "tensor"), _put(mesh, x, "data"))
    return (up, down, x), placed


def _mlp_gradients(function):
    loss = lambda up, down, x: jnp.sum(function(up, down, x) ** 2)  # noqa: E731
    return nms.grad(loss, argnums=(0, 1, 2))


X_BYTES = 2 * TENSOR * IN * 4
"""One device's part of x in `_mlp_problem`, whole along every axis but data."""


@pytest.mark.parametrize("remat", [False, True])
def test_column_then_row_parallel(rng, mesh, remat):
    """A Megatron MLP: one all-reduce forward, one backward, and one (of both weights' gradients) over the data axis."""
    plain, placed = _mlp_problem(rng, mesh)
    hidden = np.maximum(oracle.spmm(plain[2], plain[0]), 0)
    y, got = _run(_mlp, *placed)
    np.testing.assert_array_equal(y, oracle.spmm(hidden, plain[1]))
    assert got == [("all-reduce", X_BYTES)]
    function = jax.checkpoint(_mlp) if remat else _mlp
    (up, down, x), got = _run(_mlp_gradients(function), *placed)
    want = _mlp_gradients(_mlp)(*plain)
    for gradient, single in zip((up.values, down.values, x), (want[0].values, want[1].values, want[2]), strict=True):
        oracle.assert_close(gradient, single, depth=IN)
    per_weight = 2 * VALUES * IN // OUT // TENSOR
    assert sum(size for _, size in got) == 2 * X_BYTES + 2 * per_weight
    assert {kind for kind, _ in got} == {"all-reduce"}


def test_sequence_parallel(rng, mesh):
    """Activations split along tokens between the blocks: all-gather in, reduce-scatter out, the same backward."""
    plain, placed = _mlp_problem(rng, mesh)

    def split(x):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("data", "tensor")))

    def block(up, down, x):
        return split(_mlp(up, down, split(x)))

    y, got = _run(block, *placed)
    np.testing.assert_array_equal(y, oracle.spmm(np.maximum(oracle.spmm(plain[2], plain[0]), 0), plain[1]))
    assert got == [("all-gather", X_BYTES), ("reduce-scatter", X_BYTES)]
    _, got = _run(lambda *operands: [leaf.values for leaf in _mlp_gradients(block)(*operands)[:2]], *placed)
    assert [kind for kind, _ in got].count("all-gather") == 2
    assert all(size == X_BYTES for kind, size in got if kind != "all-reduce"), got


def test_experts(rng, mesh):
    """Batched weights over the tensor axis, tokens of every expert over the data axis, called and under vmap."""
    w, x = oracle.draw(rng, (TENSOR, IN, OUT), "8:32"), _integers(rng, (TENSOR, TOKENS, IN))
    operands = (_put(mesh, x, "tensor", "data"), _weight(mesh, w, "tensor"))
    for function in (nms.spmm, jax.vmap(nms.spmm)):
        y, got = _run(function, *operands)
        np.testing.assert_array_equal(y, oracle.spmm(x, w))
        assert got == []
    dv, got = _run(lambda x, w: nms.grad(lambda w: jnp.sum(nms.spmm(x, w)))(w).values, *operands)
    np.testing.assert_array_equal(dv, oracle.sddmm(x, np.ones((TENSOR, TOKENS, OUT)), w))
    assert got == [("all-reduce", VALUES)]


def test_axes_are_not_merged_before_they_are_split(rng, mesh):
    """The minor one of two axes of tokens, or of batch axes, may be the one that is split."""
    w = oracle.draw(rng, (3, TENSOR, IN, OUT), "8:32")
    x = _integers(rng, (3, TENSOR, 3, TOKENS, IN))
    placed = _weight(mesh, w, None, "tensor")
    y, got = _run(nms.spmm, _put(mesh, x, None, "tensor", None, "data"), placed)
    np.testing.assert_array_equal(y, oracle.spmm(x, w))
    assert got == []
    one = _weight(mesh, oracle.draw(rng, (IN, OUT), "8:32"))
    batch = _put(mesh, x[0], None, None, "data")
    y, got = _run(lambda x, w: jax.vmap(lambda x: nms.spmm(x, w))(x), batch, one)
    np.testing.assert_array_equal(y, oracle.spmm(x[0], one))
    assert got == []


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_scan_over_stacked_layers(rng, mesh, implementation):
    """Stacked tensor-parallel layers: one all-reduce in the body, gradients as in one device's dense program."""
    w = oracle.draw(rng, (3, IN, IN), "8:32", fill=oracle.normal)
    x = oracle.normal(rng, (TOKENS, IN))

    def loss(values, mask, x):
        w = nms.NMSparse(values, mask, shape=(3, IN, IN), pattern="8:32")
        y, _ = jax.lax.scan(lambda x, w: (jnp.tanh(nms.spmm(x, w, implementation=implementation) / 8), None), x, w)
        return jnp.sum(y**2)

    placed = _weight(mesh, w, None, "tensor")
    (loss_value, dv), got = _run(jax.value_and_grad(loss), placed.values, placed.mask, _put(mesh, x, "data"))
    to_dense = oracle.scatter(w)

    def dense_loss(values):
        y = x
        for layer in to_dense(values):
            y = jnp.tanh(y @ layer / 8)
        return jnp.sum(y**2)

    want, dwant = jax.jit(jax.value_and_grad(dense_loss))(w.values)
    oracle.assert_close(loss_value, want, depth=IN * TOKENS)
    oracle.assert_close(dv, dwant, depth=IN * TOKENS)
    whole = 3 * VALUES * IN // OUT
    assert all(size < whole // TENSOR + 1 for kind, size in got if kind == "all-gather"), got


def test_padded_axes_are_replicated(rng, mesh):
    """A weight whose in_features or out_features is padded cannot be split there; the result is right all the same."""
    w, x = oracle.draw(rng, (IN - 1, OUT), "8:32"), _integers(rng, (TOKENS, IN - 1))
    y, _ = _run(nms.spmm, _put(mesh, x, "data"), _weight(mesh, w, "tensor"))
    np.testing.assert_array_equal(y, oracle.spmm(x, w))
    w, x = oracle.draw(rng, (IN, 4 * TENSOR - 1), "8:32/1x4"), _integers(rng, (TOKENS, IN))
    y, _ = _run(nms.spmm, _put(mesh, x, "data"), _weight(mesh, w, None, "tensor"))
    np.testing.assert_array_equal(y, oracle.spmm(x, w))


@pytest.mark.parametrize("pattern", ["2:4/1x8", "8:32/2x2", "4:64", "100:128"])
def test_every_kind_of_unit(rng, mesh, pattern):
    pattern = nms.NMPattern.parse(pattern)
    rows = nms.prune(np.ones((1, 1), np.float32), pattern).layout.rows_per_window
    w = oracle.draw(rng, (TENSOR * rows, OUT), pattern)
    x = _integers(rng, (TOKENS, TENSOR * rows))
    y, got = _run(nms.spmm, _put(mesh, x, "data", "tensor"), _weight(mesh, w, "tensor"))
    np.testing.assert_array_equal(y, oracle.spmm(x, w))
    assert got == [("all-reduce", TOKENS // DATA * OUT * 4)]
    y, got = _run(nms.spmm, _put(mesh, x, "data"), _weight(mesh, w, None, "tensor"))
    np.testing.assert_array_equal(y, oracle.spmm(x, w))
    assert got == []
