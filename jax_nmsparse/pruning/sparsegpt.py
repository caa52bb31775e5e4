"""SparseGPT: pruning by second-order information, the kept weights making up for what is removed."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_nmsparse import explicit
from jax_nmsparse import layout as layout_lib
from jax_nmsparse.array import check_dense, check_pattern
from jax_nmsparse.layout import Layout
from jax_nmsparse.pattern import NMPattern
from jax_nmsparse.pruning.calibration import Statistics, check_statistics
from jax_nmsparse.pruning.selection import score_dtype

_BLOCK_ROWS = 128

_dot = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)


@jax.jit(static_argnames="pattern")
def sparsegpt(
    dense: jax.Array, pattern: NMPattern | str, inputs: Statistics, *, damping: float | jax.Array = 0.01
) -> tuple[jax.Array, jax.Array]:
    """Prunes so that ``||x W - x W'||^2`` stays small, where x are the inputs of calibration.

    Rows of W (in_features) are decided and fixed in ascending order. With ``H = x^T x / tokens + damping *
    mean(diag)``, ``H^-1 = U^T U`` (U upper triangular) and the rows before row i fixed:

    * at the first row of a group, every element of the group scores ``W_ij^2 / U_ii^2``, and the n units of largest
      summed score are kept;
    * a removed element leaves the error ``E_ij = W_ij / U_ii``, a kept one none;
    * all later rows k make up for it: ``W_kj -= U_ik E_ij``.

    The updates are left-looking: a block of 128 rows (or one group, where that is longer) first takes the errors of all
    blocks before it in one matmul, a group those of its block, a row those of its group. So the work is 2 in^2 out
    FLOPs in matmuls plus in^3 for U, and the only large buffers are W, E and U.

    An input that was never active scores lowest and, where it is kept all the same, keeps its weight.

    Args:
      dense: Float ``[..., in_features, out_features]``.
      pattern: The pattern, or a string such as "2:4".
      inputs: `Statistics` with gram, with the leading axes of dense or none.
      damping: As above. 0.01 is the authors'.

    Returns:
      ``(W', mask)``: the updated weight in the dtype of dense, zero where nothing is kept, and uint32
      ``[..., windows, out_blocks, words]``. NaN where H is not positive definite; `prune` checks that outside jit.

    Raises:
      TypeError, ValueError: For a dense weight or statistics of another kind, dtype or shape, statistics without gram,
        and arrays that are split over explicit mesh axes.

    Example:
      >>> import jax, jax.numpy as jnp, jax_nmsparse as nms
      >>> x, w = jax.random.normal(jax.random.key(0), (256, 32)), jax.random.normal(jax.random.key(1), (32, 8))
      >>> x = x @ jax.random.normal(jax.random.key(2), (32, 32))
      >>> inputs = nms.pruning.Statistics.from_inputs(x)
      >>> error = lambda method: jnp.linalg.norm(x @ w - x @ nms.prune(w, "2:4", method=method, inputs=inputs))
      >>> bool(error("sparsegpt") < error("wanda"))
      True

    Source: Frantar and Alistarh, "SparseGPT: Massive Language Models Can Be Accurately Pruned in One-Shot", ICML 2023.
    """
    pattern, dense = check_pattern("sparsegpt", pattern), check_dense("sparsegpt", dense)
    check_statistics("sparsegpt", inputs, dense.shape)
    if inputs.gram is None:
        raise ValueError("sparsegpt: inputs hold no gram; gather them with gram=True")
    explicit.check_whole_array("sparsegpt", "dense", dense)
    explicit.check_whole_array("sparsegpt", "the gram of inputs", inputs.gram)
    layout = Layout(pattern, *dense.shape[-2:])
    dtype = score_dtype(dense.dtype, inputs.gram.dtype)
    factor = functools.partial(_inverse_factor, damping=damping, dtype=dtype)
    weights = dense.reshape(-1, *dense.shape[-2:])
    if inputs.gram.ndim == 2:
        shared = factor((inputs.gram, inputs.tokens))
        updated, mask = lax.map(lambda w: _prune_rows(w.astype(dtype), shared, layout), weights)
    else:
        sums = (inputs.gram.reshape(-1, *inputs.gram.shape[-2:]), inputs.tokens.reshape(-1))
        updated, mask = lax.map(lambda w: _prune_rows(w[0].astype(dtype), factor(w[1]), layout), (weights, sums))
    return updated.reshape(dense.shape).astype(dense.dtype), mask.reshape(*dense.shape[:-2], *mask.shape[1:])


@jax.jit(static_argnames="dtype")
def is_positive_definite(inputs: Statistics, *, damping: float, dtype: Any) -> jax.Array:
    """Whether H of `sparsegpt` can be factorised, of every layer where inputs are stacked."""
    gram: Any = inputs.gram
    dtype = score_dtype(dtype, gram.dtype)

    def one(sums: tuple[jax.Array, jax.Array]) -> jax.Array:
        r = _factor(sums, damping, dtype)
        return jnp.all(jnp.isfinite(r)) & jnp.all(jnp.diagonal(r) > 0)

    return jnp.all(lax.map(one, (gram.reshape(-1, *gram.shape[-2:]), jnp.asarray(inputs.tokens).reshape(-1))))


def _factor(sums: tuple[jax.Array, jax.Array], damping: Any, dtype: Any) -> jax.Array:
    """R, upper triangular, with ``R R^T = H``: a Cholesky factor from the other end."""
    gram, tokens = sums
    h = gram.astype(dtype) / jnp.maximum(tokens, 1).astype(dtype)
    mean = jnp.mean(jnp.diagonal(h))
    h += jnp.where(mean > 0, damping * mean, 1.0) * jnp.eye(h.shape[0], dtype=dtype)
    return jnp.linalg.cholesky(h[::-1, ::-1], symmetrize_input=False)[::-1, ::-1]


def _inverse_factor(sums: tuple[jax.Array, jax.Array], damping: Any, dtype: Any) -> jax.Array:
    """U, upper triangular, with ``U^T U = H^-1``.

    Where ``H = R R^T``, ``H^-1 = (R^-1)^T R^-1``: one factorisation and one triangular inverse, and H^-1 itself is
    never formed.
    """
    r = _factor(sums, damping, dtype)
    return jax.scipy.linalg.solve_triangular(r, jnp.eye(r.shape[0], dtype=dtype), lower=False)


def _prune_rows(w: jax.Array, u: jax.Array, layout: Layout) -> tuple[jax.Array, jax.Array]:
    """Weight and mask of one matrix ``[in_features, out_features]``."""
    group = layout.pattern.m * layout.bk
    block = group * max(1, min(_BLOCK_ROWS, layout.padded_in) // group)
    rows = -(-layout.padded_in // block) * block
    beyond = rows - layout.in_features
    w = jnp.pad(w, ((0, beyond), (0, layout.padded_out - layout.out_features)))
    # Padding rows neither give nor take errors.
    u = jnp.pad(u, ((0, beyond), (0, beyond))) + jnp.diag(jnp.pad(jnp.ones(beyond, u.dtype), (rows - beyond, 0)))
    inside = jnp.arange(rows // layout.bk) * layout.bk < layout.in_features

    def prune_block(errors: jax.Array, start: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        columns = lax.dynamic_slice_in_dim(u, start, block, axis=1)
        current = lax.dynamic_slice_in_dim(w, start, block) - _dot(columns.T, errors)
        within = lax.dynamic_slice_in_dim(columns, start, block)
        units = lax.dynamic_slice_in_dim(inside, start // layout.bk, block // layout.bk)
        here, updated, keep = _prune_block(current, within, units, layout)
        return lax.dynamic_update_slice_in_dim(errors, here, start, axis=0), (updated, keep)

    _, (updated, keep) = lax.scan(prune_block, jnp.zeros_like(w), jnp.arange(0, rows, block))
    updated = updated.reshape(w.shape)[: layout.in_features, : layout.out_features]
    keep = keep.reshape(-1, layout.out_blocks)[: layout.windows * layout.window_units]
    keep = jnp.swapaxes(keep.reshape(layout.windows, layout.window_units, layout.out_blocks), 1, 2)
    return updated, layout_lib.pack_bits(keep)


def _prune_block(
    w: jax.Array, u: jax.Array, inside: jax.Array, layout: Layout
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Errors and weights ``[block, out]`` and kept units ``[groups, m, out_blocks]`` of the groups of one block."""
    m = layout.pattern.m
    group = m * layout.bk
    groups = w.shape[0] // group

    def prune_group(errors: jax.Array, args: tuple) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        index, rows, columns, inside = args
        current = rows - _dot(columns.T, errors) if groups > 1 else rows
        within = lax.dynamic_slice_in_dim(columns, index * group, group)
        pivots = jnp.diagonal(within)
        scores = jnp.square(current / pivots[:, None])
        scores = scores.reshape(m, layout.bk, layout.out_blocks, layout.bn).sum((1, 3))
        keep = layout_lib.best_units(jnp.where(inside[:, None], scores, -jnp.inf).T, layout.pattern.n).T
        elements = jnp.repeat(jnp.repeat(keep, layout.bk, axis=0), layout.bn, axis=1)

        def fix_row(errors: jax.Array, args: tuple) -> tuple[jax.Array, jax.Array]:
            row, weight, kept, column, pivot = args
            weight -= jnp.sum(column[:, None] * errors, axis=0)
            error = jnp.where(kept, 0, weight / pivot)
            return lax.dynamic_update_index_in_dim(errors, error, row, axis=0), jnp.where(kept, weight, 0)

        here, updated = lax.scan(
            fix_row,
            jnp.zeros_like(rows),
            (jnp.arange(group), current, elements, within.T, pivots),
            unroll=min(group, 4),
        )
        return lax.dynamic_update_slice_in_dim(errors, here, index * group, axis=0), (updated, keep)

    split = (
        jnp.arange(groups),
        w.reshape(groups, group, -1),
        jnp.moveaxis(u.reshape(-1, groups, group), 1, 0),
        inside.reshape(groups, m),
    )
    errors, (updated, keep) = lax.scan(prune_group, jnp.zeros_like(w), split)
    return errors, updated.reshape(w.shape), keep
