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
columns where out_features is. The sum over a sharded factor is one all-reduce of the result, or one reduce-scatter
where the result is wanted split over those mesh axes. Where two factors want one mesh axis, the weight keeps it:
activations move, weights never.

On meshes of explicit axis types `explicit` splits a product before it gets here. Under `jax.shard_map` nothing of this
is needed: there a product is local, and sums are written by the user.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_nmsparse.layout import Layout
from jax_nmsparse.meshes import Axes, padded_spec, parts_of, scatter_axis

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


def _spec(array: Any) -> tuple[Axes, ...]:
    """What splits each axis of an array that the partitioner describes; nothing where it has no named sharding."""
    return padded_spec(getattr(array.sharding, "spec", ()), len(array.shape))


def _factor_axes(op: str, mesh, layout: Layout, operands, result) -> dict[str, Axes]:
    """The mesh axes that split each factor: those of the operands, the weight's first."""
    sizes = {
        "b": operands[0].shape[0],
        "t": operands[0].shape[1],
        "w": layout.windows if _splittable(layout)[0] else 1,
        "o": layout.out_blocks if _splittable(layout)[1] else 1,
    }
    wanted: dict[str, list[Axes]] = {factor: [] for factor in sizes}
    named = list(zip(_OPERANDS[op], operands[:3], strict=True))
    # The weight's arrays first: values and mask, or the mask alone.
    named.sort(key=lambda pair: pair[0] != "bwo")
    for factors, array in [*named, (_RESULT[op], result)]:
        for factor, axes in zip(factors, _spec(array), strict=False):
            if axes:
                wanted[factor].append(axes)
    used: set[str] = set()
    chosen: dict[str, Axes] = {}
    for factor in ("w", "o", "b", "t"):
        axes = tuple(a for a in (wanted[factor] or [()])[0] if a not in used)
        chosen[factor] = axes if sizes[factor] % parts_of(mesh, axes) == 0 else ()
        used.update(chosen[factor])
    return chosen


def _result_axes(op: str, mesh, axes: dict[str, Axes], result) -> tuple[list[Axes], int | None]:
    """What splits each axis of the result, and which of them its sum leaves split, if any."""
    added, natural = axes[SUMMED[op]], [axes[factor] for factor in _RESULT[op]]
    scatter = scatter_axis(natural, added, _spec(result)[:3])
    if scatter is None or result.shape[scatter] % parts_of(mesh, natural[scatter] + added):
        return natural, None
    return [have + (added if i == scatter else ()) for i, have in enumerate(natural)], scatter


def partitioned(op: str, layout: Layout, extras: int, local: Callable[..., Callable]) -> Callable:
    """The operation as a function that XLA's partitioner can split.

    Args:
      op: "spmm", "spmm_t" or "sddmm".
      layout: Of the whole weight.
      extras: Operands after the first three, each [batch, out_features].
      local: ``local(layout, operands, axes, scatter)`` gives the function of one device's part, which adds up the
        parts by ``add_parts(result, axes, scatter)``.
    """

    @custom_partitioning
    def whole(*operands):
        return local(layout, operands, (), None)(*operands)

    def partition(mesh, arg_shapes, result_shape):
        axes = _factor_axes(op, mesh, layout, arg_shapes, result_shape)

        final, scatter = _result_axes(op, mesh, axes, result_shape)

        def sharding(*entries: Axes) -> NamedSharding:
            return NamedSharding(mesh, PartitionSpec(*(entry or None for entry in entries)))

        piece = Layout(
            layout.pattern,
            layout.in_features // parts_of(mesh, axes["w"]),
            layout.out_features // parts_of(mesh, axes["o"]),
        )

        def part(*operands):
            return local(piece, operands, axes[SUMMED[op]], scatter)(*operands)

        # The extra operands follow the result: what its sum leaves split, they are split by.
        arguments = [sharding(*(axes[f] for f in factors)) for factors in _OPERANDS[op]]
        arguments += [sharding(final[0], final[2])] * extras
        return mesh, part, sharding(*final), tuple(arguments)

    rule, options = _rule(op, layout, extras)
    whole.def_partition(partition=partition, sharding_rule=rule, **options)
    return whole


def needs_partitioning(context: Any) -> bool:
    """Whether a lowering context compiles for several devices that the partitioner fills (not `jax.shard_map`).

    Meshes of explicit axis types are left out: there `explicit` has split the operands already, and JAX 0.11 and 0.12
    cannot lower collectives inside the partitioning callback.
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
