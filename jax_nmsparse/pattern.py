"""N:M patterns: how many units of every group are kept, and how large a unit is."""

from __future__ import annotations

import dataclasses
import operator
import re
from typing import Any

MAX_GROUP = 128
"""The largest group size ``m`` that the format stores."""

_WINDOW_UNITS = 32
_SYNTAX = re.compile(r"(?P<n>\d+):(?P<m>\d+)(/(?P<bk>\d+)x(?P<bn>\d+))?")


def _as_int(name: str, value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError(f"NMPattern: {name} is the bool {value}, expected an integer")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(
            f"NMPattern: {name} is {value!r} of type {type(value).__name__}, expected an integer; "
            "a density such as 0.5 is written as n of m, for example NMPattern(2, 4)"
        ) from None


@dataclasses.dataclass(frozen=True)
class NMPattern:
    """Keeps ``n`` of every ``m`` consecutive units along the contraction axis.

    A *unit* is a ``bk x bn`` tile of the weight ``[in_features, out_features]``: ``block=(1, 1)`` is element-wise
    (EW), ``(1, L)`` vector-wise (VW-L), ``(b, b)`` block-wise (BW). Groups run along ``in_features``, the contraction
    axis, independently for every column of units.

    Attributes:
      n: Units kept in a group, 1 <= n < m.
      m: Units in a group, at most 128.
      block: ``(bk, bn)``, rows (contraction axis) and columns (output axis) of a unit.

    Raises:
      TypeError: Where n, m or a block size is not an integer.
      ValueError: Where they are out of range.

    Example:
      >>> NMPattern(2, 4).density
      0.5
      >>> str(NMPattern(8, 32, block=(1, 128)))
      '8:32/1x128'

    Source: N:M sparsity after Zhou et al., ICLR 2021; EW, VW and BW units after Lin et al., nmSPARSE, MLSys 2023.
    """

    n: int
    m: int
    block: tuple[int, int] = (1, 1)

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", _as_int("n", self.n))
        object.__setattr__(self, "m", _as_int("m", self.m))
        if not isinstance(self.block, (tuple, list)) or len(self.block) != 2:
            raise TypeError(f"NMPattern: block is {self.block!r}, expected a pair (bk, bn) such as (1, 128)")
        bk, bn = (_as_int(name, size) for name, size in zip(("bk", "bn"), self.block, strict=True))
        object.__setattr__(self, "block", (bk, bn))
        if not 2 <= self.m <= MAX_GROUP:
            raise ValueError(f"NMPattern: m is {self.m}, expected 2 to {MAX_GROUP}")
        if not 1 <= self.n < self.m:
            raise ValueError(
                f"NMPattern: n is {self.n} with m = {self.m}, expected 1 to {self.m - 1}; n units are kept of every m"
            )
        if bk < 1 or bn < 1:
            raise ValueError(f"NMPattern: block is {self.block}, expected sizes of at least 1")

    @classmethod
    def parse(cls, text: str) -> NMPattern:
        """Reads ``"n:m"`` or ``"n:m/BKxBN"``, the form that ``str`` writes.

        Example:
          >>> NMPattern.parse("2:4")
          NMPattern(2, 4)
        """
        if not isinstance(text, str):
            raise TypeError(f"NMPattern.parse: got {type(text).__name__}, expected a string such as '2:4'")
        match = _SYNTAX.fullmatch(text.strip())
        if match is None:
            raise ValueError(
                f"NMPattern.parse: {text!r} is not a pattern, expected 'n:m' or 'n:m/BKxBN' ('8:32/1x128')"
            )
        block = (int(match["bk"]), int(match["bn"])) if match["bk"] else (1, 1)
        return cls(int(match["n"]), int(match["m"]), block)

    def __str__(self) -> str:
        text = f"{self.n}:{self.m}"
        return text if self.is_elementwise else f"{text}/{self.block[0]}x{self.block[1]}"

    def __repr__(self) -> str:
        block = "" if self.is_elementwise else f", block={self.block}"
        return f"NMPattern({self.n}, {self.m}{block})"

    @property
    def is_elementwise(self) -> bool:
        """Whether a unit is a single element."""
        return self.block == (1, 1)

    @property
    def density(self) -> float:
        """The kept fraction, n / m."""
        return self.n / self.m

    @property
    def window_units(self) -> int:
        """Units in a window of the format: 32 where m divides 32, otherwise one group of m."""
        return _WINDOW_UNITS if _WINDOW_UNITS % self.m == 0 else self.m

    @property
    def q(self) -> int:
        """Kept units in a window."""
        return self.n * self.window_units // self.m

    @property
    def mask_words(self) -> int:
        """uint32 words that hold the bits of a window."""
        return -(-self.window_units // 32)
