"""NMPattern: what it accepts, how it is written, and the geometry that follows from it."""

import dataclasses
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_nmsparse import NMPattern

blocks = st.tuples(st.integers(1, 300), st.integers(1, 300))
patterns = st.integers(2, 128).flatmap(
    lambda m: st.builds(NMPattern, st.integers(1, m - 1), st.just(m), st.one_of(st.just((1, 1)), blocks))
)


@given(patterns)
def test_str_and_repr_round_trip(pattern):
    assert NMPattern.parse(str(pattern)) == pattern
    assert eval(repr(pattern)) == pattern
    assert hash(NMPattern.parse(str(pattern))) == hash(pattern)


@given(patterns)
def test_a_window_holds_whole_groups_and_q_units(pattern):
    assert pattern.window_units % pattern.m == 0
    assert pattern.q * pattern.m == pattern.n * pattern.window_units
    assert 32 * (pattern.mask_words - 1) < pattern.window_units <= 32 * pattern.mask_words
    assert (pattern.window_units == 32) == (32 % pattern.m == 0)


@pytest.mark.parametrize(
    ("text", "window_units", "q", "words"),
    [
        ("2:4", 32, 16, 1),
        ("1:2", 32, 16, 1),
        ("4:8", 32, 16, 1),
        ("3:32", 32, 3, 1),
        ("3:6", 6, 3, 1),
        ("1:10", 10, 1, 1),
        ("20:33", 33, 20, 2),
        ("4:64", 64, 4, 2),
        ("50:100", 100, 50, 4),
        ("1:128", 128, 1, 4),
        ("127:128/2x8", 128, 127, 4),
    ],
)
def test_geometry(text, window_units, q, words):
    pattern = NMPattern.parse(text)
    assert (pattern.window_units, pattern.q, pattern.mask_words) == (window_units, q, words)


def test_forms():
    assert str(NMPattern(2, 4)) == "2:4"
    assert repr(NMPattern(2, 4)) == "NMPattern(2, 4)"
    assert repr(NMPattern(2, 4, (1, 8))) == "NMPattern(2, 4, block=(1, 8))"
    assert NMPattern.parse("  8:32/1x128 ") == NMPattern(8, 32, block=(1, 128))
    numpy: Any = (np.int64(2), np.int32(4), [1, np.int8(8)])
    assert NMPattern(*numpy) == NMPattern(2, 4, (1, 8))
    assert type(NMPattern(*numpy).n) is int
    assert NMPattern(2, 4).is_elementwise
    assert not NMPattern(2, 4, (1, 8)).is_elementwise
    assert NMPattern(3, 32).density == 3 / 32
    assert NMPattern(2, 4) != NMPattern(16, 32)


def test_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(NMPattern(2, 4), "n", 3)  # noqa: B010


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((4, 4), ValueError, "n is 4 with m = 4, expected 1 to 3"),
        ((5, 4), ValueError, "n is 5 with m = 4"),
        ((0, 4), ValueError, "n is 0 with m = 4"),
        ((-1, 4), ValueError, "n is -1"),
        ((1, 1), ValueError, "m is 1, expected 2 to 128"),
        ((2, 129), ValueError, "m is 129, expected 2 to 128"),
        ((0.5, 4), TypeError, "n is 0.5 of type float, expected an integer; a density"),
        ((2, 4.0), TypeError, "m is 4.0 of type float"),
        ((True, 4), TypeError, "n is the bool True"),
        (("2", 4), TypeError, "n is '2' of type str"),
        ((2, 4, 8), TypeError, r"block is 8, expected a pair \(bk, bn\)"),
        ((2, 4, (1, 2, 3)), TypeError, "expected a pair"),
        ((2, 4, (0, 8)), ValueError, r"block is \(0, 8\), expected sizes of at least 1"),
        ((2, 4, (1, -8)), ValueError, "at least 1"),
        ((2, 4, (1.0, 8)), TypeError, "bk is 1.0"),
    ],
)
def test_construction_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        NMPattern(*arguments)


@pytest.mark.parametrize("text", ["", "2", "2:", "2-4", "2:4/8", "2:4/1x", "2:4/1x8x2", "a:b", "2.0:4", "-1:4"])
def test_parse_errors(text):
    with pytest.raises(ValueError, match="is not a pattern, expected 'n:m' or 'n:m/BKxBN'"):
        NMPattern.parse(text)


def test_parse_of_other_types_and_impossible_patterns():
    with pytest.raises(TypeError, match="got tuple, expected a string"):
        NMPattern.parse(cast(Any, (2, 4)))
    with pytest.raises(ValueError, match="n is 4 with m = 2"):
        NMPattern.parse("4:2")
