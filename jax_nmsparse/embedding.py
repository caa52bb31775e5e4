"""Rows of an embedding table that is stored as the packed weight of its tied head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_nmsparse.array import NMSparse
from jax_nmsparse.pattern import NMPattern


def lookup(w: NMSparse, indices: ArrayLike) -> jax.Array:
    """Columns of a weight: ``y[..., :] = W[:, indices[...]]``, the rows of the embedding table ``E = Wᵀ``.

    A tied head multiplies by Eᵀ, ``[features, num_embeddings]``, and contracts features; so that is the weight, and
    its groups run along features. A column of it is one run of q kept units and one mask entry in every window:
    looking up gathers exactly those and unpacks them, and no dense table ever exists. The memory read for an index is
    that of its packed column; the memory written is its dense row.

    Args:
      w: ``[features, num_embeddings]``.
      indices: Integers. Negative ones count from the end; others out of range give NaN, as in `jnp.take`.

    Returns:
      ``[*indices.shape, features]`` in the dtype of float values, float32 for quantised ones.

    Raises:
      TypeError, ValueError: For indices that are no integers, or a weight with batch axes.

    Example:
      >>> import jax.numpy as jnp, jax_nmsparse as nms
      >>> from jax_nmsparse.embedding import lookup
      >>> lookup(nms.NMSparse.fromdense(jnp.eye(4), "1:4"), jnp.array([2, 0]))
      Array([[0., 0., 1., 0.],
             [1., 0., 0., 0.]], dtype=float32)
    """
    if not isinstance(w, NMSparse):
        raise TypeError(f"lookup: w is a {type(w).__name__}, expected an NMSparse")
    indices = jnp.asarray(indices)
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        raise TypeError(f"lookup: indices have dtype {indices.dtype.name}, expected integers")
    w.check_arrays("lookup")
    if w.ndim != 2:
        raise ValueError(f"lookup: w has {w.ndim} axes, expected 2; use jax.vmap over its batch axes")
    if jnp.issubdtype(w.dtype, jnp.integer) and w.scales is None:
        raise TypeError(f"lookup: {w!r} holds integers without scales, which cannot say NaN; use quantize")
    rows = w.in_features
    dtype = w.dtype if w.scales is None else jnp.dtype(jnp.float32)
    if indices.size == 0:
        return jnp.zeros((*indices.shape, rows), dtype)
    flat = indices.ravel()
    flat = jnp.where(flat < 0, flat + w.out_features, flat)
    inside = (flat >= 0) & (flat < w.out_features)
    flat = jnp.where(inside, flat, 0)
    bk, bn = w.pattern.block
    block = flat // bn
    # Two index arrays with slices between them: the indexed axis comes first. [indices, windows, q, bk].
    values = jnp.moveaxis(w.values[:, block, :, :, flat % bn], 0, 1)[..., None]
    columns = NMSparse(
        values,
        w.mask[:, block],
        shape=(rows, flat.size),
        pattern=NMPattern(w.pattern.n, w.pattern.m, (bk, 1)),
        scales=None if w.scales is None else w.scales[flat],
    )
    found = jnp.where(inside[:, None], columns.todense().T, jnp.nan)
    return found.astype(dtype).reshape(*indices.shape, rows)


def embed(layer: Any, promote: Callable[..., Any], w: NMSparse, indices: ArrayLike) -> jax.Array:
    """What an embedding layer computes: rows in the dtype that promote gives the table; one row answers every id."""
    if not jnp.issubdtype(jnp.result_type(indices), jnp.integer):
        raise ValueError(f"{type(layer).__name__}: ids have dtype {jnp.result_type(indices).name}, expected integers")
    rows = lookup(w, indices if w.out_features > 1 else jnp.zeros_like(indices))
    (rows,) = promote(rows if w.scales is None else rows.astype(layer.param_dtype), inexact=False)
    return rows
