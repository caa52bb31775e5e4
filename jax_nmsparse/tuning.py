"""Measured times, as data, and the nearest of them to a call.

`dispatch_table.json` holds times of every implementation at the sizes where they were measured; ``python -m
benchmarks.run --tune`` writes it. A call takes what was fastest at the nearest measured point, in octaves: the sum of
the absolute logarithms (base 2) of the ratios of tokens, in_features, out_features, density and block sizes.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib
from typing import Any

from jax_nmsparse.pattern import NMPattern

_OTHER_PATTERN = 0.25
"""Octaves between two patterns of the same density, such as 2:4 and 16:32, which may have kernels of their own."""


_SAME_COST = {"float16": "bfloat16"}
"""dtypes that are not measured themselves, since the same kernels move and multiply the same bytes."""

_SIMILAR_COST = {"int8": "bfloat16", "float8_e4m3fn": "bfloat16", "int8 x int8": "bfloat16"}
"""What says more than nothing of dtypes where none of an operation's times was measured: bfloat16, of x or of both."""


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Times of one call on one device.

    Attributes:
      op: "spmm", "spmm_t" or "sddmm".
      pattern: The pattern.
      dtype, precision: As in `Call.measured_as`.
      tokens, in_features, out_features: The sizes.
      times_us: Time by name: of a kernel, "dense" or "xla".
    """

    op: str
    pattern: NMPattern
    dtype: str
    precision: str
    tokens: int
    in_features: int
    out_features: int
    times_us: dict[str, float] = dataclasses.field(hash=False)

    def is_weight_of(self, other: Measurement) -> bool:
        """Whether both are products with the same weight."""
        mine = (self.pattern, self.in_features, self.out_features)
        return mine == (other.pattern, other.in_features, other.out_features)

    def distance(self, pattern: NMPattern, tokens: int, in_features: int, out_features: int) -> float:
        """Octaves between this point and a call."""
        pairs = (
            (tokens, self.tokens),
            (in_features, self.in_features),
            (out_features, self.out_features),
            (pattern.density, self.pattern.density),
            (pattern.block[0], self.pattern.block[0]),
            (pattern.block[1], self.pattern.block[1]),
        )
        octaves = sum(abs(math.log2(a / b)) for a, b in pairs)
        return octaves + (_OTHER_PATTERN if (pattern.n, pattern.m) != (self.pattern.n, self.pattern.m) else 0.0)


@functools.cache
def _file() -> dict[str, Any]:
    return json.loads(pathlib.Path(__file__).with_name("dispatch_table.json").read_text(encoding="utf-8"))


@functools.cache
def table(implementation: str) -> tuple[Measurement, ...]:
    """The measurements for an implementation, none where it was never tuned."""
    points = _file().get(implementation, {"points": []})["points"]
    return tuple(Measurement(**{**p, "pattern": NMPattern.parse(p["pattern"])}) for p in points)


def forget() -> None:
    """Reads the table again at the next question: for what rewrites it."""
    for cached in (_file, table, nearest):
        cached.cache_clear()


def expansion_us(platform: str, op: str, name: str, pattern: NMPattern, dense_bytes: int) -> float:
    """Time in which a weight is expanded or compressed, by the rates that were measured; 0 without them.

    "dense" and kernels "expand" and "compress" do so in every call, while the times of "dense" in the table are those
    of a weight and a gradient that are dense already. What pieces cost beside one product is part of the rates.

    Args:
      platform: "cpu" or "cuda".
      op: "spmm", "spmm_t" or "sddmm".
      name: "dense", where XLA expands, or that of a kernel.
      pattern: Of the weight.
      dense_bytes: What its dense form takes; narrow elements, which take as long to place, count two bytes each.
    """
    rates = _file().get(platform, {}).get("expansion", {}).get(op, {}).get(name)
    if rates is None:
        return 0.0
    rate = rates["element-wise" if pattern.is_elementwise else "blocks"]
    return rates["launch_us"] + rate * dense_bytes / 1e6


@functools.lru_cache(maxsize=4096)
def nearest(
    implementation: str,
    op: str,
    pattern: NMPattern,
    dtype: str,
    precision: str,
    tokens: int,
    in_features: int,
    out_features: int,
) -> tuple[Measurement, ...]:
    """The measurements of the same operation and dtype, the nearest first."""
    dtype = _SAME_COST.get(dtype, dtype)
    alike = [p for p in table(implementation) if (p.op, p.pattern.is_elementwise) == (op, pattern.is_elementwise)]
    points = [p for p in alike if p.dtype == dtype] or [p for p in alike if p.dtype == _SIMILAR_COST.get(dtype)]
    # What is exact is as good as three TF32 products. Where only another precision was measured, that says more than
    # nothing.
    enough = {precision, "highest"} if precision == "tf32x3" else {precision}
    points = [p for p in points if p.precision in enough] or points

    def order(point: Measurement) -> tuple[float, bool]:
        return point.distance(pattern, max(1, tokens), in_features, out_features), point.precision != precision

    return tuple(sorted(points, key=order))
