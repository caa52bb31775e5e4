"""What differs between the supported JAX versions, or is not public, in one place."""

from __future__ import annotations

import jax
from jax import lax


def varying_axes(x) -> frozenset[str]:
    """Manual mesh axes (under `jax.shard_map`) over which x varies."""
    manual = getattr(jax.typeof(x), "manual_axis_type", None)
    return frozenset(getattr(manual, "varying", ()))


def unify_varying(*operands: jax.Array) -> tuple[jax.Array, ...]:
    """Casts all operands to the union of their varying axes.

    A primitive whose operands vary over different axes would get wrong gradients under shard_map without an error: the
    transpose of this cast is the psum that those gradients need.
    """
    union = frozenset().union(*(varying_axes(x) for x in operands))
    missing = [tuple(sorted(union - varying_axes(x))) for x in operands]
    return tuple(lax.pcast(x, axes, to="varying") if axes else x for x, axes in zip(operands, missing, strict=True))
