"""Runs a benchmark suite and writes one JSON file: ``python -m benchmarks.run --suite decode [--out FILE]``.

Every row is checked against a float32 product at highest precision before it is timed, and stands beside the dense
product of the same dtype and precision and the floor (bytes or FLOPs over the device's measured ceilings), all from
the same run. The time of a feature-major kernel is that of a call whose neighbours are feature-major too, as inside a
model; `isolated_us` is that of a call with row-major activations, transposes included.
"""

from __future__ import annotations

import argparse
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
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import numpy as np

import jax_nmsparse as nms
from benchmarks import peers as peers_lib
from benchmarks import timing
from benchmarks.shapes import SUITES, Case, suite
from jax_nmsparse import dispatch, tuning
from jax_nmsparse.kernels import KERNELS, Call, Kernel
from jax_nmsparse.layout import Layout

_QUANTISED = ("int8", "float8_e4m3fn")
_INTEGERS = "int8 x int8"
_PRECISION = {"tf32x3": jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3}
_GROUP = 12
"""Cases that are compiled together, on threads. XLA tries out kernels meanwhile, so nothing is timed then."""

TABLE = pathlib.Path(tuning.__file__).with_name("dispatch_table.json")
RESULTS = pathlib.Path(__file__).parent / "results"


def activation_dtype(case: Case):
    """dtype of x and of the dense weight; quantised weights alone stand beside bfloat16 activations."""
    if case.dtype == _INTEGERS:
        return jnp.dtype(jnp.int8)
    return jnp.dtype(jnp.bfloat16 if case.dtype in _QUANTISED else case.dtype)


def _values_dtype(case: Case) -> str:
    return "int8" if case.dtype == _INTEGERS else case.dtype


def _normal(key: jax.Array, shape: tuple[int, ...], dtype, scale: float = 1.0) -> jax.Array:
    """Normal numbers; for int8 of standard deviation 30, rounded."""
    if dtype == jnp.int8:
        return jnp.round(30 * jax.random.normal(key, shape, jnp.float32)).astype(jnp.int8)
    return jax.random.normal(key, shape, dtype) * np.float32(scale).astype(dtype)


def _pattern(case: Case) -> nms.NMPattern:
    n, m = map(int, case.pattern.split(":"))
    return nms.NMPattern(n, m, case.block)


@functools.cache
def _masks(pattern: nms.NMPattern) -> np.ndarray:
    """Random windows of a pattern, as mask words, to draw from."""
    rng = np.random.default_rng(0)
    groups = rng.random((4096, pattern.window_units // pattern.m, pattern.m))
    kept = np.argsort(np.argsort(groups, axis=-1), axis=-1) < pattern.n
    bits = kept.reshape(4096, -1).astype(np.uint64)
    return (bits << np.arange(bits.shape[1], dtype=np.uint64)).sum(1).astype(np.uint32)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def random_weight(key: jax.Array, shape: tuple[int, int], pattern: nms.NMPattern, dtype: str) -> nms.NMSparse:
    layout = Layout(pattern, *shape)
    masks, values, scales = jax.random.split(key, 3)
    words = jnp.asarray(_masks(pattern))
    mask = words[jax.random.randint(masks, layout.mask_shape[:-1], 0, words.size)]
    drawn = jax.random.normal(values, layout.values_shape, jnp.bfloat16 if dtype in _QUANTISED else dtype)
    if dtype not in _QUANTISED:
        return nms.NMSparse(
            drawn / np.float32(np.sqrt(shape[0])).astype(drawn.dtype), mask, shape=shape, pattern=pattern
        )
    drawn = (jnp.round(drawn * 30) if dtype == "int8" else drawn).astype(dtype)
    scale = jax.random.uniform(scales, (shape[1],), jnp.float32, 0.001, 0.01)
    return nms.NMSparse(drawn, mask, shape=shape, pattern=pattern, scales=scale)


def functions(case: Case, implementation: str | None = None):
    """(inputs, sparse call, dense call) of a case; a dense weight is an array."""
    k, n = case.shape
    dtype, precision = activation_dtype(case), _PRECISION.get(case.precision, case.precision)
    kx, kg = jax.random.split(_key(case))
    x, g = _normal(kx, (case.tokens, k), dtype), _normal(kg, (case.tokens, n), dtype)
    # Integers are added up as such; elsewhere the result has the operands' dtype.
    dot = functools.partial(
        jnp.dot, precision=precision, preferred_element_type=jnp.int32 if dtype == jnp.int8 else None
    )

    def spmm(x, w):
        return nms.spmm(x, w, transpose=case.op == "spmm_t", precision=precision, implementation=implementation)

    def sddmm(xg, w):
        return nms.sddmm(xg[0], xg[1], w, precision=precision, implementation=implementation)

    if case.op == "sddmm":
        return (x, g), sddmm, lambda xg, w: dot(xg[0].T, xg[1])
    if case.op == "spmm_t":
        return g, spmm, lambda g, w: dot(g, w.T)
    return x, spmm, dot


def _key(case: Case) -> jax.Array:
    return jax.random.key(zlib.crc32(repr(case).encode()))


def _error(case: Case, call):
    """||y - reference|| / ||reference|| on at most 64 tokens (all of them for sddmm), as a function to compile."""

    def error(inputs, w):
        inputs = inputs if case.op == "sddmm" else inputs[:64]
        got = call(inputs, w)
        exact = functools.partial(jnp.dot, precision="highest")
        wide = jax.tree.map(lambda a: a.astype(jnp.float32), inputs)
        if case.op == "sddmm":
            want = jnp.where(w.keep(), exact(wide[0].T, wide[1]), 0)
            got = w.with_values(got).todense()
        else:
            dense = w.todense().astype(jnp.float32)
            want = exact(wide, dense if case.op == "spmm" else dense.T)
        return jnp.linalg.norm(got.astype(jnp.float32) - want) / jnp.linalg.norm(want)

    return error


def _implementation() -> str:
    return "cuda" if jax.default_backend() == "gpu" else jax.default_backend()


class Run:
    """One case: everything that can compute it is compiled at once, then timed by `row`."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.inputs, sparse, dense = functions(case)
        key = _key(case)
        self.first = random_weight(key, case.shape, _pattern(case), _values_dtype(case))
        # On a device without recorded ceilings, a guess for a processor.
        flops = 2 * case.tokens * case.shape[0] * case.shape[1]
        self._estimate_us = self.explain().dense_floor_us or max(flops / 1e5, self.first.nbytes / 2e4)
        self.dense = self._stopwatch(dense, _normal(key, case.shape, activation_dtype(case), case.shape[0] ** -0.5))
        self.ways: dict[str, timing.Stopwatch] = {}
        self._errors: dict[str, Future] = {}
        for kernel in self._kernels():
            with dispatch.only_kernel(kernel.name):
                # A function of its own: one that was traced before keeps its kernel.
                self._add(kernel.name, lambda *operands: sparse(*operands), kernel.feature_major)
        by_xla = dispatch.BY_XLA & self.ways.keys()
        if case.op != "spmm" and not by_xla:
            self._add("xla", functions(case, implementation="xla")[1])
        choice = self.explain().choice
        self.isolated = None
        if choice.kernel is not None and choice.kernel.feature_major:
            self.isolated = self._stopwatch(lambda *operands: sparse(*operands), self.first)

    def _kernels(self) -> list[Kernel]:
        """Those that take the case; "simple", which takes all, where there is no other."""
        found = []
        for kernel in KERNELS:
            if kernel.implementation == _implementation() and self.case.op in kernel.ops:
                with dispatch.only_kernel(kernel.name):
                    if self.explain().choice.kernel is kernel:
                        found.append(kernel)
        return [k for k in found if k.name != "simple"] or found

    def _stopwatch(self, call, weight, feature_major: bool = False) -> timing.Stopwatch:
        return timing.Stopwatch(call, self.inputs, weight, self._estimate_us, feature_major)

    def _add(self, name: str, call, feature_major: bool = False) -> None:
        self._errors[name] = timing.compile_later(_error(self.case, call), self.inputs, self.first)
        self.ways[name] = self._stopwatch(call, self.first, feature_major)

    def wait(self) -> None:
        """Until everything is compiled."""
        for stopwatch in (*self.ways.values(), self.dense, self.isolated):
            if stopwatch is not None:
                stopwatch.wait()
        for error in self._errors.values():
            error.result()

    def explain(self) -> nms.Explanation:
        x = self.inputs[0] if self.case.op == "sddmm" else self.inputs
        precision = _PRECISION.get(self.case.precision, self.case.precision)
        return nms.explain(x, self.first, op=self.case.op, precision=precision)

    def _check_floors(self, measured: dict[str, timing.Timing]) -> None:
        """A time well below what the hardware allows says that the program did something else."""
        explanation = self.explain()
        around_dense = {"dense", "xla", *dispatch.BY_XLA}
        for name, result in measured.items():
            floor = explanation.dense_floor_us if name in around_dense else explanation.floor_us
            if floor is not None and result.time_us < 0.8 * floor:
                raise AssertionError(f"{self.case}: {name} took {result.time_us} us, less than the floor of {floor} us")

    def row(self, peers: bool, record: bool) -> dict:
        """Checks and times every way; the row's time is that of what the automatic choice takes."""
        case = self.case
        errors = {name: float(error.result()(self.inputs, self.first)) for name, error in self._errors.items()}
        wrong = {name: error for name, error in errors.items() if not error < 2e-2}
        if wrong:
            raise AssertionError(f"{case}: relative errors {wrong}")
        before = self.explain().choice.name
        measured = {name: stopwatch.measure() for name, stopwatch in self.ways.items()}
        measured["dense"] = self.dense.measure()
        self._check_floors(measured)
        if record:
            _record(self.explain().call, {name: m.time_us for name, m in measured.items()})
        explanation = self.explain()
        name = explanation.choice.name
        isolated = self.isolated.measure() if self.isolated is not None and name == before else None
        return {
            "op": case.op,
            "pattern": case.pattern,
            "block": "x".join(map(str, case.block)),
            "dtype": case.dtype,
            "precision": case.precision,
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
            "rel_err": float(f"{errors.get(name, 0.0):.3g}"),
            **({} if isolated is None else {"isolated_us": isolated.time_us}),
            "kernels": {k: m.time_us for k, m in measured.items() if k != "dense"},
            "peers": peers_lib.measure(case, self.inputs, self.first) if peers else {},
        }


def _record(call: Call, times: dict[str, float]) -> None:
    """Puts the times of a call into the table that dispatch reads, in place of older ones of the same call."""
    dtype, precision = call.measured_as
    point = {
        "op": call.op,
        "pattern": str(call.layout.pattern),
        "dtype": dtype,
        "precision": precision,
        "tokens": call.tokens,
        "in_features": call.layout.in_features,
        "out_features": call.layout.out_features,
        "times_us": times,
    }

    def identity(p: dict) -> tuple:
        return tuple(v for k, v in sorted(p.items()) if k != "times_us")

    table = json.loads(TABLE.read_text())
    points = {identity(p): p for p in table.get(_implementation(), {"points": []})["points"]}
    points[identity(point)] = point
    table[_implementation()] = {
        **table.get(_implementation(), {}),
        "device": jax.devices()[0].device_kind,
        "date": str(datetime.date.today()),
        "points": list(points.values()),
    }
    # One line for every point.
    text = json.dumps(table, indent=1)
    text = re.sub(r'\{\n\s+"op".*?\}\n\s+\}', lambda m: re.sub(r"\n\s+", " ", m[0]), text, flags=re.DOTALL)
    TABLE.write_text(text + "\n")
    tuning.forget()


def device_name() -> str:
    """The folder of recorded results: "nvidia-h200", "cpu-intel-r-xeon-r-processor"."""
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
        "timing": "calls in one jitted program, each with its own weight, difference of two lengths, median of 31; "
        "where a kernel is feature-major so are its activations",
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
    failed = 0
    group: list[Run] = []
    for i, _ in enumerate(cases, 1):
        if time.monotonic() - start > options.seconds:
            print(f"stopped after {i - 1} of {len(cases)} cases")
            break
        if not group:
            group = [Run(c) for c in cases[i - 1 : i - 1 + _GROUP]]
            for run in group:
                run.wait()
        try:
            row = group.pop(0).row(options.peers, options.tune)
        except AssertionError as error:
            failed += 1
            print(f"{i}/{len(cases)} FAILED: {error}", flush=True)
            continue
        result["rows"].append(row)
        print(
            f"{i}/{len(cases)} {row['op']:<6} {row['pattern']:>5} {row['block']:>5} {row['dtype']} t={row['tokens']} "
            f"{row['in_features']}x{row['out_features']} {row['kernel']}: {row['time_us']:.1f} us, dense "
            f"{row['dense_us']:.1f} ({row['dense_us'] / row['time_us']:.2f}x), floor {row['floor_us']}",
            flush=True,
        )
        # Written after every row, so that a run that is stopped keeps what it measured.
        out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {out}" if result["rows"] else "nothing was measured")
    return 1 if failed or not result["rows"] else 0


if __name__ == "__main__":
    sys.exit(main())
