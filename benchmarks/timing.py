"""Time of one call inside one jitted program, with cold caches.

A program makes many calls in a row, each with another pair of one of several inputs and one of several weights; the
weights together exceed the last-level cache. It is run several times without waiting in between, so that the device
is never idle, and the time of one call is the difference between a long and a short program over the difference in
calls: what a program costs besides its calls drops out. Every result is returned whole, in place of that of the
run before (XLA narrows a product of which one element is used, also behind an optimisation barrier; and a CUDA graph
is captured anew for new addresses).

Activations are row-major, as JAX programs hold them, or feature-major ([features, tokens] in memory), as between the
layers of a model whose kernels want them so.

Programs are compiled ahead, on threads, since compiling a suite takes far longer than running it.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout

CACHE_BYTES = 240_000_000
_LONG = 96
"""Calls of the longest program."""
_LONG_US, _SAMPLE_US = 600.0, 3000.0
"""About how long a long program and the programs of a sample take together."""
_REPEATS = 7
_POOL = concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count())


@dataclasses.dataclass(frozen=True)
class Timing:
    """Median time of one call and the spread (interquartile range over median) of its repeats."""

    time_us: float
    spread: float


def copies(bytes_each: int, limit: int = 64) -> int:
    """How many weights to rotate over."""
    return max(2, min(limit, -(-CACHE_BYTES // max(1, bytes_each))))


def compile_later(function: Callable, *arguments: Any, **options: Any) -> concurrent.futures.Future:
    """Lowers now, compiles on a thread; the future gives what calls the executable. Options are those of `jax.jit`."""
    return _POOL.submit(jax.jit(function, keep_unused=True, **options).lower(*arguments).compile)


@jax.jit
def _shifted(x: Any, by: jax.Array) -> Any:
    return jax.tree.map(lambda a: jnp.roll(a, by, axis=-1), x)


def _format(array: Any, feature_major: bool) -> Format | None:
    """The format of an activation where it is not the usual one; what is no matrix has one order only."""
    if not feature_major or array.ndim != 2:
        return None
    return Format(Layout((1, 0)), jax.sharding.SingleDeviceSharding(jax.devices()[0]))


class Stopwatch:
    """One call to be timed: compiled on threads from its construction on.

    Args:
      call: call(input, weight) -> result, pytrees.
      x: An input; others are made from it.
      weights: Weights that together do not fit the cache.
      estimate_us: A rough time of a call, which says how many calls make a program long enough.
      feature_major: Whether matrices among the inputs and the results lie [features, tokens] in memory.
    """

    def __init__(
        self, call: Callable, x: Any, weights: Sequence[Any], estimate_us: float, feature_major: bool = False
    ) -> None:
        self._estimate_us = max(1.0, estimate_us)
        self._long = 2 * math.ceil(min(_LONG, max(4.0, _LONG_US / self._estimate_us)) / 2)
        self._short = self._long // 2
        # So many inputs that no pair of an input and a weight comes twice, which XLA would compute once.
        count = next(n for n in range(1, self._long + 1) if math.lcm(n, len(weights)) >= self._long)
        leaves, structure = jax.tree.flatten(x)
        formats = [_format(a, feature_major) for a in leaves]
        # Leaves alone: taking a pytree apart at every run takes longer than a small product.
        flat, weight_structures = zip(*map(jax.tree.flatten, weights), strict=True)
        inner = jax.jit(lambda x, w: jax.tree.leaves(call(structure.unflatten(x), weight_structures[0].unflatten(w))))
        results = jax.eval_shape(inner, leaves, flat[0])
        result_formats = [_format(a, feature_major) for a in results]
        placed = [a.sharding if f is None else f for a, f in zip(leaves, formats, strict=True)]
        self._arguments = ([jax.device_put(_shifted(leaves, i), placed) for i in range(count)], list(flat))

        def lower(calls: int) -> jax.stages.Lowered:
            def program(inputs, weights, before):
                del before  # its memory takes the results
                return [inner(inputs[i % count], weights[i % len(weights)]) for i in range(calls)]

            jitted = jax.jit(
                program,
                in_shardings=([formats] * count, None, [result_formats] * calls),
                out_shardings=[result_formats] * calls,
                donate_argnums=2,
                keep_unused=True,
            )
            return jitted.lower(*self._arguments, [results] * calls)

        lowered = [lower(calls) for calls in (self._short, self._long)]
        # One after the other: what XLA finds out by trying for the first it knows for the second.
        self._programs = _POOL.submit(lambda: [program.compile() for program in lowered])

    def wait(self) -> None:
        """Until it is compiled."""
        self._programs.result()

    def measure(self) -> Timing:
        """Runs it; nothing else should run on the device meanwhile."""
        samples = [self._sample(program) for program in self._programs.result()]
        for _ in range(2):
            for sample in samples:
                sample()
        times = [(samples[1]() - samples[0]()) / (self._long - self._short) for _ in range(_REPEATS)]
        median = statistics.median(times)
        quartiles = statistics.quantiles(times, n=4)
        return Timing(round(median, 3), round((quartiles[2] - quartiles[0]) / max(median, 1e-9), 4))

    def _sample(self, program: jax.stages.Compiled) -> Callable[[], float]:
        """A function that runs a program several times in a row and gives the time of one run in microseconds."""
        shapes = program.args_info[0][2]
        formats = program.input_formats[0][2]
        state = jax.tree.map(lambda a, f: jax.device_put(jnp.zeros(a.shape, a.dtype), f), shapes, formats)
        runs = max(2, round(_SAMPLE_US / (self._long * self._estimate_us)))

        def sample() -> float:
            nonlocal state
            start = time.perf_counter()
            for _ in range(runs):
                state = program(*self._arguments, state)
            jax.block_until_ready(state)
            return 1e6 * (time.perf_counter() - start) / runs

        return sample
