"""Time of one call inside one jitted program, with cold caches.

The program makes many calls in a row, each with inputs of its own and on the next of several weights that together
exceed the last-level cache. The time of one call is the difference between a long and a short program over the
difference in calls. Both take the same arguments and give one small result, so the cost of dispatching a program and
waiting for it, which is larger than many kernels, drops out.
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
_SHORT, _LONG = 4, 44


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
        results = [call(inputs[i], weights[i % len(weights)]) for i in range(calls)]
        # One element of every result is used, behind a barrier: no call can be dropped, merged with another (their
        # inputs differ) or narrowed to the element.
        results = jax.lax.optimization_barrier(results)
        return jnp.stack([r.reshape(-1)[0].astype(jnp.float32) for r in results])

    return jax.jit(program, keep_unused=True)


def measure(call: Callable, x: Any, weights: Sequence[Any], *, repeats: int = 9, target_us: float = 1200.0) -> Timing:
    """Times ``call(x, weight)``; every weight is used in turn."""
    roll = jax.jit(lambda x, i: jax.tree.map(lambda a: jnp.roll(a, i, axis=-1), x))
    single = jax.jit(call)
    jax.block_until_ready(single(x, weights[0]))
    # A rough estimate, with the cost of dispatching one call in it, says how many calls fill the target.
    estimate = max(5.0, min(_once(single, x, weights[0]) for _ in range(3)) - 60.0)
    calls = _SHORT + int(min(max(6, target_us / estimate), _LONG - _SHORT))
    inputs = [roll(x, i) for i in range(calls)]
    short, long = _program(call, _SHORT), _program(call, calls)
    for _ in range(3):
        jax.block_until_ready((short(inputs, weights), long(inputs, weights)))
    times = [(_once(long, inputs, weights) - _once(short, inputs, weights)) / (calls - _SHORT) for _ in range(repeats)]
    median = statistics.median(times)
    quartiles = statistics.quantiles(times, n=4)
    return Timing(median, (quartiles[2] - quartiles[0]) / max(median, 1e-9))


def _once(program: Callable, inputs: Any, weights: Sequence[Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(program(inputs, weights))
    return 1e6 * (time.perf_counter() - start)
