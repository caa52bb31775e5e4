"""Time of one call inside one jitted program, with cold caches.

The program makes many calls in a row, each with inputs of its own and on the next of several weights that together
exceed the last-level cache. The time of one call is the difference between a long and a short program over the
difference in calls. Both take the same arguments, so the cost of dispatching a program and waiting for it, which is
larger than many kernels, drops out. Every result is returned whole: XLA narrows a product of which one element is used,
also behind an optimisation barrier.

Programs are compiled ahead, on threads, since compiling a suite takes far longer than running it.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

CACHE_BYTES = 240_000_000
SHORT, LONG = 4, 44
_TARGET_US = 1200.0
_REPEATS = 9
_POOL = concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count())


@dataclasses.dataclass(frozen=True)
class Timing:
    """Median time of one call and the spread (interquartile range over median) of its repeats."""

    time_us: float
    spread: float


def copies(bytes_each: int, limit: int = 64) -> int:
    """How many weights to rotate over."""
    return max(2, min(limit, -(-CACHE_BYTES // max(1, bytes_each))))


def calls_for(estimate_us: float) -> int:
    """Calls of the long program, for a call of about this time."""
    return SHORT + int(min(max(6, _TARGET_US / max(1.0, estimate_us)), LONG - SHORT))


def inputs_for(x: Any, calls: int) -> list[Any]:
    """Inputs for that many calls: the same numbers in other places."""
    roll = jax.jit(lambda x, i: jax.tree.map(lambda a: jnp.roll(a, i, axis=-1), x))
    return [roll(x, i) for i in range(calls)]


def compile_later(function: Callable, *arguments: Any, **options: Any) -> concurrent.futures.Future:
    """Lowers now, compiles on a thread; the future gives what calls the executable. Options are those of `jax.jit`."""
    return _POOL.submit(jax.jit(function, keep_unused=True, **options).lower(*arguments).compile)


def _program(call: Callable, calls: int) -> Callable:
    def program(inputs, weights):
        return [call(inputs[i], weights[i % len(weights)]) for i in range(calls)]

    return program


class Stopwatch:
    """One call to be timed: compiled on threads from its construction on."""

    def __init__(self, call: Callable, inputs: Sequence[Any], weights: Sequence[Any]) -> None:
        self._arguments = (list(inputs), list(weights))
        self._calls = len(inputs)
        self._short = compile_later(_program(call, SHORT), *self._arguments)
        self._long = compile_later(_program(call, self._calls), *self._arguments)

    def wait(self) -> None:
        """Until it is compiled."""
        self._short.result()
        self._long.result()

    def measure(self) -> Timing:
        """Runs it; nothing else should run on the device meanwhile."""
        short, long = self._short.result(), self._long.result()
        for _ in range(3):
            jax.block_until_ready((short(*self._arguments), long(*self._arguments)))
        extra = self._calls - SHORT
        times = [(self._once(long) - self._once(short)) / extra for _ in range(_REPEATS)]
        median = statistics.median(times)
        quartiles = statistics.quantiles(times, n=4)
        return Timing(round(median, 3), round((quartiles[2] - quartiles[0]) / max(median, 1e-9), 4))

    def _once(self, program: Callable) -> float:
        start = time.perf_counter()
        jax.block_until_ready(program(*self._arguments))
        return 1e6 * (time.perf_counter() - start)
