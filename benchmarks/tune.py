"""Measures every kernel beside dense and plain JAX, and writes the table that dispatch reads:
``python -m benchmarks.tune --implementation cuda [--match REGEX] [--seconds N]``.

Points that were measured before stay where they are not measured again, so a new kernel is tuned on its cases alone.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import re
import sys
import time

import jax
import jax.numpy as jnp

import jax_nmsparse as nms
from benchmarks import timing
from benchmarks.run import activation_dtype, dense_weights, functions, revision, sparse_weights
from benchmarks.shapes import BW64, EW, VW64, VW128, Case
from jax_nmsparse import dispatch

TABLE = pathlib.Path(dispatch.__file__).with_name("dispatch_table.json")


def cases() -> list[Case]:
    """Points of the table, those of most calls first."""
    few = [(4096, 4096), (4096, 14336), (14336, 4096), (8192, 28672)]
    many = [(4096, 4096), (8192, 8192)]
    ew, vw = ("2:4", "16:32", "8:32", "3:32"), ("16:32", "8:32", "4:32")
    result = [Case("spmm", p, EW, "bfloat16", t, s) for t in (1, 8, 16, 32, 64) for p in ew for s in few]
    result += [
        Case("spmm", p, b, "bfloat16", t, s) for t in (1, 16, 64, 128) for b in (VW128,) for p in vw for s in few
    ]
    result += [Case("spmm", p, EW, "bfloat16", t, s) for t in (256, 4096) for p in ew[:3] for s in many]
    result += [
        Case("spmm", p, b, "bfloat16", t, s)
        for t in (256, 1024, 4096)
        for b in (VW128, VW64, BW64)
        for p in vw
        for s in many
    ]
    result += [
        Case("spmm", p, EW, "float32", t, s, precision)
        for precision in ("highest", None)
        for t in (1, 64)
        for p in ("16:32", "3:32")
        for s in few[:2]
    ]
    result += [
        Case(op, p, b, "bfloat16", t, (4096, 4096))
        for op in ("spmm_t", "sddmm")
        for t in (1, 64, 4096)
        for b in (EW, VW128)
        for p in ("16:32", "8:32")
    ]
    result += [Case("spmm", p, VW64, "bfloat16", t, s) for t in (1, 16, 64) for p in vw for s in few[:2]]
    result += [Case("spmm", "16:32", EW, d, t, s) for d in ("int8", "float8_e4m3fn") for t in (1, 16) for s in few[:2]]
    return result


def point(case: Case, implementation: str) -> dict:
    """The times of everything that can run a case."""
    pattern = nms.NMPattern.parse(f"{case.pattern}/{case.block[0]}x{case.block[1]}")
    inputs, sparse, dense = functions(case)
    weights = sparse_weights(case)
    call_dtype = inputs[1].dtype if case.op == "sddmm" else weights[0].dtype

    def timed(function, weights) -> float:
        return round(timing.measure(function, inputs, weights, repeats=3, target_us=800).time_us, 2)

    times: dict[str, float] = {}
    for kernel in dispatch.KERNELS:
        if kernel.implementation != implementation or case.op not in kernel.ops:
            continue
        with dispatch.only_kernel(kernel.name):
            x = inputs[0] if case.op == "sddmm" else inputs
            if nms.explain(x, weights[0], op=case.op, precision=case.precision).choice.kernel is kernel:
                # A function of its own: one that was jitted before would keep its kernel.
                times[kernel.name] = timed(lambda *operands: sparse(*operands), weights)
    if case.op != "spmm":
        times["xla"] = timed(lambda *operands: functions(case, implementation="xla")[1](*operands), weights)
    del weights
    times["dense"] = timed(dense, dense_weights(case, activation_dtype(case)))
    return {
        "op": case.op,
        "pattern": str(pattern),
        "dtype": jnp.dtype(call_dtype).name,
        "exact": case.precision == "highest",
        "tokens": case.tokens,
        "in_features": case.shape[0],
        "out_features": case.shape[1],
        "times_us": times,
    }


def _identity(p: dict) -> tuple:
    return tuple(v for k, v in sorted(p.items()) if k != "times_us")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune", description=__doc__)
    parser.add_argument("--implementation", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--match", default="", help="only cases whose description matches this regular expression")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after this time; what was measured is kept")
    parser.add_argument("--out", type=pathlib.Path, default=TABLE)
    options = parser.parse_args(arguments)
    table = json.loads(TABLE.read_text())
    old = {_identity(p): p for p in table.get(options.implementation, {"points": []})["points"]}
    selected = [c for c in cases() if re.search(options.match, str(c))]
    start = time.monotonic()
    for i, case in enumerate(selected, 1):
        if time.monotonic() - start > options.seconds:
            print(f"stopped after {i - 1} of {len(selected)} points")
            break
        new = point(case, options.implementation)
        old[_identity(new)] = new
        print(f"{i}/{len(selected)} {case}: {new['times_us']}", flush=True)
        table[options.implementation] = {
            "device": jax.devices()[0].device_kind,
            "revision": revision(),
            "date": str(datetime.date.today()),
            "points": list(old.values()),
        }
        options.out.write_text(_dump(table))
    return 0


def _dump(table: dict) -> str:
    """One line for every point."""
    text = json.dumps(table, indent=1)
    return re.sub(r"\{\n\s+\"op\".*?\}\n\s+\}", lambda m: re.sub(r"\n\s+", " ", m[0]), text, flags=re.DOTALL) + "\n"


if __name__ == "__main__":
    sys.exit(main())
