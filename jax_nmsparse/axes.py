"""Kernels of several axes: which are contracted, and how they fold into the two axes of a weight.

A kernel ``[*batch, *in_sizes, *out_sizes]`` is a weight ``[*batch, prod(in_sizes), prod(out_sizes)]``: groups run along
the contracted axes in row-major order.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_nmsparse.explicit import check_folds


def as_tuple(sizes: int | Sequence[int]) -> tuple[int, ...]:
    """One size or several, as a tuple."""
    return tuple(map(operator.index, sizes)) if isinstance(sizes, Sequence) else (operator.index(sizes),)


def check_batch_dims(label: str, batch_dims: Sequence[int]) -> None:
    if set(batch_dims) != set(range(len(batch_dims))):
        raise ValueError(f"{label}: batch axes are {tuple(batch_dims)}, expected leading axes: 0, 1, ...")


def normalize(label: str, axes: Sequence[int], ndim: int) -> tuple[int, ...]:
    """Axes from 0 on, of an x of ndim axes; ascending, as Flax contracts them."""
    positive = tuple(sorted(axis + ndim if axis < 0 else axis for axis in axes))
    if any(not 0 <= axis < ndim for axis in positive) or len(set(positive)) < len(positive):
        raise ValueError(f"{label}: axis is {tuple(axes)}, expected distinct axes of x, which has {ndim}")
    return positive


def fold(label: str, x: jax.Array, axis: Sequence[int], batch_dims: Sequence[int]) -> jax.Array:
    """x as ``[*batch, *rest, prod(contracted)]``; batch_dims and axis count from 0."""
    if set(axis) & set(batch_dims):
        raise ValueError(f"{label}: axis {tuple(axis)} and batch axes {tuple(batch_dims)} overlap")
    rest = [i for i in range(x.ndim) if i not in axis and i not in batch_dims]
    check_folds(f"{label}: x", x, [axis])
    moved = jnp.transpose(x, (*batch_dims, *rest, *axis))
    return moved.reshape(*moved.shape[: x.ndim - len(axis)], math.prod(x.shape[i] for i in axis))


def merge_names(names: Sequence[Any], batch: int, contracted: int) -> tuple[Any, ...]:
    """Names of mesh axes of a kernel, for its weight: those of axes that fold into one are put together."""

    def merged(part: Sequence[Any]) -> Any:
        used = [name for group in part if group for name in (group if isinstance(group, tuple) else (group,))]
        return None if not used else used[0] if len(used) == 1 else tuple(used)

    names = tuple(names)
    return (*names[:batch], merged(names[batch : batch + contracted]), merged(names[batch + contracted :]))


def fold_kernel(
    label: str, kernel: jax.Array, stacked: int, contracted: int
) -> tuple[jax.Array, tuple[int, ...], tuple[int, ...]]:
    """The kernel as ``[*stacked, prod(in_sizes), prod(out_sizes)]``, in_sizes and out_sizes.

    label: What errors begin with; empty where the caller says it.
    """
    begin = f"{label}: " if label else ""
    first, shape = stacked + contracted, jnp.shape(kernel)
    if contracted < 1 or stacked < 0 or len(shape) <= first:
        raise ValueError(
            f"{begin}the kernel has shape {shape} with {stacked} stacked and {contracted} contracted axes, expected "
            "at least one contracted axis, and one axis more"
        )
    in_sizes, out_sizes = shape[stacked:first], shape[first:]
    check_folds(f"{begin}the kernel", kernel, [range(stacked, first), range(first, len(shape))])
    return kernel.reshape(*shape[:stacked], math.prod(in_sizes), math.prod(out_sizes)), in_sizes, out_sizes
