"""How a product is split where `jax.jit` spreads its operands over devices.

A custom call is opaque to XLA's partitioner, which would gather every operand. So a product that is compiled for
several devices is wrapped in `custom_partitioning`, with a Shardy rule that says how shardings propagate and a callback
that computes each device's part. Factors name the axes of operands (see `meshes`).

Only whole windows and whole column blocks can be split, so windows are replicated where in_features is padded, and
columns where out_features is. The sum over a sharded factor is one all-reduce of the result, or one reduce-scatter
where the result is wanted split over those mesh axes. Where two factors want one mesh axis, the weight keeps it:
activations move, weights never.

On meshes of explicit axis types `explicit` splits a product before it gets here. Under `jax.shard_map` nothing of this
is needed: there a product is local, and sums are written by the user.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_nmsparse.layout import Layout
from jax_nmsparse.meshes import SUMMED, UNSPLIT, Axes, Factors, factors, padded_spec, parts_of, scatter_axis


def _rule(op: str, layout: Layout, operands: Sequence[Factors], result: Factors) -> tuple[str, dict[str, Any]]:
    """The Shardy rule: einsum-like, with compound factors for features that are windows or column blocks."""
    whole_in, whole_out = _splittable(layout)
    weights = [f for f in (*operands, result) if UNSPLIT & set(f)]
    # Shardy refuses compound factors of size 1.
    columns = ("o" if layout.bn == 1 else "(o n)") if whole_out else "f"
    features = {"w": "(w r)" if whole_in else "i", "o": columns, "c": columns}

    def term(names: Factors) -> str:
        return " ".join(names if names in weights else (features.get(f, f) for f in names))

    rule = f"{', '.join([*map(term, operands), 'z'])} -> {term(result)}"
    # In order of appearance, as Shardy demands.
    used = list(dict.fromkeys(re.findall(r"\w+", rule)))
    fixed = UNSPLIT | {"r", "i", "f", "z"} | (set() if whole_in else {"w"}) | (set() if whole_out else {"o"})
    summed = [f for f in used if f.startswith(SUMMED[op])]
    options: dict[str, Any] = {
        "reduction_factors": tuple(f for f in summed if f not in fixed),
        "need_replication_factors": tuple(f for f in used if f in fixed),
    }
    if "r" in used:
        options["r"] = layout.rows_per_window
    return rule, options


def _splittable(layout: Layout) -> tuple[bool, bool]:
    """Whether windows and column blocks can be split: there are several, and nothing is padded."""
    whole_in = layout.windows > 1 and layout.padded_in == layout.in_features
    return whole_in, layout.out_blocks > 1 and layout.padded_out == layout.out_features


def _spec(array: Any) -> tuple[Axes, ...]:
    """What splits each axis of an array that the partitioner describes; nothing where it has no named sharding."""
    return padded_spec(getattr(array.sharding, "spec", ()), len(array.shape))


def _factor_axes(mesh, layout: Layout, operands, result) -> dict[str, Axes]:
    """The mesh axes that split each factor: those of the operands, the weight's first.

    Args:
      mesh: The mesh.
      layout: Of the whole weight.
      operands: (array, factors) of the first three operands.
      result: (array, factors).
    """
    sizes: dict[str, int] = {}
    wanted: dict[str, list[Axes]] = {}
    for array, names in [*sorted(operands, key=lambda pair: not UNSPLIT & set(pair[1])), result]:
        for factor, size, axes in zip(names, array.shape, _spec(array), strict=True):
            sizes[factor] = size
            wanted.setdefault(factor, []).extend([axes] if axes else [])
    whole_in, whole_out = _splittable(layout)
    sizes |= {"w": layout.windows if whole_in else 1, "o": layout.out_blocks if whole_out else 1}
    used: set[str] = set()
    chosen: dict[str, Axes] = dict.fromkeys(UNSPLIT, ())
    for factor in ("w", "o", *sorted(sizes.keys() - UNSPLIT - {"w", "o"})):
        axes = tuple(a for a in (wanted[factor] or [()])[0] if a not in used)
        chosen[factor] = axes if sizes[factor] % parts_of(mesh, axes) == 0 else ()
        used.update(chosen[factor])
    return chosen


def _result_axes(mesh, axes: dict[str, Axes], added: Axes, names: Factors, result) -> tuple[list[Axes], int | None]:
    """What splits each axis of the result, and which of them its sum leaves split, if any."""
    natural = [axes[factor] for factor in names]
    scatter = scatter_axis(natural, added, _spec(result))
    if scatter is None or names[scatter] in UNSPLIT or result.shape[scatter] % parts_of(mesh, natural[scatter] + added):
        return natural, None
    return [have + (added if i == scatter else ()) for i, have in enumerate(natural)], scatter


def partitioned(
    op: str, layout: Layout, avals: Sequence[Any], local: Callable[..., Callable], meaning: str
) -> Callable:
    """The operation as a function that XLA's partitioner can split.

    Args:
      op: "spmm", "spmm_t" or "sddmm".
      layout: Of the whole weight.
      avals: Of the operands: the first three, scales and bias.
      local: ``local(layout, operands, axes, scatter)`` gives the function of one device's part, which adds up the
        parts by ``add_parts(result, axes, scatter)``.
      meaning: Everything that `local` depends on. A program holds of a partitioning callback only its address, which
        JAX can be told to leave out of the key of the persistent compilation cache; so a digest of what the callback
        computes goes with the operands, as a constant.
    """
    batch = avals[2].ndim - 3
    names, result_names = factors(op, batch, avals[0].ndim - batch - 1, len(avals) - 3)

    digest = int.from_bytes(hashlib.sha256(meaning.encode()).digest()[:8], "little")

    @custom_partitioning
    def whole(*operands):
        *operands, _ = operands
        return local(layout, operands, (), None)(*operands)

    def partition(mesh, arg_shapes, result_shape):
        described = list(zip(arg_shapes[:3], names[:3], strict=True))
        axes = _factor_axes(mesh, layout, described, (result_shape, result_names))
        added = tuple(a for f, axes in sorted(axes.items()) if f.startswith(SUMMED[op]) for a in axes)
        final, scatter = _result_axes(mesh, axes, added, result_names, result_shape)
        # Scales and bias follow the result: what its sum leaves split, they are split by.
        axes["c"] = final[-1]

        def sharding(entries: Sequence[Axes]) -> NamedSharding:
            return NamedSharding(mesh, PartitionSpec(*(entry or None for entry in entries)))

        piece = Layout(
            layout.pattern,
            layout.in_features // parts_of(mesh, axes["w"]),
            layout.out_features // parts_of(mesh, axes["o"]),
        )

        def part(*operands):
            *operands, _ = operands
            return local(piece, operands, added, scatter)(*operands)

        arguments = [sharding([axes[f] for f in operand]) for operand in names]
        return mesh, part, sharding(final), (*arguments, sharding([()]))

    rule, options = _rule(op, layout, names, result_names)
    whole.def_partition(partition=partition, sharding_rule=rule, **options)
    return lambda *operands: whole(*operands, jnp.array([digest & 0xFFFFFFFF, digest >> 32], jnp.uint32))


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
