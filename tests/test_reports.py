"""Faults that users reported, one test each."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_nmsparse as nms
from jax_nmsparse import aot, native, planning


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
    x, w = _operands(rng, (48, 20), "8:32/1x4")
    exported = jax.export.export(jax.jit(nms.spmm), disabled_checks=aot.disabled_checks())(x, w)
    y = jax.export.deserialize(exported.serialize()).call(x, w)
    oracle.assert_close(y, oracle.spmm(x, w), depth=48)


def test_export_with_a_symbolic_number_of_tokens(rng):
    """One exported program for every batch and length, gradients too; a named kernel says why it cannot."""
    x, w = _operands(rng, (100, 30), "8:32/1x8")
    shape = jax.export.symbolic_shape("b, length, 100")

    def f(x, w):
        return nms.spmm(x, w, bias=jnp.ones(30), activation="gelu"), nms.grad(lambda w: (x @ w).sum())(w).values

    exported = jax.export.export(jax.jit(f), disabled_checks=aot.disabled_checks())(
        jax.ShapeDtypeStruct(shape, jnp.float32), w
    )
    restored = jax.export.deserialize(exported.serialize())
    for lead in ((8, 1), (2, 4)):
        y, dv = restored.call(x.reshape(*lead, 100), w)
        oracle.assert_close(y.reshape(8, 30), oracle.spmm(x, w, bias=np.ones(30), activation="gelu"), depth=100)
        oracle.assert_close(dv, oracle.sddmm(x, np.ones((8, 30)), w), depth=8)
    with pytest.raises(NotImplementedError, match=r"the number of tokens is symbolic \(1 x "):
        jax.export.export(jax.jit(lambda x, w: nms.spmm(x, w, implementation="cpu")))(
            jax.ShapeDtypeStruct(shape, jnp.float32), w
        )


@pytest.mark.parametrize("pattern", ["2:4/1x8", "1:4/4x4"])
def test_scores_of_huge_blocks_do_not_overflow(rng, pattern):
    """Sums of 3e38 and more: the largest units of float32 are still told apart, and Inf and NaN are above all."""
    dense = np.abs(oracle.normal(rng, (64, 16)))
    dense = (dense / dense.max() * 3e38).astype(np.float32)
    dense[40:, :8] *= np.float32(1e-30)
    sums = oracle.cut(dense.astype(np.float64), nms.NMPattern.parse(pattern)).sum((-2, -1))
    groups = sums.reshape(*sums.shape[:-1], -1, 4)
    n = int(pattern[0])
    want = np.argsort(np.argsort(-groups, -1), -1) < n
    got = oracle.kept(nms.prune(dense, pattern))
    inside = groups.sum(-1) > 0
    np.testing.assert_array_equal(got.reshape(groups.shape)[inside], want[inside])


def test_explain_refuses_a_device_that_is_none(rng):
    x, w = _operands(rng)
    with pytest.raises(ValueError, match="device is 'foo', expected a jax.Device, a platform or a device kind: 'cpu'"):
        nms.explain(x, w, device="foo")
    assert nms.explain(x, w, device="tpu").choice.implementation == "xla"
    assert nms.explain(x, w, device="NVIDIA A100-SXM4-40GB").platform == "cuda"


def test_no_gain_is_promised_where_xla_multiplies_a_dense_weight(monkeypatch):
    monkeypatch.setitem(native.MODULES, "cuda", native.NativeModule("cuda", frozenset(), None))
    dense = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    w = jax.eval_shape(lambda d: nms.prune(d, "16:32"), dense)
    one, many = (jax.ShapeDtypeStruct((tokens, 4096), jnp.bfloat16) for tokens in (1, 4096))
    explanation = nms.explain(many, w, device="NVIDIA H200")
    assert (explanation.choice.name, explanation.gain) == ("expand", 1.0)
    assert nms.explain(one, w, device="NVIDIA H200").gain == pytest.approx(32 / 18, rel=0.01)


@pytest.mark.parametrize("values_dtype", ["int8", "float8_e4m3fn"])
def test_float8_activations_of_the_transposed_product_with_scales(rng, values_dtype):
    w = nms.quantize(nms.prune(oracle.normal(rng, (64, 24)), "2:4"), values_dtype)
    g = oracle.integers(rng, (3, 24), jnp.float8_e4m3fn)
    got = nms.spmm(g, w, transpose=True)
    assert got.dtype == nms.spmm(oracle.integers(rng, (3, 64), jnp.float8_e4m3fn), w).dtype == jnp.float32
    oracle.assert_close(got, oracle.spmm(g, w, transpose=True), depth=24)


def test_masks_that_no_layer_takes():
    """Masks nested as the model is passed are taken; those of no sparse layer, or not bool, are refused."""
    kernel = jnp.arange(64.0).reshape(8, 8) + 1
    variables = {"params": {"up": {"kernel": kernel}}}
    mask = jnp.tile(jnp.array([True, False, False, True]), 2)[:, None] & jnp.ones((8, 8), bool)
    pruned, report = nms.sparsify(variables, "2:4", masks={"params": {"up": {"kernel": mask}}})
    assert report.layers[0].method == "mask"
    np.testing.assert_array_equal(nms.densify(pruned)["params"]["up"]["kernel"], jnp.where(mask, kernel, 0))
    with pytest.raises(ValueError, match="masks holds upp/kernel, where no layer is made sparse"):
        nms.sparsify(variables, "2:4", masks={"upp": {"kernel": mask}})
    with pytest.raises(TypeError, match="up/kernel has dtype int32, expected bool"):
        nms.sparsify(variables, "2:4", masks={"up": {"kernel": mask.astype(jnp.int32)}})


def test_densify_without_masks():
    variables, _ = nms.sparsify({"params": {"up": {"kernel": jnp.ones((8, 8))}}}, "2:4")
    with pytest.raises(ValueError, match="up holds packed values, but nm_mask holds no mask for it"):
        nms.densify({"params": variables["params"]})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"platforms": "cpu"}, TypeError, "expected a sequence"),
        ({"platforms": ["foo"]}, ValueError, "expected some of cpu, cuda, rocm, tpu"),
        ({"platforms": ["cuda"], "cuda_capability": "foo"}, ValueError, "expected such as '9.0'"),
    ],
)
def test_export_for_what_does_not_exist(options, error, message):
    with pytest.raises(error, match=message):
        aot.export(jax.jit(nms.spmm), **options)


@pytest.mark.parametrize("options", [{"link": -1.0}, {"link": 0.0}, {"link": float("nan")}, {"context": -5}])
def test_plans_of_impossible_numbers(options):
    with pytest.raises(ValueError, match=f"plan: {next(iter(options))} is"):
        planning.plan("8b", mesh=(1, 8), **options)
