"""Pruning one weight by scores; magnitude is the default score."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_nmsparse import explicit
from jax_nmsparse import layout as layout_lib
from jax_nmsparse.array import NMSparse, check_dense, check_pattern
from jax_nmsparse.layout import Layout
from jax_nmsparse.pattern import NMPattern

METHODS = ("magnitude",)


def prune(dense: ArrayLike, pattern: NMPattern | str, *, scores: Any = None, method: str = "magnitude") -> NMSparse:
    """Keeps the n units of largest score in every group of m; runs under `jax.jit` too.

    The score of a unit is the sum of its elements' scores, by default of ``|dense|``. Ties go to the lowest position
    along in_features, so the result is deterministic; NaN and Inf score highest.

    Args:
      dense: ``[..., in_features, out_features]``. Groups run along in_features (axis -2), the contraction axis.
      pattern: The pattern, or a string such as "2:4".
      scores: Optional real scores of the shape of dense; a boolean mask keeps what is True first.
      method: "magnitude"; ignored where scores are given.

    Returns:
      The `NMSparse` weight in the dtype of dense.

    Raises:
      ValueError, TypeError: For a wrong shape, dtype, pattern or method.

    Example:
      >>> import jax.numpy as jnp, jax_nmsparse as nms
      >>> w = nms.prune(jnp.array([[1.0], [-3.0], [2.0], [0.5]]), "2:4")
      >>> w.todense().ravel()
      Array([ 0., -3.,  2.,  0.], dtype=float32)

    Source: magnitude pruning after Han et al., NeurIPS 2015; N:M groups after Zhou et al., ICLR 2021.
    """
    pattern = check_pattern("prune", pattern)
    dense = check_dense("prune", dense)
    if method not in METHODS:
        raise ValueError(f"prune: method is {method!r}, expected one of {', '.join(METHODS)}, or pass scores")
    if scores is not None:
        scores = jnp.asarray(scores)
        if scores.shape != dense.shape:
            raise ValueError(f"prune: scores has shape {scores.shape}, expected {dense.shape} (= shape of dense)")
        if jnp.issubdtype(scores.dtype, jnp.complexfloating):
            raise TypeError(f"prune: scores has dtype {scores.dtype.name}, expected real numbers or bool")
    mask = _scored_mask(dense, scores, Layout(pattern, *dense.shape[-2:]))
    return NMSparse._from_units(dense, mask, pattern)


@functools.partial(explicit.by_parts, trailing=(2, 2))
@jax.jit(static_argnums=2)
def _scored_mask(dense: jax.Array, scores: jax.Array | None, layout: Layout) -> jax.Array:
    precise = jnp.float64 if jnp.float64 in (dense.dtype, getattr(scores, "dtype", None)) else jnp.float32
    element = jnp.abs(dense.astype(precise)) if scores is None else scores.astype(precise)
    # Padding must lose against any score inside, also against negative ones.
    units = layout_lib.to_units(element, layout)
    unit = units[..., 0, 0] if layout.pattern.is_elementwise else jnp.sum(units, axis=(-2, -1))
    first_row = jnp.arange(layout.windows * layout.window_units) * layout.bk
    outside = (first_row >= layout.in_features).reshape(layout.windows, 1, layout.window_units)
    return layout_lib.select(jnp.where(outside, -jnp.inf, unit), layout)
