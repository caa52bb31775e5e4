"""Other systems on the same operands: JAX's BCOO, and through PyTorch cuSPARSELt's 2:4 and cuBLAS' dense int8."""

from __future__ import annotations

import statistics
import time

import jax
import jax.numpy as jnp
from jax.experimental import sparse

import jax_nmsparse as nms
from benchmarks import timing
from benchmarks.shapes import Case


def measure(case: Case, inputs, w: nms.NMSparse) -> dict[str, float]:
    """{peer: us} for the peers that can run the case; spmm alone."""
    result: dict[str, float] = {}
    if case.op != "spmm":
        return result
    if case.tokens == 1 and case.shape == (4096, 4096) and case.dtype in ("float32", "bfloat16"):
        result["jax BCOO"] = round(_bcoo(inputs, sparse.BCOO.fromdense(w.todense())), 1)
    if jax.default_backend() != "gpu":
        return result
    try:
        import torch  # noqa: PLC0415  # pyright: ignore[reportMissingImports]  (an optional peer)
    except ImportError:
        return result
    if case.pattern == "2:4" and case.block == (1, 1) and case.dtype == "bfloat16":
        result["cuSPARSELt"] = _cusparselt(torch, inputs, w)
    if case.dtype == "int8 x int8" and case.tokens > 16:
        result["cuBLAS dense int8"] = _int8(torch, inputs, w)
    return result


def _bcoo(x: jax.Array, matrix: sparse.BCOO) -> float:
    """Call by call: it takes so long that the cost of a call does not matter."""
    product = jax.jit(lambda x, matrix: x @ matrix)
    jax.block_until_ready(product(x, matrix))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(product(x, matrix))
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times)


def _cusparselt(torch, x: jax.Array, w: nms.NMSparse) -> float:
    dense = torch.from_dlpack(w.todense()).T.contiguous()
    weights = [torch.sparse.to_sparse_semi_structured(dense.clone()) for _ in range(min(8, timing.copies(w.nbytes)))]
    # cuSPARSELt wants tokens in multiples of 8; a smaller batch is padded, as its users have to.
    padded = torch.from_dlpack(jnp.pad(x, ((0, -x.shape[0] % 8), (0, 0)))).T.contiguous()
    return _in_a_graph(torch, torch.mm, [(weight, padded) for weight in weights])


def _int8(torch, x: jax.Array, w: nms.NMSparse) -> float:
    # cuBLAS wants the weight column-major.
    integers = nms.NMSparse(w.values, w.mask, shape=w.shape, pattern=w.pattern)
    dense = torch.from_dlpack(integers.todense()).T.contiguous()
    tokens, sets = torch.from_dlpack(x), min(8, timing.copies(dense.numel()))
    return _in_a_graph(torch, torch._int_mm, [(tokens, dense.clone().T) for _ in range(sets)])


def _in_a_graph(torch, product, operands: list[tuple]) -> float:
    """Microseconds of a product, with each of several operands in turn, captured into a CUDA graph."""
    for pair in operands:
        product(*pair)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    calls = 4 * len(operands)
    with torch.cuda.graph(graph):
        for i in range(calls):
            product(*operands[i % len(operands)])
    times = []
    for _ in range(9):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end) / calls)
    return round(statistics.median(times), 2)
