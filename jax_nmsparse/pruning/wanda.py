"""Wanda: magnitudes weighted by how large the inputs are that they multiply."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_nmsparse.array import check_dense
from jax_nmsparse.pruning.calibration import Statistics
from jax_nmsparse.pruning.selection import score_dtype


def wanda_scores(dense: ArrayLike, inputs: Statistics) -> jax.Array:
    """``score[k, j] = |W[k, j]| * ||x[:, k]||``: what removing one weight adds to the error of the product.

    Args:
      dense: ``[..., in_features, out_features]``.
      inputs: Of the layer's inputs; `Statistics` of leading axes broadcast against those of dense.

    Returns:
      float32 (float64 where an operand is) of the shape of dense. An input that was never active scores 0.

    Raises:
      TypeError, ValueError: For a dense weight or statistics of another kind, dtype or shape, or without rows or
        columns.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_nmsparse.pruning import Statistics, wanda_scores
      >>> wanda_scores(jnp.array([[3.0], [-1.0]]), Statistics.from_inputs(jnp.array([[0.0, 3.0], [1.0, 4.0]]))).ravel()
      Array([3., 5.], dtype=float32)

    Source: Sun et al., "A Simple and Effective Pruning Approach for Large Language Models", ICLR 2024.
    """
    dense = check_dense("wanda_scores", dense)
    if not isinstance(inputs, Statistics):
        raise TypeError(f"wanda_scores: inputs is a {type(inputs).__name__}, expected Statistics")
    shape = inputs.squares.shape
    lead = zip(shape[-2::-1], dense.shape[-3::-1], strict=False)
    if shape[-1:] != dense.shape[-2:-1] or len(shape) >= dense.ndim or any(a not in (1, b) for a, b in lead):
        raise ValueError(
            f"wanda_scores: inputs have squares of shape {shape}, expected {dense.shape[:-1]} (= axes of dense but the "
            "last), or some that broadcast to it"
        )
    return _scores(dense, inputs)


@jax.jit
def _scores(dense: jax.Array, inputs: Statistics) -> jax.Array:
    dtype = score_dtype(dense.dtype, inputs.squares.dtype)
    return jnp.abs(dense.astype(dtype)) * jnp.sqrt(inputs.squares.astype(dtype))[..., None]
