"""What will run, why, and what the hardware allows: `explain` and `supports`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from jax_nmsparse import dispatch, native, ops
from jax_nmsparse.array import NMSparse
from jax_nmsparse.dispatch import Choice
from jax_nmsparse.kernels import Call


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """What a device reaches: bytes/s of memory and FLOP/s by operand dtype; "tf32" is float32 at default precision."""

    bandwidth: float
    flops: dict[str, float]
    capability: str | None = None


DEVICES: dict[str, Ceilings] = {
    # Measured: docs/benchmarks.md.
    "NVIDIA H200": Ceilings(
        4.4e12,
        {
            "bfloat16": 820e12,
            "float16": 820e12,
            "tf32": 410e12,
            "float32": 51e12,
            "int8": 900e12,
            "float8_e4m3fn": 1400e12,
        },
        capability="9.0",
    ),
}
"""Ceilings by `device_kind`."""


_OTHER_PLATFORMS = ("tpu", "rocm", "metal")


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a call moves and computes.

    Attributes:
      values_bytes, mask_bytes, activation_bytes: What has to move once.
      kept_flops: 2 * tokens * kept elements.
      dense_bytes, dense_flops: The same for a dense weight of the same dtype.
      floor_us: The larger of bytes over bandwidth and FLOPs over rate; None for a device without known ceilings.
      dense_floor_us: The floor of the dense product.
    """

    values_bytes: int
    mask_bytes: int
    activation_bytes: int
    kept_flops: int
    dense_bytes: int
    dense_flops: int
    floor_us: float | None
    dense_floor_us: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explanation(Cost):
    """The answer of `explain`; printing it gives the text.

    Attributes:
      call: The primitive call.
      platform: "cpu", "cuda" ...
      device: Device kind, for the ceilings.
      choice: The implementation and kernel, with the reason.

    Those of `Cost` stand beside them.
    """

    call: Call
    platform: str
    device: str
    choice: Choice

    @property
    def bytes(self) -> int:
        return self.values_bytes + self.mask_bytes + self.activation_bytes

    @property
    def gain(self) -> float | None:
        """Expected gain over dense where both reach their floors; 1 where XLA multiplies a dense weight."""
        if self.floor_us is None or self.dense_floor_us is None:
            return None
        return self.dense_floor_us / self.floor_us if self.choice.multiplies else 1.0

    def __str__(self) -> str:
        call, layout = self.call, self.call.layout
        batch = f"batch {call.batch}, " if call.batch > 1 else ""
        lines = [
            f"{call.op}: {batch}{call.tokens} tokens x {layout.in_features}x{layout.out_features}, "
            f"{layout.pattern}, {' x '.join(call.dtypes)} on {self.device}",
            f"  runs     {self.choice.implementation}"
            + (f" kernel {self.choice.kernel.name!r}" if self.choice.kernel else "")
            + f": {self.choice.reason}",
            f"  bytes    {_amount(self.bytes, 'B')} (values {_amount(self.values_bytes, 'B')}, mask "
            f"{_amount(self.mask_bytes, 'B')}, activations {_amount(self.activation_bytes, 'B')}); "
            f"dense {_amount(self.dense_bytes, 'B')}",
            f"  FLOPs    {_amount(self.kept_flops, 'FLOP')} kept; dense {_amount(self.dense_flops, 'FLOP')}",
        ]
        if self.floor_us is None or self.dense_floor_us is None:
            lines.append(f"  floor    unknown: no ceilings are recorded for {self.device}")
        else:
            lines.append(
                f"  floor    {self.floor_us:.1f} us, dense {self.dense_floor_us:.1f} us: "
                f"expected gain over dense {self.gain:.2f}x"
            )
        return "\n".join(lines)


def _amount(value: float, unit: str) -> str:
    for prefix in ("", "k", "M", "G"):
        if value < 1000:
            return f"{value:.4g} {prefix}{unit}"
        value /= 1000
    return f"{value:.4g} T{unit}"


def _make_call(op: str, x: Any, w: Any, precision: Any, preferred: Any) -> Call:
    """The primitive call that `spmm` (or its transpose, or `sddmm`) would make, with the same checks."""

    def trace(x, w):
        if op == "sddmm":
            return ops.sddmm(x, jnp.zeros((*x.shape[:-1], w.out_features), x.dtype), w, precision=precision)
        return ops.spmm(x, w, transpose=op == "spmm_t", precision=precision, preferred_element_type=preferred)

    # Without shardings: on a mesh of explicit axis types a product would be traced in parts.
    jaxpr = jax.make_jaxpr(trace)(*jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (x, w)))
    (equation,) = [e for e in jaxpr.eqns if e.primitive.name == f"nm_{op}"]
    first, second, mask = (v.aval for v in equation.invars[:3])
    lead = mask.ndim - 3
    return Call(
        op,
        equation.params["layout"],
        math.prod(first.shape[:lead]),
        math.prod(first.shape[lead:-1]),
        first.dtype,
        second.dtype,
        equation.params["dtype"],
        equation.params["precision"],
    )


def _device(device: Any) -> tuple[str, str]:
    """(lowering platform, device kind)."""
    if isinstance(device, str):
        if device not in (*native.MODULES, *_OTHER_PLATFORMS, *DEVICES) and not device.upper().startswith("NVIDIA"):
            names = ", ".join(map(repr, (*native.MODULES, *_OTHER_PLATFORMS, *DEVICES)))
            raise ValueError(
                f"explain: device is {device!r}, expected a jax.Device, a platform or a device kind: {names} or "
                "another kind that starts with NVIDIA"
            )
        return ("cuda" if device.upper().startswith("NVIDIA") else device), device
    device = jax.devices()[0] if device is None else device
    return (
        "cuda" if device.platform == "gpu" and "cuda" in device.client.platform_version.lower() else device.platform
    ), (device.device_kind)


def _rate(call: Call, ceilings: Ceilings) -> float:
    dtype = call.dtypes[0]
    if dtype == "float32" and call.float32 != "highest":
        return ceilings.flops["tf32"] / (3 if call.float32 == "tf32x3" else 1)
    return ceilings.flops.get(dtype, ceilings.flops["float32"])


def cost(call: Call, ceilings: Ceilings | None) -> Cost:
    """The cost model: every operand moves once; a floor is bytes over bandwidth or FLOPs over rate, if that is more."""
    layout, size = call.layout, jnp.dtype(call.values_dtype).itemsize
    kept = call.batch * layout.values_bytes(jnp.int8)
    features = {"spmm": layout.in_features, "spmm_t": layout.out_features, "sddmm": layout.in_features}[call.op]
    other = {"spmm": layout.out_features, "spmm_t": layout.in_features, "sddmm": layout.out_features}[call.op]
    rows = call.batch * call.tokens
    activations = rows * (features * jnp.dtype(call.x_dtype).itemsize + other * jnp.dtype(call.dtype).itemsize)
    dense = call.batch * layout.in_features * layout.out_features
    values_bytes, mask_bytes = kept * size, call.batch * layout.mask_bytes()
    kept_flops, dense_flops = 2 * call.tokens * kept, 2 * call.tokens * dense
    floor = dense_floor = None
    if ceilings is not None:
        rate = _rate(call, ceilings)
        moved = values_bytes + mask_bytes + activations
        floor = 1e6 * max(moved / ceilings.bandwidth, kept_flops / rate)
        dense_floor = 1e6 * max((dense * size + activations) / ceilings.bandwidth, dense_flops / rate)
    return Cost(
        values_bytes,
        mask_bytes,
        activations,
        kept_flops,
        dense * size + activations,
        dense_flops,
        floor,
        dense_floor,
    )


def explain(
    x: Any,
    w: NMSparse,
    *,
    op: str = "spmm",
    precision: Any = None,
    preferred_element_type: Any = None,
    implementation: str | None = None,
    device: Any = None,
) -> Explanation:
    """Says which kernel ``spmm(x, w, ...)`` runs and why, what it moves and computes, and the floor of its time.

    Args:
      x: The activations, or a `jax.ShapeDtypeStruct`.
      w: The weight; its arrays may be `jax.ShapeDtypeStruct` too.
      op: "spmm", "spmm_t" (transpose=True; x is then g) or "sddmm".
      precision, preferred_element_type, implementation: As in `spmm`.
      device: A `jax.Device`, a platform ("cpu", "cuda") or a device kind ("NVIDIA H200"); by default JAX's first.

    Returns:
      An `Explanation`; print it. Times are floors: the larger of bytes over memory bandwidth and kept FLOPs over the
      arithmetic rate that the device was measured to reach.

    Raises:
      As `spmm`; NotImplementedError where a named implementation cannot run the call.

    Example:
      >>> import jax, jax.numpy as jnp, jax_nmsparse as nms
      >>> w = nms.prune(jax.random.normal(jax.random.key(0), (64, 32)), "2:4")
      >>> print(nms.explain(jnp.ones((1, 64)), w, implementation="xla", device="NVIDIA H200").choice.reason)
      asked for
    """
    if op not in ("spmm", "spmm_t", "sddmm"):
        raise ValueError(f"explain: op is {op!r}, expected 'spmm', 'spmm_t' or 'sddmm'")
    call = _make_call(op, x, w, precision, preferred_element_type)
    platform, kind = _device(device)
    ceilings = DEVICES.get(kind)
    choice = dispatch.choose(call, platform, implementation, ceilings.capability if ceilings else None)
    return Explanation(call=call, platform=platform, device=kind, choice=choice, **vars(cost(call, ceilings)))


def supports(x: Any, w: NMSparse, *, implementation: str, op: str = "spmm", precision: Any = None) -> bool:
    """Whether a named implementation can run the call where its platform is present.

    Args:
      x, w, op, precision: As in `explain`.
      implementation: "cuda", "cpu", "xla" or "dense".

    Returns:
      True exactly where ``spmm(x, w, implementation=implementation)`` does not raise while tracing.

    Example:
      >>> import jax, jax.numpy as jnp, jax_nmsparse as nms
      >>> w = nms.prune(jnp.ones((8, 8)), "2:4")
      >>> nms.supports(jnp.ones((2, 8)), w, implementation="xla")
      True
    """
    if implementation not in dispatch.IMPLEMENTATIONS:
        raise ValueError(
            f"supports: implementation is {implementation!r}, expected one of {', '.join(dispatch.IMPLEMENTATIONS)}"
        )
    return dispatch.rejection(_make_call(op, x, w, precision, None), implementation) is None
