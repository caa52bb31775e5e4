"""The geometry of the format and its bit operations, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jax_nmsparse import NMPattern
from jax_nmsparse import layout as layout_lib
from jax_nmsparse.layout import Layout

_pack_bits = jax.jit(layout_lib.pack_bits)
_unpack_bits = jax.jit(layout_lib.unpack_bits, static_argnums=1)
_kept_positions = jax.jit(layout_lib.kept_positions, static_argnums=1)
_select = jax.jit(layout_lib.select, static_argnums=1)


def _layout(text: str, in_features: int, out_features: int) -> Layout:
    return Layout(NMPattern.parse(text), in_features, out_features)


@pytest.mark.parametrize(
    ("text", "size", "values", "mask"),
    [
        ("2:4", (64, 5), (2, 5, 16, 1, 1), (2, 5, 1)),
        ("2:4", (65, 5), (3, 5, 16, 1, 1), (3, 5, 1)),
        ("1:10", (1, 1), (1, 1, 1, 1, 1), (1, 1, 1)),
        ("4:64", (65, 3), (2, 3, 4, 1, 1), (2, 3, 2)),
        ("8:32/1x128", (64, 129), (2, 2, 8, 1, 128), (2, 2, 1)),
        ("1:2/16x16", (513, 16), (2, 1, 16, 16, 16), (2, 1, 1)),
    ],
)
def test_shapes_and_bytes(text, size, values, mask):
    layout = _layout(text, *size)
    assert layout.values_shape == values
    assert layout.mask_shape == mask
    assert layout.values_bytes(jnp.bfloat16) == 2 * np.prod(values)
    assert layout.values_bytes(jnp.int8) == np.prod(values)
    assert layout.mask_bytes() == 4 * np.prod(mask)
    assert layout.padded_in >= size[0] > layout.padded_in - layout.rows_per_window
    assert layout.padded_out >= size[1] > layout.padded_out - layout.bn


@pytest.mark.parametrize("text", oracle.PATTERNS)
def test_units_round_trip(text):
    dense = np.arange(2 * 67 * 13, dtype=np.float32).reshape(2, 67, 13)
    layout = _layout(text, 67, 13)
    units = layout_lib.to_units(jnp.asarray(dense), layout)
    np.testing.assert_array_equal(units, oracle.cut(dense, layout.pattern))
    np.testing.assert_array_equal(layout_lib.from_units(units, layout), dense)


@given(st.sampled_from([1, 6, 31, 32, 33, 64, 100, 128]).flatmap(lambda units: hnp.arrays(bool, (3, units))))
def test_bits_round_trip(keep):
    mask = np.asarray(_pack_bits(keep))
    assert mask.dtype == np.uint32
    np.testing.assert_array_equal(mask if keep.shape[-1] > 32 else mask[..., 0], oracle.pack(keep))
    np.testing.assert_array_equal(_unpack_bits(mask, keep.shape[-1]), keep)


@pytest.mark.parametrize("text", ["2:4", "3:6", "33:64", "100:128"])
def test_bit_u_of_word_v_is_unit_32v_plus_u(text):
    layout = _layout(text, NMPattern.parse(text).window_units, 1)
    for unit in (0, 1, layout.window_units - 1):
        keep = np.arange(layout.window_units) == unit
        mask = np.asarray(_pack_bits(keep))
        assert mask[unit // 32] == 1 << (unit % 32)
        assert mask.sum() == mask[unit // 32]


@pytest.mark.parametrize("text", ["2:4", "3:6", "1:10", "4:64", "50:100", "100:128"])
def test_kept_positions_of_valid_masks_ascend(text, rng):
    w = oracle.draw(rng, (130, 3), text)
    positions = np.asarray(_kept_positions(w.mask_with_words, w.layout))
    keep = oracle.kept(w)
    for where in np.ndindex(keep.shape[:-1]):
        np.testing.assert_array_equal(positions[where], np.flatnonzero(keep[where]))


@pytest.mark.parametrize("text", ["2:4", "3:6", "33:64", "50:100"])
def test_corrupt_masks_stay_inside_the_window(text, rng):
    layout = _layout(text, 128, 8)
    masks = rng.integers(0, 2**32, (5, *layout.mask_shape), dtype=np.uint32)
    masks[0], masks[1], masks[2] = 0, 2**32 - 1, 1 << 31
    positions = np.asarray(_kept_positions(masks, layout))
    assert positions.shape == (5, *layout.mask_shape[:-1], layout.q)
    assert positions.min() >= 0
    assert positions.max() < layout.window_units
    assert (positions[0] == layout.window_units - 1).all(), "missing bits are the last unit"
    np.testing.assert_array_equal(positions[1], np.broadcast_to(np.arange(layout.q), positions[1].shape))


@pytest.mark.parametrize("text", ["2:4", "4:64", "2:4/1x8", "2:5/3x2"])
def test_compress_and_expand_are_inverse(text, rng):
    w = oracle.draw(rng, (2, 70, 11), text)
    units = jax.jit(layout_lib.expand, static_argnums=2)(w.values, w.mask_with_words, w.layout)
    compressed = jax.jit(layout_lib.compress, static_argnums=2)(units, w.mask_with_words, w.layout)
    np.testing.assert_array_equal(units, oracle.cut(oracle.dense(w), w.pattern))
    np.testing.assert_array_equal(compressed, w.values)


@given(st.data())
def test_select_keeps_the_n_largest(data):
    layout = _layout(data.draw(st.sampled_from(["1:2", "2:4", "3:5", "3:32", "17:64"])), 1, 1)
    m = layout.pattern.m
    scores = data.draw(
        hnp.arrays(
            np.float32,
            (2, 1, layout.window_units),
            elements=st.sampled_from([0.0, 1.0, 2.0, -3.0, np.inf, -np.inf, np.nan, 1e-42, -1e-42, 3e38]),
        )
    )
    mask = np.asarray(_select(scores, layout))
    groups = np.where(np.isnan(scores), np.inf, scores).reshape(2, 1, -1, m).astype(np.float64)
    order = np.argsort(-groups, axis=-1, kind="stable")[..., : layout.pattern.n]
    keep = np.zeros(groups.shape, bool)
    np.put_along_axis(keep, order, True, axis=-1)
    np.testing.assert_array_equal(mask, keep.reshape(scores.shape))


def test_layout_is_static_under_jit():
    layout = _layout("2:4", 8, 4)
    double = jax.jit(lambda dense, layout: layout_lib.to_units(dense, layout) * 2, static_argnums=1)
    assert double(jnp.ones((8, 4)), layout).shape == (1, 4, 32, 1, 1)
    assert hash(layout) == hash(_layout("2:4", 8, 4))
