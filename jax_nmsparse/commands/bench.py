"""``bench``: products of given shapes on this machine, sparse beside dense and the floor."""

from __future__ import annotations

import argparse
import re
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_nmsparse.array import NMSparse
from jax_nmsparse.explanation import DEVICES, Ceilings, explain
from jax_nmsparse.ops import spmm
from jax_nmsparse.pattern import NMPattern
from jax_nmsparse.pruning import prune
from jax_nmsparse.tables import Table, show, track

HELP = "products of given shapes on this machine: sparse beside dense and the floor"

_DTYPES = ("float32", "bfloat16", "float16")
_SHORT, _LONG, _REPEATS = 4, 20, 5
_CACHE_BYTES = 240_000_000
_BANDWIDTH_BYTES, _CPU_WIDTH, _GPU_WIDTH = 256_000_000, 1024, 8192
_EPILOG = """\
Times are those of one product inside one jitted program, on weights that rotate over more than the last-level
cache: the difference of a long and a short program, the median of 5 and half their interquartile range. The floor is
the larger of bytes over memory bandwidth and kept FLOPs over the arithmetic rate; both are measured first on a device
whose ceilings are not known.
Before anything is timed, the result is compared with the dense product; a difference beyond rounding is an error.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog, parser.formatter_class = _EPILOG, argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--shape", action="append", type=_shape, help="in_features x out_features, 4096x14336 (default: 4096x4096)"
    )
    parser.add_argument("--tokens", action="append", type=_positive, help="rows of x (default: 1 and 16)")
    parser.add_argument("--pattern", action="append", type=_pattern, help="may be repeated (default: 2:4 and 8:32)")
    parser.add_argument("--dtype", choices=_DTYPES, default="float32", help="default: float32")
    parser.add_argument("--implementation", help="as in spmm; by default chosen")


def _shape(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no shape such as 4096x14336")
    return int(match[1]), int(match[2])


def _positive(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return int(text)


def _pattern(text: str) -> NMPattern:
    try:
        return NMPattern.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def run(arguments: argparse.Namespace) -> int:
    device, dtype = jax.devices()[0], jnp.dtype(arguments.dtype)
    ceilings = DEVICES.get(device.device_kind) or measured_ceilings(dtype)
    shapes, token_counts = arguments.shape or [(4096, 4096)], arguments.tokens or [1, 16]
    points = [
        (shape, pattern, tokens)
        for shape in shapes
        for pattern in arguments.pattern or [NMPattern(2, 4), NMPattern(8, 32)]
        for tokens in token_counts
    ]
    rows = []
    for (in_features, out_features), pattern, tokens in track(
        points, "bench", len(points), label=lambda point: f"{point[0][0]}x{point[0][1]} {point[1]} {point[2]} tokens"
    ):
        dense = jax.random.normal(jax.random.key(0), (in_features, out_features), dtype)
        x = jax.random.normal(jax.random.key(1), (tokens, in_features), dtype)
        w = prune(dense, pattern)
        product = lambda x, w: spmm(x, w, implementation=arguments.implementation)  # noqa: E731
        _compare(product, x, w)
        (sparse_us, sparse_spread), (dense_us, dense_spread) = time_us(product, x, w), time_us(jnp.dot, x, dense)
        why = explain(x, w, implementation=arguments.implementation)
        moved, rate = why.bytes, ceilings.flops.get(dtype.name, ceilings.flops["float32"])
        floor_us = 1e6 * max(moved / ceilings.bandwidth, why.kept_flops / rate)
        rows.append(
            [
                f"{in_features}x{out_features}",
                str(pattern),
                str(tokens),
                why.choice.name,
                f"{sparse_us:.1f} ±{100 * sparse_spread:.0f} %",
                f"{dense_us:.1f} ±{100 * dense_spread:.0f} %",
                f"{dense_us / sparse_us:.2f}",
                f"{floor_us:.1f}",
                f"{100 * floor_us / sparse_us:.0f} %",
            ]
        )
    columns = (
        "shape",
        "pattern",
        "#tokens",
        "runs",
        "#sparse us",
        "#dense us",
        "#dense / sparse",
        "#floor us",
        "#of the floor",
    )
    title = f"{device.device_kind}, {dtype.name}: {ceilings.bandwidth / 1e9:.0f} GB/s"
    show(Table(columns, rows, title))
    return 0


def _compare(product: Callable[..., jax.Array], x: jax.Array, w: NMSparse) -> None:
    got = np.asarray(product(x, w), np.float64)
    want = np.asarray(x, np.float64) @ np.asarray(w.todense(), np.float64)
    # float32 may be multiplied as TF32, whose rounding is that of float16.
    rounding = float(jnp.finfo(jnp.promote_types(w.dtype, jnp.bfloat16) if w.dtype != jnp.float32 else jnp.float16).eps)
    if not np.abs(got - want).max() <= 4 * rounding * np.abs(want).max():
        raise ValueError(f"bench: the product of {w!r} differs from the dense one by {np.abs(got - want).max()}")


def time_us(product: Callable[[Any, Any], Any], x: jax.Array, w: Any) -> tuple[float, float]:
    """Median time of one product inside one jitted program, on weights that are not in the cache, and its spread."""
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(w))
    weights = [jax.tree.map(jnp.copy, w) for _ in range(max(1, min(_LONG, -(-_CACHE_BYTES // nbytes))))]
    inputs = [jnp.roll(x, i, axis=-1) for i in range(_LONG)]

    def program(calls: int) -> Any:
        def chain(inputs, weights):
            return [product(inputs[i], weights[i % len(weights)]) for i in range(calls)]

        return jax.jit(chain, keep_unused=True).lower(inputs, weights).compile()

    def seconds(compiled: Any) -> float:
        start = time.perf_counter()
        jax.block_until_ready(compiled(inputs, weights))
        return time.perf_counter() - start

    short, long = program(_SHORT), program(_LONG)
    for compiled in (short, long):
        seconds(compiled)
    times = [1e6 * (seconds(long) - seconds(short)) / (_LONG - _SHORT) for _ in range(_REPEATS)]
    low, median, high = statistics.quantiles(times, n=4)
    median = max(median, 1e-3)
    return median, (high - low) / 2 / median


def measured_ceilings(dtype: Any) -> Ceilings:
    """Bandwidth of a sum over a large array and the rate of a large dense product on this device."""
    big = jnp.ones(_BANDWIDTH_BYTES // 4, jnp.float32)
    width = _CPU_WIDTH if jax.devices()[0].platform == "cpu" else _GPU_WIDTH
    square = jax.random.normal(jax.random.key(0), (width, width), dtype)

    def best(function: Callable[..., Any], *arguments: Any) -> float:
        compiled = jax.jit(function).lower(*arguments).compile()
        times = []
        for _ in range(_REPEATS):
            start = time.perf_counter()
            jax.block_until_ready(compiled(*arguments))
            times.append(time.perf_counter() - start)
        return min(times)

    rate = 2 * width**3 / best(jnp.dot, square, square)
    return Ceilings(big.nbytes / best(jnp.sum, big), {jnp.dtype(dtype).name: rate, "float32": rate})
