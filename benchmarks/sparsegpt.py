"""How long pruning one matrix takes: ``python -m benchmarks.sparsegpt [--size 8192] [--out FILE]``.

Weights and inputs are random and correlated; the Gram matrix is gathered outside the timing. Every method and pattern
is called twice on the same shapes: the first time compiles. Prints a line for each and writes them as JSON.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import time

import jax
import jax.numpy as jnp

import jax_nmsparse as nms
from benchmarks.run import metadata, revision

METHODS = ("magnitude", "wanda", "sparsegpt")
PATTERNS = "2:4,16:32,8:32/1x128"


def problem(size: int) -> tuple[jax.Array, nms.pruning.Statistics]:
    """A bfloat16 weight ``[size, size]`` and statistics of 2 * size tokens whose features are correlated."""
    weight, mixing, tokens = jax.random.split(jax.random.key(0), 3)
    w = jax.random.normal(weight, (size, size), jnp.bfloat16)
    mixed = jnp.eye(size, dtype=jnp.bfloat16) + jax.random.normal(mixing, (size, size), jnp.bfloat16) / size**0.5
    x = jax.random.normal(tokens, (2 * size, size), jnp.bfloat16) @ mixed
    return w, nms.pruning.Statistics.from_inputs(x)


def relative_error(w: jax.Array, pruned: jax.Array, inputs: nms.pruning.Statistics) -> float:
    """``||x (W - W')||^2 / ||x W||^2``, from ``x^T x``."""

    def squared(w: jax.Array) -> jax.Array:
        return jnp.sum(w * jnp.matmul(jnp.asarray(inputs.gram), w, precision="highest"))

    w, pruned = w.astype(jnp.float32), pruned.astype(jnp.float32)
    return float(squared(w - pruned) / squared(w))


def measure(method: str, pattern: str, w: jax.Array, inputs: nms.pruning.Statistics) -> dict:
    def seconds() -> float:
        start = time.perf_counter()
        jax.block_until_ready(nms.prune(w, pattern, method=method, inputs=given))
        return time.perf_counter() - start

    given = None if method == "magnitude" else inputs
    with_compile, after_compile = seconds(), seconds()
    return {
        "method": method,
        "size": w.shape[0],
        "pattern": pattern,
        "dtype": w.dtype.name,
        "seconds": after_compile,
        "seconds_with_compile": with_compile,
        "relative_error": relative_error(w, nms.prune(w, pattern, method=method, inputs=given).todense(), inputs),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sparsegpt", description=__doc__)
    parser.add_argument("--size", type=int, default=8192, help="in_features and out_features")
    parser.add_argument("--patterns", default=PATTERNS, help="separated by commas")
    parser.add_argument("--methods", default=",".join(METHODS), help="separated by commas")
    parser.add_argument("--revision", default=revision())
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args(arguments)
    w, inputs = jax.block_until_ready(problem(options.size))
    result = {
        "meta": {**metadata("sparsegpt", options.revision), "timing": "one call, host clock", "seed": 0},
        "rows": [],
    }
    for pattern in options.patterns.split(","):
        for method in options.methods.split(","):
            row = measure(method, pattern, w, inputs)
            result["rows"].append(row)
            print(
                f"{row['method']:10s} {row['size']}x{row['size']} {row['pattern']:12s} {row['seconds']:8.2f} s "
                f"({row['seconds_with_compile']:.2f} s with compilation), relative error {row['relative_error']:.4f}",
                flush=True,
            )
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
