"""Runs a benchmark suite and writes one JSON file: ``python -m benchmarks.run --suite decode [--out FILE]``.

Every row is checked against a float32 product at highest precision before it is timed, and stands beside the dense
product of the same dtype and precision and the floor (bytes or FLOPs over the device's measured ceilings), all from
the same run.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import time
import zlib

import jax
import jax.numpy as jnp
import numpy as np

import jax_nmsparse as nms
from benchmarks import peers as peers_lib
from benchmarks import timing
from benchmarks.shapes import SUITES, Case, suite
from jax_nmsparse import dispatch, tuning

_QUANTISED = ("int8", "float8_e4m3fn")
TABLE = pathlib.Path(tuning.__file__).with_name("dispatch_table.json")
RESULTS = pathlib.Path(__file__).parent / "results"


def _key(case: Case) -> jax.Array:
    return jax.random.key(zlib.crc32(repr(case).encode()))


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _weight(key: jax.Array, shape: tuple[int, int], pattern: nms.NMPattern, dtype: str) -> nms.NMSparse:
    """A random weight; quantised dtypes are int8 or float8 values beside bfloat16 activations."""
    dense = jax.random.normal(key, shape, jnp.float32) / np.sqrt(shape[0])
    w = nms.prune(dense, pattern)
    return nms.quantize(w, dtype) if dtype in _QUANTISED else w.astype(dtype)


def activation_dtype(case: Case):
    """dtype of x and of the dense weight."""
    return jnp.dtype(jnp.bfloat16 if case.dtype in _QUANTISED else case.dtype)


def sparse_weights(case: Case) -> list[nms.NMSparse]:
    """Random weights to rotate over."""
    n, m = map(int, case.pattern.split(":"))
    pattern = nms.NMPattern(n, m, case.block)
    keys = jax.random.split(_key(case), 64)
    first = _weight(keys[0], case.shape, pattern, case.dtype)
    return [first] + [_weight(k, case.shape, pattern, case.dtype) for k in keys[1 : timing.copies(first.nbytes)]]


def dense_weights(case: Case, dtype) -> list[jax.Array]:
    """Random dense weights to rotate over."""
    keys = jax.random.split(_key(case), 64)
    count = timing.copies(case.shape[0] * case.shape[1] * jnp.dtype(dtype).itemsize)
    return [jax.random.normal(k, case.shape, dtype) / np.sqrt(case.shape[0]).astype(dtype) for k in keys[:count]]


def functions(case: Case, implementation: str | None = None):
    """(inputs, sparse call, dense call) of a case; a dense weight is an array."""
    k, n = case.shape
    dtype, precision = activation_dtype(case), case.precision
    kx, kg = jax.random.split(_key(case))
    x = jax.random.normal(kx, (case.tokens, k), jnp.float32).astype(dtype)
    g = jax.random.normal(kg, (case.tokens, n), jnp.float32).astype(dtype)

    def spmm(x, w):
        return nms.spmm(x, w, transpose=case.op == "spmm_t", precision=precision, implementation=implementation)

    def sddmm(xg, w):
        return nms.sddmm(xg[0], xg[1], w, precision=precision, implementation=implementation)

    if case.op == "sddmm":
        return (x, g), sddmm, lambda xg, w: jnp.dot(xg[0].T, xg[1], precision=precision)
    if case.op == "spmm_t":
        return g, spmm, lambda g, w: jnp.dot(g, w.T, precision=precision)
    return x, spmm, lambda x, w: jnp.dot(x, w, precision=precision)


def _relative_error(case: Case, inputs, call, w: nms.NMSparse) -> float:
    """||y - reference|| / ||reference|| on at most 64 tokens (all of them for sddmm)."""
    inputs = inputs if case.op == "sddmm" else inputs[:64]
    got = jax.jit(call)(inputs, w)
    exact = functools.partial(jnp.dot, precision="highest")
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), inputs)
    if case.op == "sddmm":
        want = jnp.where(w.keep(), exact(wide[0].T, wide[1]), 0)
        got = w.with_values(got).todense()
    else:
        dense = w.todense().astype(jnp.float32)
        want = exact(wide, dense if case.op == "spmm" else dense.T)
    got = got.astype(jnp.float32)
    error = float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
    if not error < 2e-2:
        raise AssertionError(f"{case}: relative error {error}")
    return error


@dataclasses.dataclass(frozen=True)
class Measured:
    """One way to compute a case."""

    time_us: float
    spread: float
    error: float


def kernel_times(case: Case, inputs, sparse, weights) -> dict[str, Measured]:
    """Every kernel that takes the case, and plain JAX for gradients; each is checked before it is timed."""
    x = inputs[0] if case.op == "sddmm" else inputs
    result: dict[str, Measured] = {}

    def add(name: str, call) -> None:
        error = _relative_error(case, inputs, call, weights[0])
        timed = timing.measure(call, inputs, weights)
        result[name] = Measured(round(timed.time_us, 3), round(timed.spread, 4), float(f"{error:.3g}"))

    for kernel in dispatch.KERNELS:
        if kernel.implementation != _implementation() or case.op not in kernel.ops:
            continue
        with dispatch.only_kernel(kernel.name):
            if nms.explain(x, weights[0], op=case.op, precision=case.precision).choice.kernel is kernel:
                # A function of its own: one that was jitted before keeps its kernel.
                add(kernel.name, lambda *operands: sparse(*operands))
    if case.op != "spmm":
        add("xla", functions(case, implementation="xla")[1])
    return result


def _implementation() -> str:
    return "cuda" if jax.default_backend() == "gpu" else jax.default_backend()


def run_case(case: Case, peers: bool, record: bool) -> dict:
    """One row: every kernel and the dense product; the row's time is that of what the automatic choice takes."""
    inputs, sparse, dense = functions(case)
    weights = sparse_weights(case)
    first = weights[0]
    measured = kernel_times(case, inputs, sparse, weights)
    del weights
    timed = timing.measure(dense, inputs, dense_weights(case, activation_dtype(case)))
    measured["dense"] = Measured(round(timed.time_us, 3), round(timed.spread, 4), 0.0)
    x = inputs[0] if case.op == "sddmm" else inputs
    if record:
        _record(case, first, {name: m.time_us for name, m in measured.items()})
    explanation = nms.explain(x, first, op=case.op, precision=case.precision)
    name = explanation.choice.name
    return {
        "op": case.op,
        "pattern": case.pattern,
        "block": "x".join(map(str, case.block)),
        "dtype": case.dtype,
        "precision": case.precision or "default",
        "tokens": case.tokens,
        "in_features": case.shape[0],
        "out_features": case.shape[1],
        "implementation": explanation.choice.implementation,
        "kernel": name,
        "time_us": measured[name].time_us,
        "spread": measured[name].spread,
        "dense_us": measured["dense"].time_us,
        "dense_spread": measured["dense"].spread,
        "floor_us": None if explanation.floor_us is None else round(explanation.floor_us, 3),
        "rel_err": measured[name].error,
        "kernels": {k: m.time_us for k, m in measured.items() if k != "dense"},
        "peers": peers_lib.measure(case, inputs, first) if peers else {},
    }


def _record(case: Case, w: nms.NMSparse, times: dict[str, float]) -> None:
    """Puts the times of a case into the table that dispatch reads, in place of older ones of the same case."""
    point = {
        "op": case.op,
        "pattern": str(w.pattern),
        "dtype": jnp.dtype(case.dtype if case.op != "sddmm" else activation_dtype(case)).name,
        "exact": case.precision == "highest",
        "tokens": case.tokens,
        "in_features": case.shape[0],
        "out_features": case.shape[1],
        "times_us": times,
    }

    def identity(p: dict) -> tuple:
        return tuple(v for k, v in sorted(p.items()) if k != "times_us")

    table = json.loads(TABLE.read_text())
    points = {identity(p): p for p in table.get(_implementation(), {"points": []})["points"]}
    points[identity(point)] = point
    table[_implementation()] = {
        "device": jax.devices()[0].device_kind,
        "date": str(datetime.date.today()),
        "points": list(points.values()),
    }
    # One line for every point.
    text = json.dumps(table, indent=1)
    text = re.sub(r'\{\n\s+"op".*?\}\n\s+\}', lambda m: re.sub(r"\n\s+", " ", m[0]), text, flags=re.DOTALL)
    TABLE.write_text(text + "\n")
    tuning.table.cache_clear()
    tuning.nearest.cache_clear()


def device_name() -> str:
    """The folder of recorded results: "nvidia-h200", "cpu-amd-epyc"."""
    device = jax.devices()[0]
    name = device.device_kind
    if device.platform == "cpu":
        text = pathlib.Path("/proc/cpuinfo").read_text() if pathlib.Path("/proc/cpuinfo").exists() else ""
        found = re.search(r"model name\s*:\s*(.*)", text)
        name = "cpu " + (found.group(1) if found else platform.processor() or platform.machine())
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def revision() -> str:
    """The short git hash of the sources."""
    return _output(["git", "rev-parse", "--short", "HEAD"]) or "unknown"


def metadata(suite_name: str, sources: str) -> dict:
    """What the numbers depend on."""
    query = "driver_version,clocks.sm,clocks.max.sm,clocks.mem"
    smi = _output(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]).splitlines()
    return {
        "suite": suite_name,
        "revision": sources,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": jax.devices()[0].device_kind,
        "driver_and_clocks": dict(zip(query.split(","), smi[0].split(", "), strict=True)) if smi else {},
        "cuda": _output(["nvcc", "--version"]).split("release ")[-1].split(",")[0] if smi else "",
        "cpu_count": len(os.sched_getaffinity(0)),
        "versions": {p: importlib.metadata.version(p) for p in ("jax", "jaxlib", "numpy", "flax")},
        "seed": "crc32 of the case",
        "timing": "inside one jit, rotating weights of more than 240 MB, median of 9, difference of two lengths",
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run", description="Runs a benchmark suite and writes one JSON file."
    )
    parser.add_argument("--suite", choices=SUITES, required=True)
    parser.add_argument(
        "--out", type=pathlib.Path, help="JSON file (default: results/<device>/<date>-<sha>-<suite>.json)"
    )
    parser.add_argument("--match", default="", help="only cases whose description matches this regular expression")
    parser.add_argument("--tune", action="store_true", help="write the times into jax_nmsparse/dispatch_table.json")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after this time; what was measured is kept")
    parser.add_argument("--peers", action="store_true", help="also jax BCOO, and cuSPARSELt where PyTorch is installed")
    parser.add_argument("--revision", default=revision())
    options = parser.parse_args(arguments)
    cases = [c for c in suite(options.suite) if re.search(options.match, str(c))]
    result = {"meta": metadata(options.suite, options.revision), "rows": []}
    out = options.out or RESULTS / device_name() / (f"{datetime.date.today()}-{options.revision}-{options.suite}.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    for i, case in enumerate(cases, 1):
        if time.monotonic() - start > options.seconds:
            print(f"stopped after {i - 1} of {len(cases)} cases")
            break
        row = run_case(case, options.peers, options.tune)
        result["rows"].append(row)
        print(
            f"{i}/{len(cases)} {row['op']:<6} {row['pattern']:>5} {row['block']:>5} {row['dtype']} t={row['tokens']} "
            f"{row['in_features']}x{row['out_features']} {row['kernel']}: {row['time_us']:.1f} us, dense "
            f"{row['dense_us']:.1f} ({row['dense_us'] / row['time_us']:.2f}x), floor {row['floor_us']}",
            flush=True,
        )
        # Written after every row, so that a run that is stopped keeps what it measured.
        out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
