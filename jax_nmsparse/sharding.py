"""How a product is split where `jax.jit` spreads its operands over devices.

A custom call is opaque to XLA's partitioner, which would gather every operand. So a product that is compiled for
several devices is wrapped in `custom_partitioning`, with a Shardy rule that says how shardings propagate and a callback
that computes each device's part:

    factor     sharded in                              summed by
    batch      every operand and result
    tokens     x, g, y, dx                             sddmm
    windows    x and dx (in_features), values, mask    spmm
    columns    g and y (out_features), values, mask    spmm_t

Only whole windows and whole column blocks can be split, so windows are replicated where in_features is padded, and
columns where out_features is. The sum over a sharded factor is one all-reduce of the result. Where two factors want one
mesh axis, the weight keeps it: activations are gathered, weights never.

Under `jax.shard_map` nothing of this is needed: there a product is local, and sums are written by the user.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_nmsparse.layout import Layout

# Factors of every operand and result: (batch, tokens, windows, columns) named b, t, w, o.
_OPERANDS = {
    "spmm": ("btw", "bwo", "bwo"),
    "spmm_t": ("bto", "bwo", "bwo"),
    "sddmm": ("btw", "bto", "bwo"),
}
_RESULT = {"spmm": "bto", "spmm_t": "btw", "sddmm": "bwo"}
SUMMED = {"spmm": "w", "spmm_t": "o", "sddmm": "t"}
"""The factor that each operation sums over."""


def _rule(op: str, layout: Layout, extras: int) -> tuple[str, dict[str, Any]]:
    """The Shardy rule: einsum-like, with compound factors for features that are windows or column blocks."""
    whole_in, whole_out = _splittable(layout)
    # Shardy refuses compound factors of size 1.
    columns = "o" if layout.bn == 1 else "(o n)"
    features = {"w": "(w r)" if whole_in else "i", "o": columns if whole_out else "f"}
    activation = "b t {}"
    weight = {"values": "b w o q k n", "mask": "b w o v"}
    terms = {
        "spmm": [activation.format(features["w"]), weight["values"], weight["mask"]],
        "spmm_t": [activation.format(features["o"]), weight["values"], weight["mask"]],
        "sddmm": [activation.format(features["w"]), activation.format(features["o"]), weight["mask"]],
    }[op]
    terms += [f"b {features['o']}"] * extras
    result = weight["values"] if op == "sddmm" else activation.format(features[_RESULT[op][2]])
    rule = f"{', '.join(terms)} -> {result}"
    used = set(rule) - set(" ,->()")
    summed = tuple(f for f in (SUMMED[op], {"w": "r", "o": "n"}.get(SUMMED[op], "")) if f in used)
    fixed = (
        {"q", "k", "v", "r", "n", "i", "f"} | ({"w"} if not whole_in else set()) | ({"o"} if not whole_out else set())
    )
    options: dict[str, Any] = {
        # Both in order of appearance, as Shardy demands.
        "reduction_factors": tuple(f for f in summed if f not in fixed),
        "need_replication_factors": tuple(sorted(fixed & used, key=rule.index)),
    }
    if whole_in and "r" in used:
        options["r"] = layout.rows_per_window
    return rule, options


def _splittable(layout: Layout) -> tuple[bool, bool]:
    """Whether windows and column blocks can be split: there are several, and nothing is padded."""
    whole_in = layout.windows > 1 and layout.padded_in == layout.in_features
    return whole_in, layout.out_blocks > 1 and layout.padded_out == layout.out_features


def _axes(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def _factor_axes(op: str, mesh, layout: Layout, operands, result) -> dict[str, tuple[str, ...]]:
    """The mesh axes that split each factor: those of the operands, the weight's first."""
    sizes = {
        "b": operands[0].shape[0],
        "t": operands[0].shape[1],
        "w": layout.windows if _splittable(layout)[0] else 1,
        "o": layout.out_blocks if _splittable(layout)[1] else 1,
    }
    wanted: dict[str, list[tuple[str, ...]]] = {factor: [] for factor in sizes}
    named = list(zip(_OPERANDS[op], operands[:3], strict=True))
    # The weight's arrays first: values and mask, or the mask alone.
    named.sort(key=lambda pair: pair[0] != "bwo")
    for factors, aval in [*named, (_RESULT[op], result)]:
        # Where XLA has no named sharding to report, nothing is split.
        spec = tuple(getattr(aval.sharding, "spec", ())) + (None,) * 3
        for factor, entry in zip(factors, spec, strict=False):
            if _axes(entry):
                wanted[factor].append(_axes(entry))
    used: set[str] = set()
    chosen: dict[str, tuple[str, ...]] = {}
    for factor in ("w", "o", "b", "t"):
        axes = tuple(a for a in (wanted[factor] or [()])[0] if a not in used)
        parts = int(np.prod([mesh.shape[a] for a in axes], dtype=np.int64))
        chosen[factor] = axes if axes and sizes[factor] % parts == 0 else ()
        used.update(chosen[factor])
    return chosen


def partitioned(op: str, layout: Layout, extras: int, local: Callable[..., Callable]) -> Callable:
    """The operation as a function that XLA's partitioner can split.

    Args:
      op: "spmm", "spmm_t" or "sddmm".
      layout: Of the whole weight.
      extras: Operands after the first three, each [batch, out_features].
      local: ``local(layout, operands, summed_over)`` gives the function of one device's part, which adds up the parts
        over the named mesh axes.
    """

    @custom_partitioning
    def whole(*operands):
        return local(layout, operands, ())(*operands)

    def partition(mesh, arg_shapes, result_shape):
        axes = _factor_axes(op, mesh, layout, arg_shapes, result_shape)

        def sharding(factors: str) -> NamedSharding:
            return NamedSharding(mesh, PartitionSpec(*(axes[f] or None for f in factors)))

        parts = {f: int(np.prod([mesh.shape[a] for a in axes[f]], dtype=np.int64)) for f in axes}
        piece = Layout(layout.pattern, layout.in_features // parts["w"], layout.out_features // parts["o"])

        def part(*operands):
            return local(piece, operands, axes[SUMMED[op]])(*operands)

        arguments = tuple(sharding(f) for f in (*_OPERANDS[op], *(["bo"] * extras)))
        return mesh, part, sharding(_RESULT[op]), arguments

    rule, options = _rule(op, layout, extras)
    whole.def_partition(partition=partition, sharding_rule=rule, **options)
    return whole


def needs_partitioning(context: Any) -> bool:
    """Whether a lowering context compiles for several devices that the partitioner fills (not `jax.shard_map`).

    Meshes of explicit axis types are left out: JAX 0.11 and 0.12 cannot lower collectives inside the partitioning
    callback there. XLA partitions plain JAX by itself, and gathers the operands of an opaque call.
    """
    devices = getattr(context.module_context.axis_context, "device_assignment", None)
    if devices is None or len(devices) == 1:
        return False
    meshes = [getattr(aval.sharding, "mesh", None) for aval in context.avals_in]
    return not any(AxisType.Explicit in (mesh.axis_types or ()) for mesh in meshes if mesh is not None)


def allow(primitive: Primitive) -> None:
    """Lets the lowering of a primitive see the devices; JAX has no public way to say so."""
    from jax._src import dispatch  # noqa: PLC0415  (private: kept in this one place)

    dispatch.prim_requires_devices_during_lowering.add(primitive)
