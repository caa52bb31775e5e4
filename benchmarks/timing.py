"""Time of one call inside one jitted program, with cold caches.

The program makes `calls` calls in a row, each on the next of several weights that together exceed the last-level cache,
and each waiting for the one before (an optimisation barrier ties them). The time of one call is the difference between
a long and a short program over the difference in calls, so that the cost of dispatching and waiting for a program,
which is larger than many kernels, drops out.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

CACHE_BYTES = 240_000_000


@dataclasses.dataclass(frozen=True)
class Timing:
    """Median time of one call and the spread (interquartile range over median) of its repeats."""

    time_us: float
    spread: float


def copies(bytes_each: int, limit: int = 64) -> int:
    """How many weights to rotate over."""
    return max(2, min(limit, -(-CACHE_BYTES // max(1, bytes_each))))


def _program(call: Callable, calls: int) -> Callable:
    def program(x, weights):
        result = None
        for i in range(calls):
            result = call(x, weights[i % len(weights)])
            # The next call depends on this result, without computing anything with it.
            x, result = jax.lax.optimization_barrier((x, result))
        return result

    return jax.jit(program)


def measure(call: Callable, x: Any, weights: Sequence[Any], *, repeats: int = 9, target_us: float = 1500.0) -> Timing:
    """Times ``call(x, weight)``; every weight is used in turn."""
    short = 4
    first = _program(call, short)
    jax.block_until_ready(first(x, weights))
    estimate = max(1.0, _once(first, x, weights) / short)
    extra = int(min(max(8, target_us / estimate), 120))
    second = _program(call, short + extra)
    for _ in range(3):
        jax.block_until_ready((first(x, weights), second(x, weights)))
    times = [(_once(second, x, weights) - _once(first, x, weights)) / extra for _ in range(repeats)]
    median = statistics.median(times)
    quartiles = statistics.quantiles(times, n=4)
    return Timing(median, (quartiles[2] - quartiles[0]) / max(median, 1e-9))


def _once(program: Callable, x: Any, weights: Sequence[Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(program(x, weights))
    return 1e6 * (time.perf_counter() - start)
