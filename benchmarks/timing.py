"""Time of one call inside one jitted program, with cold caches.

A program makes many calls in a row, each with an input and a weight of its own: the weights together exceed the
last-level cache, and XLA cannot merge two calls. The time of one call is the difference between a long and a short
program over the difference in calls. Both take the same arguments and give as many results (those that the short one
does not compute are those of the run before), so the cost of dispatching a program and waiting for it, which is larger
than many kernels, drops out. Every result is returned whole, in place of that of the run before: XLA narrows a product
of which one element is used, and a CUDA graph is captured anew for new addresses.

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
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout

CACHE_BYTES = 240_000_000
SHORT, LONG = 6, 90
"""Calls of the short and of the longest program."""
_TARGET_US = 1000.0
"""About what a long program takes more than a short one."""
_REPEATS = 31
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


def _shape(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def _format(array: Any, feature_major: bool) -> Format | None:
    """The format of an activation where it is not the usual one; what is no matrix has one order only."""
    if not feature_major or array.ndim != 2:
        return None
    return Format(Layout((1, 0)), jax.sharding.SingleDeviceSharding(jax.devices()[0]))


class Stopwatch:
    """One call to be timed: compiled on threads from its construction on.

    Args:
      call: call(x, weight) -> result, pytrees.
      x, weight: Its arguments, of which copies are made when it runs.
      estimate_us: A rough time of a call, which says how many calls make a program long enough.
      feature_major: Whether matrices in x and in the result lie [features, tokens] in memory.
    """

    def __init__(self, call: Callable, x: Any, weight: Any, estimate_us: float, feature_major: bool = False) -> None:
        self._long = SHORT + math.ceil(min(max(3.0, _TARGET_US / max(1.0, estimate_us)), LONG - SHORT))
        # Leaves alone: taking pytrees apart at every run takes longer than a small product.
        self._x, structure = jax.tree.flatten(x)
        self._weight, weight_structure = jax.tree.flatten(weight)
        inner = jax.jit(lambda x, w: jax.tree.leaves(call(structure.unflatten(x), weight_structure.unflatten(w))))
        results = jax.eval_shape(inner, self._x, self._weight)
        formats = [_format(a, feature_major) for a in self._x]
        result_formats = [_format(a, feature_major) for a in results]
        arguments = (
            [[_shape(a) for a in self._x]] * self._long,
            [[_shape(a) for a in self._weight]] * self._long,
            [results] * self._long,
        )

        def lower(calls: int) -> jax.stages.Lowered:
            def program(inputs, weights, before):
                return [*map(inner, inputs[:calls], weights[:calls]), *before[calls:]]

            jitted = jax.jit(
                program,
                in_shardings=([formats] * self._long, None, [result_formats] * self._long),
                out_shardings=[result_formats] * self._long,
                donate_argnums=2,
                keep_unused=True,
            )
            return jitted.lower(*arguments)

        lowered = [lower(calls) for calls in (SHORT, self._long)]
        # One after the other: what XLA finds out by trying for the first it knows for the second.
        self._programs = _POOL.submit(lambda: [program.compile() for program in lowered])

    def wait(self) -> None:
        """Until it is compiled."""
        self._programs.result()

    def measure(self) -> Timing:
        """Runs it; nothing else should run on the device meanwhile."""
        short, long = self._programs.result()
        arguments = self._arguments(long)
        for _ in range(3):
            arguments[2] = long(*arguments)
            arguments[2] = short(*arguments)
        times = [
            (self._once(long, arguments) - self._once(short, arguments)) / (self._long - SHORT) for _ in range(_REPEATS)
        ]
        median = statistics.median(times)
        quartiles = statistics.quantiles(times, n=4)
        return Timing(round(median, 3), round((quartiles[2] - quartiles[0]) / max(median, 1e-9), 4))

    def _arguments(self, program: jax.stages.Compiled) -> list[Any]:
        """Inputs and weights, each in a place of its own, and the memory of the results."""
        shapes, formats = program.args_info[0], program.input_formats[0]

        def placed(leaves, formats):
            return [[jax.device_put(jnp.copy(a), f) for a, f in zip(leaves, each, strict=True)] for each in formats]

        zeros = jax.tree.map(lambda a, f: jax.device_put(jnp.zeros(a.shape, a.dtype), f), shapes[2], formats[2])
        return [placed(self._x, formats[0]), placed(self._weight, formats[1]), zeros]

    @staticmethod
    def _once(program: Callable, arguments: list[Any]) -> float:
        start = time.perf_counter()
        arguments[2] = program(*arguments)
        jax.block_until_ready(arguments[2])
        return 1e6 * (time.perf_counter() - start)
