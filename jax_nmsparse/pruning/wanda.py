"""Wanda: magnitudes weighted by how large the inputs are that they multiply."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_nmsparse.pruning.calibration import Statistics
from jax_nmsparse.pruning.selection import score_dtype


@jax.jit
def wanda_scores(dense: jax.Array, inputs: Statistics) -> jax.Array:
    """``score[k, j] = |W[k, j]| * ||x[:, k]||``: what removing one weight adds to the error of the product.

    Args:
      dense: ``[..., in_features, out_features]``.
      inputs: Of the layer's inputs; `Statistics` of leading axes broadcast against those of dense.

    Returns:
      float32 (float64 where an operand is) of the shape of dense. An input that was never active scores 0.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_nmsparse.pruning import Statistics, wanda_scores
      >>> wanda_scores(jnp.array([[3.0], [-1.0]]), Statistics.from_inputs(jnp.array([[0.0, 3.0], [1.0, 4.0]]))).ravel()
      Array([3., 5.], dtype=float32)

    Source: Sun et al., "A Simple and Effective Pruning Approach for Large Language Models", ICLR 2024.
    """
    dtype = score_dtype(dense.dtype, inputs.squares.dtype)
    return jnp.abs(dense.astype(dtype)) * jnp.sqrt(inputs.squares.astype(dtype))[..., None]
