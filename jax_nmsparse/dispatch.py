"""Which kernel runs a call, and why: one table for lowering, `supports` and `explain`."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator

import jax.numpy as jnp
from jax import lax

from jax_nmsparse import native, tuning
from jax_nmsparse.layout import Layout

IMPLEMENTATIONS = ("cuda", "cpu", "xla", "dense")


@dataclasses.dataclass(frozen=True)
class Call:
    """The static description of one primitive call.

    Attributes:
      op: "spmm", "spmm_t" or "sddmm".
      layout: Pattern and dense size of the weight.
      batch: Size of the batch axis, 1 for a single weight.
      tokens: Rows of x (and g) for each batch entry.
      x_dtype: dtype of x, for spmm_t of g.
      values_dtype: dtype of values, for sddmm of g.
      dtype: dtype of the result.
      precision: As in `jax.lax.dot_general`.
    """

    op: str
    layout: Layout
    batch: int
    tokens: int
    x_dtype: jnp.dtype
    values_dtype: jnp.dtype
    dtype: jnp.dtype
    precision: lax.PrecisionLike = None

    @property
    def dtypes(self) -> tuple[str, str]:
        return jnp.dtype(self.x_dtype).name, jnp.dtype(self.values_dtype).name

    @property
    def kind(self) -> str:
        return "ew" if self.layout.pattern.is_elementwise else "block"


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One native kernel family.

    Attributes:
      name: The name that the native handler looks up.
      implementation: "cpu" or "cuda".
      ops: The operations that it computes.
      summary: What it is, for `explain`.
      rejects: Why it cannot run a call, or None.
      workspace: Bytes of workspace that a call needs.
    """

    name: str
    implementation: str
    ops: tuple[str, ...]
    summary: str
    rejects: Callable[[Call], str | None]
    workspace: Callable[[Call], int] = lambda call: 0


@dataclasses.dataclass(frozen=True)
class Choice:
    """What runs a call: a native kernel, or the "xla" or "dense" implementation where kernel is None."""

    implementation: str
    kernel: Kernel | None
    reason: str

    @property
    def name(self) -> str:
        return self.kernel.name if self.kernel else self.implementation


_FLOATS = ("float32", "bfloat16", "float16")
_SAME = {(d, d) for d in _FLOATS}
_WEIGHT_ONLY_INT8 = {(d, "int8") for d in _FLOATS}
_FLOAT8 = {(d, "float8_e4m3fn") for d in (*_FLOATS, "float8_e4m3fn")}
_RESULTS = (*_FLOATS, "float64", "int32")


def _dtype_rejects(pairs: set[tuple[str, str]]) -> Callable[[Call], str | None]:
    def rejects(call: Call) -> str | None:
        floats = (*_FLOATS, "float64")
        allowed = {
            "spmm": pairs,
            "spmm_t": {p for p in pairs if p[0] in floats},
            "sddmm": {p for p in pairs if p[0] == p[1] and p[0] in floats},
        }[call.op]
        if call.dtypes not in allowed:
            listed = ", ".join(sorted(f"{x} x {w}" for x, w in allowed))
            return f"dtypes {call.dtypes[0]} x {call.dtypes[1]} have no kernel (there are {listed})"
        if jnp.dtype(call.dtype).name not in _RESULTS:
            return f"no kernel writes {jnp.dtype(call.dtype).name} (results: {', '.join(_RESULTS)})"
        return None

    return rejects


_OPS = ("spmm", "spmm_t", "sddmm")

KERNELS: tuple[Kernel, ...] = (
    Kernel(
        name="simd",
        implementation="cpu",
        ops=_OPS,
        summary="C++ SIMD kernels on XLA's thread pool",
        rejects=_dtype_rejects(_SAME | {("float64", "float64"), ("int8", "int8")} | _WEIGHT_ONLY_INT8),
    ),
    Kernel(
        name="simple",
        implementation="cuda",
        ops=_OPS,
        summary="tiles expanded to dense in shared memory, float32 arithmetic on CUDA cores; every pattern and size",
        rejects=_dtype_rejects(_SAME | {("int8", "int8")} | _WEIGHT_ONLY_INT8 | _FLOAT8),
    ),
)
"""Every native kernel, the most specialised first: the first that does not reject a call is the candidate."""


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


def _kernels(call: Call, implementation: str) -> list[Kernel]:
    """The kernels of an implementation for the operation, whether or not they take the call."""
    only = _ONLY.get()
    kernels = [k for k in KERNELS if k.implementation == implementation and call.op in k.ops]
    return [k for k in kernels if only in (None, k.name)]


def rejection(call: Call, implementation: str) -> str | None:
    """Why a named implementation cannot run the call on any machine, or None."""
    if implementation in ("xla", "dense"):
        return None
    module = native.MODULES[implementation]
    if not module.loaded:
        return f"the native module _{implementation} {module.problem}"
    kernels = _kernels(call, implementation)
    if not kernels:
        return f"it has no kernel {_ONLY.get()!r} for {call.op}"
    reasons = [k.rejects(call) for k in kernels]
    return None if None in reasons else "; ".join(f"{k.name}: {r}" for k, r in zip(kernels, reasons, strict=True))


def choose(call: Call, platform: str, implementation: str | None) -> Choice:
    """The kernel for a call that is compiled for a platform.

    Args:
      call: The call.
      platform: JAX's lowering platform: "cpu", "cuda", "tpu" ...
      implementation: As asked for by the user; None chooses.

    Raises:
      NotImplementedError: Where a named implementation cannot run here.
    """
    if implementation in ("xla", "dense"):
        return Choice(implementation, None, "asked for")
    if implementation is not None:
        reason = rejection(call, implementation)
        if platform != implementation:
            reason = f"the computation is compiled for {platform}"
        if reason is not None:
            raise NotImplementedError(
                f"{call.op}: implementation={implementation!r} was asked for, but {reason}; "
                "implementation=None chooses what runs here, 'xla' runs everywhere"
            )
        return Choice(implementation, _preferred(call, implementation), "asked for")
    if platform not in native.MODULES:
        return Choice("xla", None, f"there are no kernels for {platform}")
    reason = rejection(call, platform)
    if reason is not None:
        return Choice("xla", None, reason)
    kernels = {k.name: k for k in _kernels(call, platform) if not k.rejects(call)}
    fastest, because = _fastest(call, platform, (*kernels, *_plain(call)))
    if fastest is None:
        kernel = next(iter(kernels.values()))
        return Choice(platform, kernel, kernel.summary)
    if fastest in kernels:
        return Choice(platform, kernels[fastest], f"{kernels[fastest].summary}; {because}")
    return Choice(fastest, None, because)


def _plain(call: Call) -> tuple[str, ...]:
    """Implementations without a kernel that may be chosen: never a dense gradient, and none beside `only_kernel`."""
    if _ONLY.get() is not None:
        return ()
    return ("dense", "xla") if call.op == "spmm" else ("xla",)


def _fastest(call: Call, implementation: str, names: tuple[str, ...]) -> tuple[str | None, str]:
    """What was fastest of these at the nearest point that was measured, and why."""
    layout = call.layout
    exact = call.dtypes[1] == "float32" and call.precision in (lax.Precision.HIGH, lax.Precision.HIGHEST)
    points = tuning.nearest(
        implementation,
        call.op,
        layout.pattern,
        call.dtypes[1],
        exact,
        call.tokens,
        layout.in_features,
        layout.out_features,
    )
    for point in points:
        times = {name: point.times_us[name] for name in names if name in point.times_us}
        if times:
            name = min(times, key=times.__getitem__)
            listed = ", ".join(f"{n} {t:.1f} us" for n, t in sorted(times.items(), key=lambda item: item[1]))
            where = f"{point.tokens} tokens x {point.in_features}x{point.out_features} at {point.pattern}"
            return name, f"measured nearest, {where}: {listed}"
    return None, ""


def _preferred(call: Call, implementation: str) -> Kernel:
    """The kernel that was fastest at the nearest measured point, otherwise the first that takes the call."""
    kernels = {k.name: k for k in _kernels(call, implementation) if not k.rejects(call)}
    fastest, _ = _fastest(call, implementation, tuple(kernels))
    return kernels[fastest] if fastest else next(iter(kernels.values()))
