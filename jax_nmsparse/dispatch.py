"""Which kernel runs a call, and why: one table for lowering, `supports` and `explain`."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import math
from collections.abc import Iterator

from jax import export

from jax_nmsparse import native, reference, tuning
from jax_nmsparse.kernels import KERNELS, Call, Kernel

IMPLEMENTATIONS = ("cuda", "cpu", "xla", "dense")


@dataclasses.dataclass(frozen=True)
class Choice:
    """What runs a call: a native kernel, or the "xla" or "dense" implementation where kernel is None."""

    implementation: str
    kernel: Kernel | None
    reason: str

    @property
    def name(self) -> str:
        return self.kernel.name if self.kernel else self.implementation

    @property
    def multiplies(self) -> Kernel | None:
        """The kernel, where it gives the product itself and XLA does not."""
        return None if self.kernel is None or self.kernel.by_xla else self.kernel


_ONLY: contextvars.ContextVar[str | None] = contextvars.ContextVar("only_kernel", default=None)


@contextlib.contextmanager
def only_kernel(name: str) -> Iterator[None]:
    """Inside, native calls run this kernel or raise: for tests and tuning, which compare kernels.

    The choice is made when a call is compiled, so functions that were jitted before keep theirs.
    """
    if name not in {k.name for k in KERNELS}:
        raise ValueError(f"only_kernel: {name!r} is not one of {', '.join(sorted({k.name for k in KERNELS}))}")
    token = _ONLY.set(name)
    try:
        yield
    finally:
        _ONLY.reset(token)


_ELSEWHERE: contextvars.ContextVar[tuple[str | None] | None] = contextvars.ContextVar("elsewhere", default=None)


@contextlib.contextmanager
def compiling_elsewhere(capability: str | None) -> Iterator[None]:
    """Inside, kernels are chosen for another machine, which has every native module: for export.

    Args:
      capability: Compute capability of its GPUs ("9.0"); None for kernels that run on all of them.
    """
    token = _ELSEWHERE.set((capability,))
    try:
        yield
    finally:
        _ELSEWHERE.reset(token)


def _capability() -> str | None:
    elsewhere = _ELSEWHERE.get()
    return elsewhere[0] if elsewhere else native.cuda_capability()


def circumstances() -> str:
    """What the choice of a kernel depends on beside the call, as text."""
    loaded = sorted(name for name, module in native.MODULES.items() if module.loaded)
    return repr((loaded, native.cuda_capability(), _ELSEWHERE.get(), _ONLY.get()))


def _kernels(call: Call, implementation: str, capability: str | None) -> list[Kernel]:
    """The kernels of an implementation for the operation and device, whether or not they take the call."""
    only = _ONLY.get()
    return [
        k
        for k in KERNELS
        if k.implementation == implementation
        and call.op in k.ops
        and k.capability in (None, capability)
        and only in (None, k.name)
    ]


def rejection(call: Call, implementation: str, capability: str | None = None) -> str | None:
    """Why a named implementation cannot run the call on any machine, or None."""
    if implementation in ("xla", "dense"):
        return None
    if export.is_symbolic_dim(call.tokens) or export.is_symbolic_dim(call.batch):
        return f"the number of tokens is symbolic ({call.batch} x {call.tokens}), and a kernel is chosen for a number"
    module = native.MODULES[implementation]
    if not module.loaded and _ELSEWHERE.get() is None:
        return f"the native module _{implementation} {module.problem}"
    kernels = _kernels(call, implementation, capability or _capability())
    if not kernels:
        return f"it has no kernel {_ONLY.get()!r} for {call.op} on this device"
    reasons = [k.rejects(call) for k in kernels]
    return None if None in reasons else "; ".join(f"{k.name}: {r}" for k, r in zip(kernels, reasons, strict=True))


def choose(call: Call, platform: str, implementation: str | None, capability: str | None = None) -> Choice:
    """The kernel for a call that is compiled for a platform.

    Args:
      call: The call.
      platform: JAX's lowering platform: "cpu", "cuda", "tpu" ...
      implementation: As asked for by the user; None chooses.
      capability: Compute capability of the device ("9.0"), by default that of the GPUs present, if there are any.

    Raises:
      NotImplementedError: Where a named implementation cannot run here.
    """
    capability = capability or _capability()
    if implementation in ("xla", "dense"):
        return Choice(implementation, None, "asked for")
    if implementation is not None:
        reason = rejection(call, implementation, capability)
        if platform != implementation:
            reason = f"the computation is compiled for {platform}"
        if reason is not None:
            raise NotImplementedError(
                f"{call.op}: implementation={implementation!r} was asked for, but {reason}; "
                "implementation=None chooses what runs here, 'xla' runs everywhere"
            )
        return dataclasses.replace(_fastest(call, implementation, capability, ()), reason="asked for")
    if platform not in native.MODULES:
        return Choice("xla", None, f"there are no kernels for {platform}")
    reason = rejection(call, platform, capability)
    if reason is not None:
        return Choice("xla", None, reason)
    # Never a dense gradient, and nothing beside `only_kernel`.
    plain = () if _ONLY.get() else ("dense", "xla") if call.op == "spmm" else ("xla",)
    return _fastest(call, platform, capability, plain)


_MANY_TOKENS = 64

_TRANSPOSES_US = 4.0
"""Assumed time in which XLA transposes the small x and y of a feature-major kernel, a launch each. A chain of such
kernels does not pay it, but a single call does."""
_FEW_TOKENS = 256
_FEATURE_MAJOR = frozenset(k.name for k in KERNELS if k.feature_major)

BY_XLA = frozenset(k.name for k in KERNELS if k.by_xla)
"""Kernels around a dense product."""


def _bound(times: dict[str, float], names: tuple[str, ...], points: list[tuning.Measurement], tokens: int) -> None:
    """Adds what other numbers of tokens of the same weight say of the names without a time.

    A call does no worse than one of more tokens, nor than as many calls of fewer tokens as it takes.
    """
    for name in names:
        bounds = [p.times_us[name] * math.ceil(max(1, tokens) / p.tokens) for p in points if name in p.times_us]
        if name not in times and bounds:
            times[name] = min(bounds)


def _around_dense(call: Call, platform: str, point: tuning.Measurement, names: tuple[str, ...]) -> dict[str, float]:
    """Times at a point of those around a dense product, which expand the weight or keep units of its gradient."""
    if "dense" not in point.times_us:
        return {}
    itemsize = max(2, reference.operand_dtype(call.x_dtype, call.values_dtype).itemsize)
    dense_bytes = point.in_features * point.out_features * itemsize
    expansion = functools.partial(
        tuning.expansion_us, platform, call.op, pattern=point.pattern, dense_bytes=dense_bytes
    )
    around = [name for name in names if name == "dense" or name in BY_XLA]
    times = {name: point.times_us["dense"] + expansion(name) for name in around}
    # Those of the kernels may have been measured as a whole.
    return {**times, **{name: point.times_us[name] for name in times.keys() & point.times_us.keys() - {"dense"}}}


def _fastest(call: Call, implementation: str, capability: str | None, plain: tuple[str, ...]) -> Choice:
    """The kernel, or the one of these implementations without a kernel, that was fastest where it was measured nearest.

    Where nothing was measured, the first kernel in the table that takes the call.
    """
    kernels = {k.name: k for k in _kernels(call, implementation, capability) if not k.rejects(call)}
    if kernels.keys() & BY_XLA:
        plain = ()  # it does the same as those, and expands faster
    fastest, because = _measured_fastest(call, implementation, (*kernels, *plain))
    if fastest is None:
        for_few = (k for k in kernels.values() if not k.by_xla or call.tokens >= _MANY_TOKENS)
        kernel = next(for_few, next(iter(kernels.values())))
        return Choice(implementation, kernel, kernel.summary)
    if fastest in kernels:
        return Choice(implementation, kernels[fastest], f"{kernels[fastest].summary}; {because}")
    return Choice(fastest, None, because)


def _measured_fastest(call: Call, implementation: str, names: tuple[str, ...]) -> tuple[str | None, str]:
    """What was fastest of these at the nearest point that was measured, and why."""
    layout = call.layout
    points = tuning.nearest(
        implementation,
        call.op,
        layout.pattern,
        *call.measured_as,
        call.tokens,
        layout.in_features,
        layout.out_features,
    )
    for point in points:
        times = {name: point.times_us[name] for name in names if name in point.times_us}
        times.update(_around_dense(call, implementation, point, names))
        if times:
            _bound(times, names, [p for p in points if p.is_weight_of(point)], call.tokens)
        if call.tokens < _FEW_TOKENS:
            for name in times.keys() & _FEATURE_MAJOR:
                times[name] += _TRANSPOSES_US
        if times:
            name = min(times, key=times.__getitem__)
            listed = ", ".join(f"{n} {t:.1f} us" for n, t in sorted(times.items(), key=lambda item: item[1]))
            where = f"{point.tokens} tokens x {point.in_features}x{point.out_features} at {point.pattern}"
            return name, f"measured nearest, {where}: {listed}"
    return None, ""
