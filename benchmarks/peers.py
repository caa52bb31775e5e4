"""Other systems on the same operands: JAX's BCOO, and cuSPARSELt's 2:4 through PyTorch."""

from __future__ import annotations

import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import sparse

import jax_nmsparse as nms
from benchmarks import timing
from benchmarks.shapes import Case


def measure(case: Case, inputs, w: nms.NMSparse) -> dict[str, float]:
    """{peer: us} for the peers that can run the case; spmm alone."""
    result: dict[str, float] = {}
    if case.op != "spmm" or case.dtype in ("int8", "float8_e4m3fn"):
        return result
    if case.tokens == 1 and case.shape == (4096, 4096):
        result["jax BCOO"] = round(_bcoo(inputs, sparse.BCOO.fromdense(w.todense())), 1)
    time = _cusparselt(case, inputs, w)
    if time is not None:
        result["cuSPARSELt"] = time
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


def _cusparselt(case: Case, x: jax.Array, w: nms.NMSparse) -> float | None:
    if case.pattern != "2:4" or case.dtype != "bfloat16" or jax.default_backend() != "gpu":
        return None
    try:
        import torch  # noqa: PLC0415  # pyright: ignore[reportMissingImports]  (an optional peer)
    except ImportError:
        return None

    def tensor(array):
        return torch.from_numpy(np.array(array.astype(jnp.float32))).cuda().to(torch.bfloat16)

    sets = min(8, timing.copies(w.nbytes))
    dense = tensor(w.todense()).T.contiguous()
    weights = [torch.sparse.to_sparse_semi_structured(dense.clone()) for _ in range(sets)]
    # cuSPARSELt wants tokens in multiples of 8; a smaller batch is padded, as its users have to.
    padded = tensor(jnp.pad(x, ((0, -x.shape[0] % 8), (0, 0)))).T.contiguous()
    for weight in weights:
        torch.mm(weight, padded)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(4 * sets):
            torch.mm(weights[i % sets], padded)
    times = []
    for _ in range(9):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end) / (4 * sets))
    return round(statistics.median(times), 2)
