"""What every way to split a product over a mesh shares: factors, whole parts, and the sum of parts.

Axes of operands are named by factors; two axes of one factor are split together:

    factor       axis of                                        summed by
    b0, b1 ...   every operand and result: batch axes
    t0, t1 ...   x, g, y, dx: axes of tokens                    sddmm
    w            x and dx (in_features), values, mask: windows  spmm
    o            g and y (out_features), values, mask: columns  spmm_t
    c            scales and bias: columns of the result
    q k n v      values and mask: inside a window, never split
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax import lax

from jax_nmsparse.layout import Layout

Axes = tuple[str, ...]
"""Mesh axes that split one axis of an array, the slowest first."""


Factors = tuple[str, ...]
"""The factor of each axis of an array."""

SUMMED = {"spmm": "w", "spmm_t": "o", "sddmm": "t"}
"""First letter of the factors that each operation sums over."""

UNSPLIT = frozenset("qknv")


def factors(op: str, batch: int, tokens: int, extras: int = 0) -> tuple[list[Factors], Factors]:
    """The factors of the operands and of the result of an operation.

    Args:
      op: "spmm", "spmm_t" or "sddmm".
      batch: Number of batch axes of the weight.
      tokens: Number of axes of tokens.
      extras: Operands after the first three, each with the batch axes and out_features.
    """
    lead, rows = tuple(f"b{i}" for i in range(batch)), tuple(f"t{i}" for i in range(tokens))
    x, g = (*lead, *rows, "w"), (*lead, *rows, "o")
    values, mask = (*lead, *"woqkn"), (*lead, *"wov")
    operands, result = {
        "spmm": ([x, values, mask], g),
        "spmm_t": ([g, values, mask], x),
        "sddmm": ([x, g, mask], values),
    }[op]
    return [*operands, *([(*lead, "c")] * extras)], result


def axes_of(entry: Any) -> Axes:
    """One entry of a `PartitionSpec` as a tuple."""
    if entry is None:
        return ()
    return tuple(entry) if isinstance(entry, (tuple, list)) else (entry,)


def padded_spec(spec: Iterable[Any], ndim: int) -> tuple[Axes, ...]:
    """The mesh axes of every axis of an array, also of those that a `PartitionSpec` leaves out."""
    entries = tuple(axes_of(entry) for entry in spec)
    return entries + ((),) * (ndim - len(entries))


def parts_of(mesh: Any, axes: Axes) -> int:
    """Into how many parts mesh axes split an array."""
    return int(np.prod([mesh.shape[a] for a in axes], dtype=np.int64))


def check_whole(op: str, layout: Layout, parts_in: int, parts_out: int) -> None:
    """Raises where a weight cannot be cut into so many parts of whole windows and whole column blocks."""
    for name, size, unit, parts, what in (
        ("in_features", layout.in_features, layout.rows_per_window, parts_in, "windows"),
        ("out_features", layout.out_features, layout.bn, parts_out, "column blocks"),
    ):
        if parts > 1 and size % (unit * parts):
            raise ValueError(
                f"{op}: {name} is {size}, expected a multiple of {unit * parts} (= {parts} parts of whole {what} of "
                f"{unit}, pattern {layout.pattern}); pad the dense weight (placement.pad) or leave that axis whole"
            )


def add_parts(y: jax.Array, axes: Axes, scatter: int | None) -> jax.Array:
    """The sum of parts over mesh axes: whole on every device, or each device's piece of the axis `scatter`."""
    if not axes:
        return y
    if scatter is None:
        return lax.psum(y, axes)
    return lax.psum_scatter(y, axes, scatter_dimension=scatter, tiled=True)


def scatter_axis(natural: Iterable[Axes], added: Axes, wanted: Iterable[Axes] | None) -> int | None:
    """The axis of a result that its sum leaves split over the summed mesh axes, where that is what is wanted."""
    if not added or wanted is None:
        return None
    return next((i for i, (have, want) in enumerate(zip(natural, wanted, strict=True)) if want == have + added), None)
