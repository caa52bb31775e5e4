"""The native kernels, and what each of them takes: one table, as data, for dispatch and the tests."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from jax_nmsparse.layout import Layout

FLOAT32 = ("default", "tf32x3", "highest")
"""Products of float32 operands: TF32, as good as three TF32 products, float32. Native code counts in this order."""

_FLOAT32_OF: dict[Any, str] = {
    lax.Precision.HIGH: "highest",
    lax.Precision.HIGHEST: "highest",
    lax.DotAlgorithmPreset.BF16_BF16_F32_X3: "tf32x3",
    lax.DotAlgorithmPreset.TF32_TF32_F32_X3: "tf32x3",
    lax.DotAlgorithmPreset.BF16_BF16_F32_X6: "highest",
    lax.DotAlgorithmPreset.BF16_BF16_F32_X9: "highest",
    lax.DotAlgorithmPreset.F32_F32_F32: "highest",
    lax.DotAlgorithmPreset.F64_F64_F64: "highest",
}
"""What a precision asks of them; the others ask for no more than TF32 gives."""


@dataclasses.dataclass(frozen=True)
class Call:
    """The static description of one primitive call.

    Attributes:
      op: "spmm", "spmm_t" or "sddmm".
      layout: Pattern and dense size of the weight.
      batch: Size of the batch axis, 1 for a single weight.
      tokens: Rows of x (and g) for each batch entry.
      x_dtype: dtype of x, for spmm_t of g.
      values_dtype: dtype of values, for sddmm of g.
      dtype: dtype of the result.
      precision: As in `jax.lax.dot_general`.
    """

    op: str
    layout: Layout
    batch: int
    tokens: int
    x_dtype: jnp.dtype
    values_dtype: jnp.dtype
    dtype: jnp.dtype
    precision: lax.PrecisionLike = None

    @property
    def dtypes(self) -> tuple[str, str]:
        return jnp.dtype(self.x_dtype).name, jnp.dtype(self.values_dtype).name

    @property
    def measured_as(self) -> tuple[str, str]:
        """dtype and precision under which its times are listed; with quantised values alone x is bfloat16."""
        x, values = self.dtypes
        return (f"{x} x {values}" if x in _QUANTISED else values), self.float32 if values == "float32" else "default"

    @property
    def float32(self) -> str:
        """What products of float32 operands have to be, one of `FLOAT32`."""
        asked = self.precision if isinstance(self.precision, tuple) else (self.precision,)
        return max((_FLOAT32_OF.get(p, "default") for p in asked), key=FLOAT32.index)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One native kernel family.

    Attributes:
      name: The name that the native handler looks up.
      implementation: "cpu" or "cuda".
      ops: The operations that it computes.
      summary: What it is, for `explain`.
      rejects: Why it cannot run a call, or None.
      workspace: Bytes of workspace that a call needs.
      feature_major: Whether it takes x and g and gives y and dx with features before tokens in memory; XLA transposes
        where its neighbours do not. Values and their gradient have one order for all kernels.
      capability: The only compute capability that it has code for, or None.
      by_xla: Whether XLA multiplies: the kernel gives the dense weight (all of it for spmm, pieces for spmm_t), or
        takes the kept units of a dense gradient, piece by piece.
    """

    name: str
    implementation: str
    ops: tuple[str, ...]
    summary: str
    rejects: Callable[[Call], str | None]
    workspace: Callable[[Call], int] = lambda call: 0
    feature_major: bool = False
    capability: str | None = None
    by_xla: bool = False


_FLOATS = ("float32", "bfloat16", "float16")
_HALVES = ("bfloat16", "float16")
_QUANTISED = ("int8", "float8_e4m3fn")
_RESULTS = (*_FLOATS, "float64", "int32")
_OPS = ("spmm", "spmm_t", "sddmm")

Pairs = frozenset[tuple[str, str]]
_SAME: Pairs = frozenset((d, d) for d in _FLOATS)
_WEIGHT_ONLY: Pairs = frozenset((d, q) for d in _FLOATS for q in _QUANTISED)
_INT8_BY_INT8: Pairs = frozenset({("int8", "int8")})
_FLOAT8_BY_FLOAT8: Pairs = frozenset({("float8_e4m3fn", "float8_e4m3fn")})
_HALF_X: Pairs = frozenset((d, v) for d in _HALVES for v in (d, *_QUANTISED))
_SAME_HALVES: Pairs = frozenset((d, d) for d in _HALVES)


def _dtypes(call: Call, pairs: Pairs, results: tuple[str, ...] = _RESULTS) -> str | None:
    """Why the dtypes do not fit; g of a gradient is a float, and both operands of sddmm are of one dtype."""
    floats = (*_FLOATS, "float64")
    allowed = {
        "spmm": pairs,
        "spmm_t": {p for p in pairs if p[0] in floats},
        "sddmm": {p for p in pairs if p[0] == p[1] and p[0] in floats},
    }[call.op]
    if call.dtypes not in allowed:
        listed = ", ".join(sorted(f"{x} x {w}" for x, w in allowed))
        return f"dtypes {call.dtypes[0]} x {call.dtypes[1]} have no kernel (there are {listed})"
    if jnp.dtype(call.dtype).name not in results:
        return f"no kernel writes {jnp.dtype(call.dtype).name} (results: {', '.join(results)})"
    return None


def _simd(call: Call) -> str | None:
    float64 = frozenset({("float64", "float64")})
    weight_only = frozenset(p for p in _WEIGHT_ONLY if p[1] == "int8")
    return _dtypes(call, _SAME | float64 | _INT8_BY_INT8 | weight_only)


def _simple(call: Call) -> str | None:
    return _dtypes(call, _SAME | _INT8_BY_INT8 | _FLOAT8_BY_FLOAT8 | _WEIGHT_ONLY)


def _around_dense(call: Call) -> str | None:
    """What the kernels ask around which XLA multiplies."""
    reason = "its sizes do not fit 32 bits" if max(call.layout.padded_in, call.layout.padded_out) >= 2**31 else None
    return reason or _simple(call)


_GRID = 65535
_MAX_ROWS = 4096
"""Rows of x of one window that certainly fit shared memory beside the weights."""


def _element_wise(call: Call, most_tokens: int) -> str | None:
    layout = call.layout
    if not layout.pattern.is_elementwise or layout.window_units != 32:
        return f"takes element-wise patterns with m dividing 32, not {layout.pattern}"
    if call.tokens > most_tokens:
        return f"takes up to {most_tokens} tokens, not {call.tokens}"
    if call.batch > _GRID or layout.windows > 2**20:
        return "the weight is larger than its grid"
    return None


def _ew_spmv(call: Call) -> str | None:
    return _dtypes(call, _SAME | _INT8_BY_INT8 | _WEIGHT_ONLY) or _element_wise(call, 4)


def _ew_in_one_wave(call: Call, most_tokens: int) -> str | None:
    """What the kernels on CUDA cores share whose blocks run in one wave."""
    x, values = call.dtypes
    kept = [3, 4, 8, 16] if x == values else [8, 16]
    layout = call.layout
    if layout.q not in kept:
        return f"takes {kept} kept of 32 for these dtypes, not {layout.q}"
    # Where a column's values of a window are short, a thread takes two columns.
    if layout.q * jnp.dtype(call.values_dtype).itemsize <= 12 and layout.out_features % 2:
        return f"takes an even number of columns, not {layout.out_features}"
    return _dtypes(call, _SAME | _WEIGHT_ONLY) or _element_wise(call, most_tokens)


def _ew_spmv_wave(call: Call) -> str | None:
    return _ew_in_one_wave(call, 1)


def _ew_simt(call: Call) -> str | None:
    return _ew_in_one_wave(call, 16 if call.dtypes == ("bfloat16", "bfloat16") and call.layout.q <= 4 else 8)


def _ew_few_tokens(call: Call) -> str | None:
    x, values = call.dtypes
    kept = [8, 16] + [4] * (x == values) + [2, 3, 6, 12, 24] * (x == values == "bfloat16")
    if call.layout.q not in kept:
        return f"takes {sorted(kept)} kept of 32 for these dtypes, not {call.layout.q}"
    return _dtypes(call, _HALF_X) or _element_wise(call, 32)


def _ew_sparse24(call: Call) -> str | None:
    if (call.layout.pattern.n, call.layout.pattern.m) not in ((2, 4), (1, 2)):
        return f"takes 2:4 (and 1:2), not {call.layout.pattern}"
    return _dtypes(call, _SAME_HALVES) or _element_wise(call, 64)


def _columns(call: Call, multiple: int) -> str | None:
    bn = call.layout.bn
    return f"takes blocks whose columns are a multiple of {multiple}, not {bn}" if bn % multiple else None


def _one_mask_word(call: Call) -> str | None:
    units = call.layout.window_units
    return f"takes windows of up to 32 units, not {units}" if units > 32 else None


def _feature_major_halves(call: Call) -> str | None:
    """What the kernels ask whose tensor maps describe 16-bit activations [features, tokens]."""
    if call.tokens % 8 or not call.tokens:
        return f"takes tokens in multiples of 8, not {call.tokens}"
    return _dtypes(call, _SAME_HALVES, _FLOATS)


def _tile(call: Call, columns: int, most_tokens: int) -> str | None:
    """What the kernels for vector- and block-wise weights share."""
    layout = call.layout
    if reason := _columns(call, columns):
        return reason
    if layout.rows_per_window > _MAX_ROWS:
        return f"takes windows of up to {_MAX_ROWS} rows, not {layout.rows_per_window}"
    if call.tokens > most_tokens:
        return f"takes up to {most_tokens} tokens, not {call.tokens}"
    return "the batch is larger than its grid" if call.batch > _GRID else None


def _block_simt(call: Call) -> str | None:
    return _dtypes(call, _SAME | _WEIGHT_ONLY) or _tile(call, 1, 16)


def _block_spmv(call: Call) -> str | None:
    layout = call.layout
    if layout.window_units != 32:
        return f"takes windows of 32 units, not {layout.window_units}"
    if layout.rows_per_window > 1024:
        return f"takes windows of up to 1024 rows, not {layout.rows_per_window}"
    # A thread reads 16 bytes of a row at once.
    columns = 16 // jnp.dtype(call.values_dtype).itemsize
    return _dtypes(call, _SAME | _WEIGHT_ONLY) or _tile(call, columns, 4)


def _block_mma(call: Call) -> str | None:
    layout = call.layout
    # A step of the tensor cores takes 16 kept rows: as many windows as hold a multiple of that are staged together.
    rows = layout.rows_per_window * (16 // math.gcd(16, layout.q * layout.bk))
    if rows > 2048:
        return f"takes up to 2048 rows for 16 kept ones, not {rows}"
    columns = 16 if call.dtypes[0] == call.dtypes[1] else 32
    return _dtypes(call, _HALF_X) or _tile(call, columns, 512)


def _block_wgmma(call: Call) -> str | None:
    bk, reason = call.layout.bk, None
    if bk not in (1, 2, 4, 8, 16, 32) and bk % 64:
        reason = f"takes blocks of 1, 2, 4, 8, 16, 32 or a multiple of 64 rows, not {bk}"
    return _one_mask_word(call) or reason or _feature_major_halves(call) or _tile(call, 64, 2**31)


def _ew_many_tokens(call: Call) -> str | None:
    """What the element-wise kernels for many tokens ask."""
    return _feature_major_halves(call) or _element_wise(call, 2**30)


def _ew_wgmma_sparse24(call: Call) -> str | None:
    if (call.layout.pattern.n, call.layout.pattern.m) not in ((2, 4), (1, 2)):
        return f"takes 2:4 (and 1:2), not {call.layout.pattern}"
    return _ew_many_tokens(call)


def _ew_wgmma(call: Call) -> str | None:
    layout = call.layout
    rows = 32 if call.batch == 1 else 64
    if layout.in_features % rows:
        return f"takes in_features in multiples of {rows} (for a batch of {call.batch}), not {layout.in_features}"
    if layout.q * layout.out_features % 8:
        return f"takes multiples of 8 values per window, not {layout.q} x {layout.out_features}"
    return _ew_many_tokens(call)


def _block_fma(call: Call) -> str | None:
    if reason := _one_mask_word(call) or _columns(call, 32):
        return reason
    if call.tokens % 4:
        return f"takes tokens in multiples of 4, not {call.tokens}"
    return _dtypes(call, frozenset({("float32", "float32")}), ("float32",))


def _kept_rows(call: Call) -> str | None:
    """What both kernels ask that take kept rows one by one, with many tokens."""
    if call.dtypes[0] == "float32" and call.float32 == "highest":
        return "computes with TF32, not with the float32 that was asked for"
    if reason := _one_mask_word(call) or _columns(call, 64):
        return reason
    multiple = 16 // jnp.dtype(call.x_dtype).itemsize
    if call.tokens % multiple:
        return f"takes tokens in multiples of {multiple}, not {call.tokens}"
    results = (*_FLOATS, "int32") if call.dtypes[0] == "int8" else _FLOATS
    return _dtypes(call, _SAME | _INT8_BY_INT8, results)


def _block_wgmma_rs(call: Call) -> str | None:
    return _kept_rows(call) or _dtypes(call, _INT8_BY_INT8 | {("float32", "float32")})


def _block_t_wgmma(call: Call) -> str | None:
    bk = call.layout.bk
    reason = f"takes blocks of 1 row or a multiple of 64, not {bk}" if bk != 1 and bk % 64 else None
    return _one_mask_word(call) or reason or _columns(call, 64) or _feature_major_halves(call)


def _ew_t_wgmma(call: Call) -> str | None:
    if call.layout.out_features % 8:
        return f"takes out_features in multiples of 8, not {call.layout.out_features}"
    return _ew_many_tokens(call)


def _block_sddmm_wgmma(call: Call) -> str | None:
    return _one_mask_word(call) or _columns(call, 64) or _feature_major_halves(call)


def _few_t(call: Call) -> str | None:
    return _dtypes(call, _SAME | _WEIGHT_ONLY) or _tile(call, 1, 64)


def _block_t_mma(call: Call) -> str | None:
    layout = call.layout
    if layout.bk != 1 or layout.window_units != 32 or layout.q > 16:
        return f"takes vector-wise patterns with up to 16 kept of 32, not {layout.pattern}"
    return _dtypes(call, _SAME_HALVES) or _tile(call, 64, 512)


KERNELS: tuple[Kernel, ...] = (
    Kernel("simd", "cpu", _OPS, "C++ SIMD kernels on XLA's thread pool", _simd),
    Kernel("ew_spmv", "cuda", ("spmm",), "element-wise, one to four tokens: memory-bound, on CUDA cores", _ew_spmv),
    Kernel("ew_spmv_wave", "cuda", ("spmm",), "element-wise, one token of a large weight", _ew_spmv_wave),
    Kernel("ew_simt", "cuda", ("spmm",), "element-wise, several tokens, on CUDA cores per kept element", _ew_simt),
    Kernel("ew_sparse24", "cuda", ("spmm",), "2:4 on sparse tensor cores, few tokens", _ew_sparse24),
    Kernel("ew_few_tokens", "cuda", ("spmm",), "element-wise, expanded for tensor cores, few tokens", _ew_few_tokens),
    Kernel(
        "block_wgmma",
        "cuda",
        ("spmm",),
        "vector- and block-wise on Hopper's tensor cores, many tokens, feature-major",
        _block_wgmma,
        feature_major=True,
        capability="9.0",
    ),
    Kernel(
        "ew_wgmma_sparse24",
        "cuda",
        ("spmm",),
        "2:4 on Hopper's sparse tensor cores, many tokens, feature-major",
        _ew_wgmma_sparse24,
        feature_major=True,
        capability="9.0",
    ),
    Kernel(
        "ew_wgmma",
        "cuda",
        ("spmm",),
        "element-wise, expanded to operands of Hopper's tensor cores, many tokens, feature-major",
        _ew_wgmma,
        feature_major=True,
        capability="9.0",
    ),
    Kernel(
        "block_fma",
        "cuda",
        ("spmm",),
        "vector- and block-wise in full float32, many tokens, on CUDA cores, feature-major",
        _block_fma,
        feature_major=True,
    ),
    Kernel(
        "block_mma_many",
        "cuda",
        ("spmm",),
        "vector- and block-wise on tensor cores (TF32, int8, 16 bits), many tokens, feature-major",
        _kept_rows,
        feature_major=True,
    ),
    Kernel(
        "block_wgmma_rs",
        "cuda",
        ("spmm",),
        "vector- and block-wise on Hopper's tensor cores (TF32, int8), many tokens, feature-major",
        _block_wgmma_rs,
        feature_major=True,
        capability="9.0",
    ),
    Kernel("block_spmv", "cuda", ("spmm",), "one to four tokens: memory-bound, on CUDA cores", _block_spmv),
    Kernel("block_mma", "cuda", ("spmm",), "vector- and block-wise on tensor cores, few tokens", _block_mma),
    Kernel("block_simt", "cuda", ("spmm",), "few tokens of any block, on CUDA cores", _block_simt),
    Kernel(
        "block_t_wgmma",
        "cuda",
        ("spmm_t",),
        "transposed, vector- and block-wise on Hopper's tensor cores, many tokens, feature-major",
        _block_t_wgmma,
        feature_major=True,
        capability="9.0",
    ),
    Kernel(
        "ew_t_wgmma",
        "cuda",
        ("spmm_t",),
        "transposed, element-wise, expanded to registers of a dense product on Hopper's tensor cores, feature-major",
        _ew_t_wgmma,
        feature_major=True,
        capability="9.0",
    ),
    Kernel(
        "block_sddmm_wgmma",
        "cuda",
        ("sddmm",),
        "gradient by vector- and block-wise values on Hopper's tensor cores, many tokens, feature-major",
        _block_sddmm_wgmma,
        feature_major=True,
        capability="9.0",
    ),
    Kernel(
        "ew_sddmm_wgmma",
        "cuda",
        ("sddmm",),
        "gradient by element-wise values: a dense product on Hopper's tensor cores, its kept elements written",
        _ew_many_tokens,
        feature_major=True,
        capability="9.0",
    ),
    Kernel("block_t_mma", "cuda", ("spmm_t",), "transposed, vector-wise on tensor cores, few tokens", _block_t_mma),
    Kernel("few_t", "cuda", ("spmm_t",), "transposed, few tokens of any pattern, on CUDA cores", _few_t),
    Kernel(
        "expand",
        "cuda",
        ("spmm", "spmm_t"),
        "expands the weight to a dense one, which XLA multiplies, many tokens",
        _around_dense,
        by_xla=True,
    ),
    Kernel(
        "compress",
        "cuda",
        ("sddmm",),
        "keeps the units of XLA's dense gradient, many tokens",
        _around_dense,
        by_xla=True,
    ),
    Kernel("simple", "cuda", _OPS, "tiles of any pattern and size, float32 arithmetic on CUDA cores", _simple),
)
"""Every native kernel, the most specialised first."""
