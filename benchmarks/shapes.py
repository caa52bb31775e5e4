"""What is measured: named shapes, patterns and suites."""

from __future__ import annotations

import dataclasses

SHAPES = (
    (4096, 4096),
    (4096, 14336),
    (14336, 4096),
    (8192, 8192),
    (8192, 28672),
    (5120, 20480),
    (20480, 5120),
)
"""(in_features, out_features) of Llama, Qwen and GPT layers: design shapes of every suite."""

PAPER_SHAPES = (
    (1024, 1024),
    (2048, 2048),
    (4096, 4096),
    (8192, 8192),
    (1024, 4096),
    (4096, 1024),
    (5120, 20480),
    (20480, 5120),
)
"""M1 to M8 of nmSPARSE; with 256, 1024 and 4096 tokens they are M9 to M32."""

TRAIN_SHAPES = SHAPES[:4]

EW, VW128, VW64, VW32, BW64 = (1, 1), (1, 128), (1, 64), (1, 32), (64, 64)


@dataclasses.dataclass(frozen=True)
class Case:
    """One row to measure; `precision` is one of `kernels.FLOAT32`."""

    op: str
    pattern: str
    block: tuple[int, int]
    dtype: str
    tokens: int
    shape: tuple[int, int]
    precision: str = "default"


def _cross(ops, patterns, blocks, dtypes, tokens, shapes, precision="default") -> list[Case]:
    return [
        Case(op, pattern, block, dtype, t, shape, precision)
        for dtype in dtypes
        for block in blocks
        for pattern in patterns
        for op in ops
        for t in tokens
        for shape in shapes
    ]


def suite(name: str) -> list[Case]:
    """The cases of a suite."""
    # The most telling first: a run may be stopped after a time.
    if name == "decode":
        vw = ["16:32", "8:32", "4:32"]
        cases = _cross(["spmm"], ["2:4", "16:32", "8:32", "3:32"], [EW], ["bfloat16"], [1], SHAPES)
        cases += _cross(["spmm"], ["16:32", "3:32"], [EW], ["float32"], [1], SHAPES, "highest")
        cases += _cross(["spmm"], ["2:4", "16:32"], [EW], ["bfloat16"], [8, 16, 32, 64], SHAPES)
        cases += _cross(["spmm"], ["8:32", "3:32"], [EW], ["bfloat16"], [2, 4, 8, 16], SHAPES)
        cases += _cross(["spmm"], vw, [VW128], ["bfloat16"], [1, 16, 64], SHAPES)
        cases += _cross(["spmm"], ["16:32", "8:32"], [VW128], ["bfloat16"], [128], SHAPES)
        cases += _cross(["spmm"], ["16:32"], [EW], ["bfloat16"], [2, 4], SHAPES)
        cases += _cross(["spmm"], ["8:32"], [EW], ["float32"], [8], SHAPES, "highest")
        cases += _cross(["spmm_t"], ["16:32"], [EW, VW128], ["bfloat16"], [1], SHAPES)
        cases += _cross(["spmm"], ["16:32"], [EW, VW128], ["int8", "float8_e4m3fn"], [1], SHAPES)
        cases += _cross(["spmm"], ["8:32"], [EW], ["int8"], [8], SHAPES)
        return cases + _cross(["spmm"], vw, [VW64], ["bfloat16"], [1, 16, 64], SHAPES)
    if name == "prefill":
        patterns = ["16:32", "8:32", "4:32", "3:32"]
        cases = _cross(["spmm"], patterns, [VW128], ["bfloat16"], [4096], TRAIN_SHAPES)
        cases += _cross(["spmm"], patterns, [VW128], ["float32"], [4096], TRAIN_SHAPES)
        cases += _cross(["spmm"], patterns, [VW128], ["float32"], [4096], TRAIN_SHAPES, "tf32x3")
        cases += _cross(["spmm"], patterns, [VW128], ["int8 x int8"], [4096], TRAIN_SHAPES)
        cases += _cross(["spmm"], ["8:32"], [VW128], ["bfloat16"], [256, 1024], TRAIN_SHAPES)
        cases += _cross(["spmm"], ["2:4", "8:32"], [EW], ["bfloat16"], [4096], TRAIN_SHAPES)
        cases += _cross(["spmm"], patterns, [VW32], ["float32"], [4096], TRAIN_SHAPES[:1], "highest")
        cases += _cross(["spmm"], patterns, [BW64, VW64], ["bfloat16"], [4096], TRAIN_SHAPES)
        cases += _cross(["spmm"], ["8:32"], [VW128], ["int8 x int8", "float32"], [256, 1024], TRAIN_SHAPES)
        return cases + _cross(["spmm"], ["2:4", "8:32"], [EW], ["bfloat16"], [256], TRAIN_SHAPES)
    if name == "train":
        ops = ["spmm", "spmm_t", "sddmm"]
        return _cross(ops, ["16:32", "8:32"], [VW128, EW], ["bfloat16"], [4096], TRAIN_SHAPES)
    if name == "paper":
        patterns = ["16:32", "8:32", "3:32"]
        cases = _cross(["spmm"], patterns, [EW], ["float32"], [1], PAPER_SHAPES, "highest")
        return cases + _cross(["spmm"], patterns, [VW32], ["float32"], [256, 1024, 4096], PAPER_SHAPES, "highest")
    if name == "cpu":
        shapes = [(4096, 4096), (4096, 11008)]
        cases = _cross(["spmm"], ["2:4", "16:32", "8:32", "3:32"], [EW], ["float32", "bfloat16"], [1, 128], shapes)
        cases += _cross(["spmm"], ["8:32"], [VW32], ["float32"], [1, 128], shapes)
        return cases + _cross(["spmm_t", "sddmm"], ["8:32"], [EW], ["float32"], [1, 128], shapes)
    raise ValueError(f"unknown suite {name!r}")


SUITES = ("decode", "prefill", "train", "paper", "cpu")
