"""NMSparse: construction, conversions, the pytree, and the validator."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jax_nmsparse as nms


@pytest.fixture
def w(rng) -> nms.NMSparse:
    return oracle.draw(rng, (70, 6), "2:4")


def _construct(w, **changes):
    fields = {"values": w.values, "mask": w.mask, "shape": w.shape, "pattern": w.pattern, "scales": w.scales, **changes}
    return nms.NMSparse(fields.pop("values"), fields.pop("mask"), **fields)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"values": np.zeros((3, 6, 15, 1, 1), np.float32)}, ValueError, r"15, 1, 1\), expected \(3, 6, 16, 1, 1\)"),
        ({"values": np.zeros((3, 6, 16), np.float32)}, ValueError, r"values has shape \(3, 6, 16\)"),
        ({"values": np.zeros((3, 6, 16, 1, 1), np.int32)}, TypeError, "dtype int32, supported are float32, bfloat16"),
        ({"values": np.zeros((3, 6, 16, 1, 1), np.complex64)}, TypeError, "dtype complex64"),
        ({"values": [1.0]}, TypeError, "values is a list, expected an array"),
        ({"mask": np.zeros((3, 6, 1), np.uint32)}, ValueError, r"mask has shape \(3, 6, 1\), expected \(3, 6\)"),
        ({"mask": np.zeros((2, 6), np.uint32)}, ValueError, r"mask has shape \(2, 6\)"),
        ({"mask": np.zeros((3, 6), np.int32)}, TypeError, "mask has dtype int32, expected uint32"),
        ({"mask": np.zeros((3, 6), bool)}, TypeError, "mask has dtype bool"),
        ({"mask": None}, TypeError, "mask is a NoneType"),
        ({"shape": (64, 6)}, ValueError, r"values has shape .* for a weight of shape \(64, 6\) with pattern 2:4"),
        ({"shape": (97, 6)}, ValueError, r"expected \(4, 6, 16, 1, 1\)"),
        ({"shape": (70, 7)}, ValueError, r"expected \(3, 7, 16, 1, 1\)"),
        ({"shape": (2, 70, 6)}, ValueError, r"expected \(2, 3, 6, 16, 1, 1\)"),
        ({"shape": (70,)}, ValueError, r"shape is \(70,\), expected \(..., in_features, out_features\)"),
        ({"shape": (70, 0)}, ValueError, "both at least 1"),
        ({"pattern": nms.NMPattern(1, 4)}, ValueError, "with pattern 1:4"),
        ({"pattern": "4:64"}, ValueError, "values has shape"),
        ({"pattern": 0.5}, TypeError, "pattern is a float, expected an NMPattern"),
        ({"scales": np.ones((5,), np.float32)}, ValueError, r"scales has shape \(5,\), expected \(6,\)"),
        ({"scales": np.ones((6,), np.float16)}, TypeError, "scales has dtype float16, expected float32"),
        ({"scales": 1.0}, TypeError, "scales is a float"),
    ],
)  # fmt: skip
def test_construction_names_the_field(w, changes, error, message):
    with pytest.raises(error, match=f"NMSparse: .*{message}" if "pattern is a" not in message else message):
        _construct(w, **changes)


def test_shape_is_a_sequence_of_sizes(w):
    assert _construct(w, shape=[np.int64(70), 6]).shape == (70, 6)
    assert _construct(w, pattern="2:4").pattern == w.pattern


def test_properties(rng):
    w = oracle.draw(rng, (2, 3, 70, 6), "4:64/1x2", jnp.bfloat16)
    assert (w.shape, w.ndim, w.size) == ((2, 3, 70, 6), 4, 2 * 3 * 70 * 6)
    assert (w.in_features, w.out_features, w.dtype) == (70, 6, jnp.bfloat16)
    assert w.values.shape == (2, 3, 2, 3, 4, 1, 2)
    assert w.mask.shape == (2, 3, 2, 3, 2)
    assert w.nbytes == 2 * w.values.size + 4 * w.mask.size
    assert repr(w) == "NMSparse(2x3x70x6, 4:64/1x2, bfloat16)"


def test_repr_under_tracing_and_with_foreign_leaves(w):
    seen = []
    jax.make_jaxpr(lambda w: seen.append(repr(w)) or w.values)(w)
    assert seen == ["NMSparse(70x6, 2:4, float32, traced)"]
    assert repr(nms.quantize(w, jnp.int8)) == "NMSparse(70x6, 2:4, int8, scales=float32)"
    assert "values=None" in repr(jax.tree.map(lambda leaf: None, w))
    assert "traced" not in repr(jax.eval_shape(lambda w: w, w))


@pytest.mark.parametrize("pattern", oracle.PATTERNS)
def test_todense_keep_and_indices(rng, pattern):
    w = oracle.draw(rng, (67, 13), pattern)
    dense, keep = oracle.dense(w), oracle.kept(w)
    np.testing.assert_array_equal(w.todense(), dense)
    units = np.broadcast_to(keep[..., None, None], (*keep.shape, *w.pattern.block))
    elements = np.moveaxis(units, -4, -2).reshape(-1, units.shape[1] * w.pattern.block[1])[:67, :13]
    np.testing.assert_array_equal(w.keep(), elements)
    positions = np.nonzero(keep)[-1].reshape(*keep.shape[:-1], -1)
    np.testing.assert_array_equal(w.indices(), positions % w.pattern.m)


@pytest.mark.parametrize(("pattern", "lead"), [("2:4", ()), ("3:6", (2,)), ("4:64", ()), ("2:4/2x3", (2, 3))])
def test_fromdense_round_trip(rng, pattern, lead):
    dense = oracle.dense(oracle.draw(rng, (*lead, 67, 13), pattern)).astype(np.float32)
    w = nms.NMSparse.fromdense(dense, pattern).validate()
    assert w.shape == (*lead, 67, 13)
    np.testing.assert_array_equal(oracle.dense(w), dense)


def test_fromdense_refuses_full_groups():
    dense = np.zeros((8, 2), np.float32)
    dense[:3, 0] = dense[5:8, 1] = 1
    with pytest.raises(ValueError, match=r"2 groups hold more than 2 nonzero units of 4 .*prune\(dense, pattern\)"):
        nms.NMSparse.fromdense(dense, "2:4")
    assert nms.NMSparse.fromdense(dense, "3:4").todense().sum() == 6


@pytest.mark.parametrize(
    ("dense", "error", "message"),
    [
        (np.zeros(4, np.float32), ValueError, r"shape \(4,\), expected \[..., in_features, out_features\]"),
        (np.zeros((4, 0), np.float32), ValueError, "at least one row and column"),
        (np.zeros((4, 4), np.int32), TypeError, "dtype int32, supported are"),
        (np.zeros((4, 4), bool), TypeError, "dtype bool"),
        ([[1.0]], TypeError, "is a list, expected an array"),
    ],
)
def test_fromdense_and_prune_name_a_wrong_weight(dense, error, message):
    for function, name in ((nms.NMSparse.fromdense, "fromdense"), (nms.prune, "prune")):
        with pytest.raises(error, match=f"{name}: .*{message}"):
            function(dense, "2:4")


def test_a_sparse_weight_is_not_packed_again(w):
    with pytest.raises(TypeError, match="is an NMSparse already"):
        nms.NMSparse.fromdense(w, "2:4")
    with pytest.raises(TypeError, match="fromdense: the dense weight is traced"):
        jax.jit(lambda d: nms.NMSparse.fromdense(d, "2:4"))(jnp.zeros((8, 8)))


def test_pytree_under_tree_map_and_paths(w):
    doubled = jax.tree.map(lambda leaf: 2 * leaf if leaf.dtype == jnp.float32 else leaf, w)
    np.testing.assert_array_equal(oracle.dense(doubled), 2 * oracle.dense(w))
    assert [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(w)] == [".values", ".mask"]
    assert len(jax.tree.leaves(nms.quantize(w, jnp.int8))) == 3
    empty = jax.tree.map(lambda leaf: None, w)
    assert (empty.values, empty.mask, empty.pattern) == (None, None, w.pattern)
    assert jax.tree.leaves(empty) == []
    assert jax.tree.structure(w) == jax.tree.structure(doubled)


def test_pytree_under_vmap_scan_and_eval_shape(rng):
    stack = oracle.draw(rng, (3, 32, 32), "2:4")
    x = oracle.integers(rng, (2, 32))
    shapes = []

    def layer(x, w):
        shapes.append(w.shape)
        return x @ w, w.shape[0]

    y, _ = jax.lax.scan(layer, x, stack)
    want = x
    for i in range(3):
        want = want @ oracle.dense(stack)[i]
    np.testing.assert_array_equal(y, want)
    outs = jax.vmap(lambda w: layer(x, w)[0])(stack)
    np.testing.assert_array_equal(outs, x @ oracle.dense(stack))
    assert set(shapes) == {(32, 32)}
    struct = jax.eval_shape(lambda w: w, stack)
    assert (struct.shape, struct.dtype, struct.nbytes) == (stack.shape, stack.dtype, stack.nbytes)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_astype(w, dtype):
    other = w.astype(dtype).validate()
    assert (other.dtype, other.shape, other.pattern) == (dtype, w.shape, w.pattern)
    np.testing.assert_array_equal(oracle.dense(other), oracle.dense(w))
    assert other.mask is w.mask


def test_astype_errors_and_quantised_values(w):
    with pytest.raises(TypeError, match="int8 needs scales; use quantize"):
        w.astype(jnp.int8)
    with pytest.raises(TypeError, match="dtype int32, supported are"):
        w.astype(jnp.int32)
    quantised = nms.quantize(w, jnp.int8)
    floats = quantised.astype(jnp.float32)
    assert floats.scales is None
    oracle.assert_close(floats.todense(), oracle.dense(quantised))


def test_with_values_keeps_the_mask_and_clears_padding(w):
    ones = w.with_values(jnp.ones_like(w.values)).validate()
    np.testing.assert_array_equal(oracle.dense(ones), np.asarray(w.keep()))
    assert ones.mask is w.mask
    assert ones.values.sum() == np.asarray(w.keep()).sum() < ones.values.size
    assert w.with_values(w.values.astype(jnp.bfloat16)).dtype == jnp.bfloat16
    with pytest.raises(ValueError, match=r"with_values: values has shape \(1,\), expected \(3, 6, 16, 1, 1\)"):
        w.with_values(jnp.ones(1))
    with pytest.raises(ValueError, match="has shape float"):
        w.with_values(1.0)
    with pytest.raises(TypeError, match="dtype int32"):
        w.with_values(w.values.astype(jnp.int32))


def test_numpy_and_jax_on_the_left(w, rng):
    x = oracle.integers(rng, (3, 70))
    for left in (x, jnp.asarray(x)):
        y = left @ w
        assert isinstance(y, jax.Array)
        np.testing.assert_array_equal(y, oracle.spmm(x, w))
    with pytest.raises(TypeError, match="right operand of a product"):
        _ = w @ x


@pytest.mark.parametrize("pattern", ["2:4", "3:6", "50:100", "2:4/2x4"])
def test_validate_finds_corrupt_masks(rng, pattern):
    w = oracle.draw(rng, (140, 6), pattern)
    assert w.validate() is w
    lower = (0,) * w.mask.ndim
    flipped = w._replace(mask=w.mask.at[lower].set(w.mask[lower] ^ 1))
    with pytest.raises(ValueError, match=f"1 groups of mask keep another number of units than {w.pattern.n}"):
        flipped.validate()
    with pytest.raises(ValueError, match="groups of mask keep"):
        w._replace(mask=jnp.zeros_like(w.mask)).validate()
    if w.pattern.window_units % 32:
        top = (0,) * (w.mask.ndim - 1) + (-1,) if w.pattern.mask_words > 1 else lower
        beyond = w._replace(mask=w.mask.at[top].set(w.mask[top] | jnp.uint32(1 << 31)))
        with pytest.raises(ValueError, match="1 bits of mask are set beyond the window"):
            beyond.validate()


def test_validate_finds_values_in_the_padding_and_bad_scales(w):
    with pytest.raises(ValueError, match="values in the padding beyond 70x6 are not zero"):
        w._replace(values=jnp.ones_like(w.values)).validate()
    with pytest.raises(ValueError, match="values in the padding"):
        w._replace(values=jnp.full_like(w.values, jnp.nan)).validate()
    quantised = nms.quantize(w, jnp.int8).validate()
    for bad in (0.0, -1.0, np.nan, np.inf):
        with pytest.raises(ValueError, match="scales must be positive and finite"):
            quantised._replace(scales=quantised.scales.at[0].set(bad)).validate()
    with pytest.raises(ValueError, match="mask has shape"):
        w._replace(mask=w.mask[:1]).validate()
    with pytest.raises(TypeError, match="validate: the weight is traced"):
        jax.jit(lambda w: w.validate())(w)
