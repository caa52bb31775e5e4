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
import jax.numpy as jnp

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
    def program(inputs, weights):
        results = []
        for i in range(calls):
            result = call(inputs[i], weights[i % len(weights)])
            results.append(result)
            if i + 1 < calls:
                # The next call waits for this one; every call has inputs of its own and every result is returned, so
                # none can be merged with another or dropped.
                inputs = [*inputs[: i + 1], jax.lax.optimization_barrier((inputs[i + 1], result))[0], *inputs[i + 2 :]]
        return results

    return jax.jit(program)


def measure(call: Callable, x: Any, weights: Sequence[Any], *, repeats: int = 9, target_us: float = 800.0) -> Timing:
    """Times ``call(x, weight)``; every weight is used in turn."""
    short = 4
    rolled = jax.jit(lambda x, i: jax.tree.map(lambda a: jnp.roll(a, i), x))

    def inputs(calls: int) -> list[Any]:
        return [rolled(x, i) for i in range(calls)]

    first, few = _program(call, short), inputs(short)
    jax.block_until_ready(first(few, weights))
    estimate = max(1.0, _once(first, few, weights) / short)
    extra = int(min(max(6, target_us / estimate), 60))
    second, many = _program(call, short + extra), inputs(short + extra)
    for _ in range(3):
        jax.block_until_ready((first(few, weights), second(many, weights)))
    times = [(_once(second, many, weights) - _once(first, few, weights)) / extra for _ in range(repeats)]
    median = statistics.median(times)
    quartiles = statistics.quantiles(times, n=4)
    return Timing(median, (quartiles[2] - quartiles[0]) / max(median, 1e-9))


def _once(program: Callable, inputs: Any, weights: Sequence[Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(program(inputs, weights))
    return 1e6 * (time.perf_counter() - start)
