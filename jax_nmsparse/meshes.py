"""What every way to split a weight over a mesh shares: mesh axes, whole parts, and the sum of parts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax import lax

from jax_nmsparse.layout import Layout

Axes = tuple[str, ...]
"""Mesh axes that split one axis of an array, the slowest first."""


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
