"""Pruning one trained weight: by magnitude, by given scores, by Wanda or by SparseGPT."""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import ArrayLike

from jax_nmsparse.array import NMSparse, check_dense, check_pattern
from jax_nmsparse.layout import Layout
from jax_nmsparse.pattern import NMPattern
from jax_nmsparse.pruning.calibration import Statistics, check_statistics
from jax_nmsparse.pruning.selection import magnitude_mask, scored_mask
from jax_nmsparse.pruning.sparsegpt import is_positive_definite, sparsegpt
from jax_nmsparse.pruning.wanda import wanda_scores

METHODS = ("magnitude", "wanda", "sparsegpt")


def prune(
    dense: ArrayLike,
    pattern: NMPattern | str,
    *,
    scores: Any = None,
    method: str = "magnitude",
    inputs: Statistics | None = None,
    damping: float = 0.01,
) -> NMSparse:
    """Keeps the n units of largest score in every group of m; runs under `jax.jit` too.

    The score of a unit is the sum of its elements' scores. Ties go to the lowest position along in_features, so the
    result is deterministic; NaN and Inf score highest.

    * "magnitude": ``|W|``.
    * "wanda": ``|W| * ||x||``, from the norms of the inputs (`wanda_scores`).
    * "sparsegpt": ``W^2 / [H^-1]``, and the kept weights are updated to make up for what was removed (`sparsegpt`).

    Args:
      dense: ``[..., in_features, out_features]``. Groups run along in_features (axis -2), the contraction axis.
      pattern: The pattern, or a string such as "2:4".
      scores: Optional real scores of the shape of dense, instead of a method; a boolean mask keeps what is True first.
      method: "magnitude", "wanda" or "sparsegpt".
      inputs: `Statistics` of the layer's inputs, for "wanda" and "sparsegpt" (with gram); see `calibrate`. Statistics
        without leading axes serve all the weights along the leading axes of dense.
      damping: For "sparsegpt": the share of the mean squared input that is added to the diagonal of H.

    Returns:
      The `NMSparse` weight in the dtype of dense.

    Raises:
      ValueError, TypeError: For a wrong shape, dtype, pattern or method, missing or superfluous inputs, and, outside
        jit, for a "sparsegpt" whose H is not positive definite or whose weight is not finite.

    Example:
      >>> import jax.numpy as jnp, jax_nmsparse as nms
      >>> w = jnp.array([[1.0], [-3.0], [2.0], [0.5]])
      >>> nms.prune(w, "2:4").todense().ravel()
      Array([ 0., -3.,  2.,  0.], dtype=float32)
      >>> inputs = nms.pruning.Statistics.from_inputs(jnp.array([[8.0, 1.0, 1.0, 1.0]]))
      >>> nms.prune(w, "2:4", method="wanda", inputs=inputs).todense().ravel()
      Array([ 1., -3.,  0.,  0.], dtype=float32)

    Source: magnitude pruning after Han et al., NeurIPS 2015; N:M groups after Zhou et al., ICLR 2021.
    """
    pattern = check_pattern("prune", pattern)
    dense = check_dense("prune", dense)
    layout = Layout(pattern, *dense.shape[-2:])
    if method not in METHODS:
        raise ValueError(f"prune: method is {method!r}, expected one of {', '.join(METHODS)}, or pass scores")
    if (method == "magnitude" or scores is not None) and inputs is not None:
        raise ValueError("prune: inputs are given, but magnitude and scores need none; use method='wanda'")
    if scores is not None:
        if method != "magnitude":
            raise ValueError(f"prune: scores and method={method!r} are given; give one of them")
        scores = jnp.asarray(scores)
        if scores.shape != dense.shape:
            raise ValueError(f"prune: scores has shape {scores.shape}, expected {dense.shape} (= shape of dense)")
        if jnp.issubdtype(scores.dtype, jnp.complexfloating):
            raise TypeError(f"prune: scores has dtype {scores.dtype.name}, expected real numbers or bool")
        mask = scored_mask(scores, layout)
    elif method == "magnitude":
        mask = magnitude_mask(dense, layout)
    else:
        check_inputs(method, dense.shape, dense.dtype, inputs)
        if method == "sparsegpt":
            return _second_order(dense, pattern, inputs, damping)
        mask = scored_mask(wanda_scores(dense, cast("Statistics", inputs)), layout)
    return NMSparse._from_units(dense, mask, pattern)


def check_inputs(method: str, shape: tuple[int, ...], dtype: Any, inputs: Any) -> None:
    """Raises where inputs do not serve a method for a weight of a shape and dtype."""
    check_statistics("prune", inputs, shape, f" for method={method!r}")
    if method == "sparsegpt" and inputs.gram is None:
        raise ValueError("prune: inputs hold no gram, which method='sparsegpt' needs; gather them with gram=True")
    if method in METHODS[1:] and not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"prune: dense has dtype {jnp.dtype(dtype).name}, expected a float dtype for method={method!r}")


def check_second_order(dense: jax.Array, inputs: Any, damping: float) -> None:
    """Raises where "sparsegpt" could not prune a concrete weight: before its work, for a part of it."""
    if not bool(jnp.all(jnp.isfinite(dense.astype(jnp.float32)))):
        raise ValueError("prune: the dense weight holds NaN or Inf, expected finite numbers for method='sparsegpt'")
    if not bool(is_positive_definite(inputs, damping=damping, dtype=dense.dtype)):
        raise _indefinite(inputs, damping)


def _indefinite(inputs: Any, damping: float) -> ValueError:
    return ValueError(
        f"prune: x^T x of the inputs is not positive definite in {inputs.gram.dtype.name} with damping={damping}; "
        "raise damping or calibrate with more tokens"
    )


def _second_order(dense: jax.Array, pattern: NMPattern, inputs: Any, damping: float) -> NMSparse:
    updated, mask = sparsegpt(dense, pattern, inputs, damping=damping)
    if not isinstance(updated, Tracer) and not bool(jnp.all(jnp.isfinite(updated.astype(jnp.float32)))):
        check_second_order(dense, inputs, damping)
        raise _indefinite(inputs, damping)
    return NMSparse._from_units(updated, mask, pattern)
