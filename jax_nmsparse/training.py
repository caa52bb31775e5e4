"""Training weights that end up N:M: straight-through masks with decay (SR-STE), schedules, and statistics of masks.

The trained parameters stay dense and masks are recomputed from them in every step, so units can come back. Afterwards
`prune` keeps exactly the units of the last mask. Fine-tuning with a fixed mask needs nothing of this: the parameters of
`NMSparseDense` are the kept values alone.

Rules are those of `sparsify`, which converts the trained model by the same ones: ``{"head": None, "mlp/.*kernel":
"2:4", "attention/out/kernel": Rule("8:32", contracted=2)}``. The first that is found in the path of a leaf
("encoder/mlp/up/kernel") counts; None leaves it dense, as does no rule. Only leaves with two axes and more take part;
of more than two, the `Rule` says which are contracted. Groups run along the contracted axes, in leaves named
"embedding" along the features.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.typing import ArrayLike

from jax_nmsparse.array import check_dense, check_pattern
from jax_nmsparse.axes import fold_kernel
from jax_nmsparse.conversion.rules import Matcher, Rules
from jax_nmsparse.layout import Layout
from jax_nmsparse.pattern import NMPattern
from jax_nmsparse.pruning.selection import magnitude_elements, over_largest


def sr_ste(w: jax.Array, pattern: NMPattern | str, decay: ArrayLike = 2e-4, *, progress: ArrayLike = 1.0) -> jax.Array:
    """The weight with its smallest units set to zero, and a straight-through gradient with decay.

    With M the mask that magnitude pruning gives now: ``w * M`` forward, and for a gradient g of the result

        dw = g + decay * (1 - M) * w

    so pruned units are trained too, and shrink unless the loss holds them up: masks settle.

    Args:
      w: Float ``[..., in_features, out_features]``; groups run along in_features.
      pattern: The pattern, or a string such as "2:4".
      decay: lambda, a number of at least 0; 0 is the plain straight-through estimator. May be traced.
      progress: 0 to 1, may be traced: ``m - round((m - n) * progress)`` units of every group are kept, all at 0 and n
        at 1; see `cubic_schedule`.

    Returns:
      The masked weight, dense, of the shape and dtype of w. Only reverse mode is defined.

    Raises:
      ValueError, TypeError: For a w that is no float matrix with rows and columns, or a decay below 0.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_nmsparse.training import sr_ste
      >>> w = jnp.array([[1.0], [-3.0], [2.0], [0.5]])
      >>> sr_ste(w, "2:4").ravel(), jax.grad(lambda w: sr_ste(w, "2:4", 0.1).sum())(w).ravel()
      (Array([ 0., -3.,  2.,  0.], dtype=float32), Array([1.1 , 1.  , 1.  , 1.05], dtype=float32))

    Source: Zhou et al., "Learning N:M Fine-grained Structured Sparse Neural Networks From Scratch", ICLR 2021 (SR-STE).
    """
    pattern, w = check_pattern("sr_ste", pattern), check_dense("sr_ste", w)
    if not jnp.issubdtype(w.dtype, jnp.floating):
        raise TypeError(f"sr_ste: w has dtype {w.dtype.name}, expected a float dtype")
    _check_decay("sr_ste", decay)
    return _sr_ste(w, jnp.asarray(decay, jnp.float32), _kept_units(pattern, progress), pattern)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _sr_ste(w: jax.Array, decay: jax.Array, n: jax.Array, pattern: NMPattern) -> jax.Array:
    return jnp.where(_keep(w, n, pattern), w, 0)


def _sr_ste_forward(w: jax.Array, decay: jax.Array, n: jax.Array, pattern: NMPattern):
    keep = _keep(w, n, pattern)
    return jnp.where(keep, w, 0), (jnp.where(keep, 0, w), decay)


def _sr_ste_backward(pattern: NMPattern, residuals: tuple[jax.Array, jax.Array], g: jax.Array):
    pruned, decay = residuals
    dw = g + (decay * pruned.astype(jnp.float32)).astype(g.dtype)
    return dw, jnp.zeros_like(decay), np.zeros((), jax.dtypes.float0)


_sr_ste.defvjp(_sr_ste_forward, _sr_ste_backward)


def _check_decay(op: str, decay: Any) -> None:
    if isinstance(decay, Tracer):
        return
    if np.ndim(decay) or not jnp.issubdtype(jnp.result_type(decay), jnp.number):
        raise TypeError(f"{op}: decay is {decay!r}, expected a number")
    if not 0 <= float(decay) < np.inf:
        raise ValueError(
            f"{op}: decay is {decay}, expected a finite number of at least 0; below, pruned units would grow"
        )


def _keep(w: jax.Array, n: jax.Array | None, pattern: NMPattern) -> jax.Array:
    return magnitude_elements(w, n, Layout(pattern, *w.shape[-2:]))


def _kept_units(pattern: NMPattern, progress: ArrayLike) -> jax.Array:
    fraction = jnp.clip(jnp.asarray(progress, jnp.float32), 0, 1)
    return pattern.m - jnp.round((pattern.m - pattern.n) * fraction).astype(jnp.int32)


class SRSTEDense(nn.Dense):
    """`nn.Dense` whose kernel passes through `sr_ste`: the layer to train before `NMSparseDense` serves it.

    Parameters, initial values and arguments are those of `nn.Dense`, so a dense checkpoint continues sparse and the
    trained one converts by ``NMSparseDense.from_dense(params, pattern)``, which keeps exactly the units of the last
    mask.

    Attributes:
      pattern: The `NMPattern`, or a string such as "2:4".
      decay: As in `sr_ste`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_nmsparse.linen import NMSparseDense
      >>> from jax_nmsparse.training import SRSTEDense
      >>> x = jnp.ones((3, 64))
      >>> trained = SRSTEDense(48, pattern="2:4").init(jax.random.key(0), x)
      >>> sparse = NMSparseDense.from_dense(trained, "2:4")
      >>> y = NMSparseDense(48, pattern="2:4").apply(sparse, x)
      >>> bool(jnp.allclose(y, SRSTEDense(48, pattern="2:4").apply(trained, x), atol=1e-5))
      True
    """

    _: dataclasses.KW_ONLY
    pattern: NMPattern | str
    decay: float = 2e-4

    @nn.nowrap
    def param(self, name: str, *args: Any, **kwargs: Any) -> Any:
        value = super().param(name, *args, **kwargs)
        return sr_ste(value, self.pattern, self.decay) if name == "kernel" else value


def masked_forward(
    params: Any, rules: Rules | NMPattern | str, decay: ArrayLike = 0.0, *, progress: ArrayLike = 1.0
) -> Any:
    """Parameters for the forward pass: leaves that a rule matches pass through `sr_ste`, the others are unchanged.

    Call it inside the loss, so that gradients reach the dense parameters: ``model.apply({"params":
    masked_forward(params, rules)}, x)``. Any model and any tree of arrays will do, also `nnx.State`.

    Args:
      params: A tree of arrays.
      rules: As in `sparsify`; see the module. A pattern alone means all kernels.
      decay: As in `sr_ste`; leave 0 where `sr_ste_decay` adds it in the optimiser.
      progress: As in `sr_ste`.

    Returns:
      The same tree.

    Raises:
      ValueError: Where a rule matches no leaf, or does not say what is contracted.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_nmsparse.training import masked_forward
      >>> params = {"up": {"kernel": jnp.arange(4.0).reshape(4, 1), "bias": jnp.ones(1)}}
      >>> masked_forward(params, {"up/kernel": "1:4"})["up"]["kernel"].ravel()
      Array([0., 0., 0., 3.], dtype=float32)
    """
    return _map_matched(
        "masked_forward", lambda _, w, pattern: sr_ste(w, pattern, decay, progress=progress), params, rules
    )


class SRSTEState(NamedTuple):
    """State of `sr_ste_decay`: the number of steps."""

    count: jax.Array


def sr_ste_decay(
    rules: Rules | NMPattern | str,
    decay: ArrayLike | Callable[[jax.Array], ArrayLike],
    *,
    progress: Callable[[jax.Array], jax.Array] | None = None,
) -> optax.GradientTransformation:
    """The decay of SR-STE as an optax transformation: adds ``decay * (1 - M) * w`` to the gradient of matched leaves.

    Put it first in the chain, with `masked_forward` in the loss; both together are SR-STE.

    Args:
      rules: As in `sparsify`; see the module. A pattern alone means all kernels.
      decay: lambda, a number of at least 0, or an optax schedule: a function of the step (int32, 0 in the first
        update), such as ``optax.linear_schedule(0.0, 2e-4, 1000)``.
      progress: None, or the schedule that the loss passes to `masked_forward`, a function of the step.

    Returns:
      The transformation; its update needs params.

    Raises:
      ValueError, TypeError: For a decay below 0, and, at init, for a rule that matches no leaf. No rules at all are
        fine: everything stays dense.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from jax_nmsparse.training import sr_ste_decay
      >>> optimiser = optax.chain(sr_ste_decay({"kernel": "2:4"}, 0.1), optax.sgd(1.0))
      >>> params = {"kernel": jnp.array([[1.0], [-3.0], [2.0], [0.5]])}
      >>> gradients = {"kernel": jnp.zeros((4, 1))}
      >>> updates, _ = optimiser.update(gradients, optimiser.init(params), params)
      >>> updates["kernel"].ravel()
      Array([-0.1 , -0.  , -0.  , -0.05], dtype=float32)
    """
    if not callable(decay):
        _check_decay("sr_ste_decay", decay)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if params is None:
            raise ValueError("sr_ste_decay: update needs params; call optimiser.update(gradients, state, params)")
        now = 1.0 if progress is None else progress(state.count)
        strength = decay(state.count) if callable(decay) else decay
        pruned = _map_matched(
            "sr_ste_decay",
            lambda _, w, pattern: jnp.where(_keep(w, _kept_units(pattern, now), pattern), 0, w),
            params,
            rules,
            others=jnp.zeros_like,
        )
        updates = jax.tree.map(lambda u, p: u + (strength * p.astype(jnp.float32)).astype(u.dtype), updates, pruned)
        return updates, SRSTEState(jnp.asarray(optax.safe_increment(state.count)))

    def init(params: Any) -> Any:
        # For its errors: a rule that matches nothing, or cannot be followed.
        jax.eval_shape(lambda tree: _map_matched("sr_ste_decay", lambda _, w, __: w, tree, rules), params)
        return SRSTEState(jnp.zeros((), jnp.int32))

    return optax.GradientTransformation(init, update)


def cubic_schedule(begin: int, end: int, *, every: int = 1) -> Callable[[ArrayLike], jax.Array]:
    """How far pruning has come at a step: ``1 - (1 - (step - begin) / (end - begin))^3``, 0 before and 1 after.

    Pruned units grow fast while many are superfluous and slowly at the end. n changes a handful of times and is a
    traced number, so a training step compiles once.

    Args:
      begin: The last step at which nothing is pruned.
      end: The first step at which the pattern holds.
      every: Steps between changes.

    Returns:
      A function of the step (int, may be traced): float32 from 0 to 1, for ``progress``.

    Raises:
      ValueError: Where begin < end does not hold or every is below 1.

    Example:
      >>> from jax_nmsparse.training import cubic_schedule
      >>> schedule = cubic_schedule(10, 20)
      >>> [float(schedule(step)) for step in (10, 15, 20)]
      [0.0, 0.875, 1.0]

    Source: Zhu and Gupta, "To Prune, or Not to Prune", ICLR 2018 workshop.
    """
    if not begin < end or every < 1:
        raise ValueError(
            f"cubic_schedule: begin, end, every are {begin}, {end}, {every}; expected begin < end, every >= 1"
        )

    def progress(step: ArrayLike) -> jax.Array:
        step = jnp.asarray(step)
        done = jnp.where(step >= end, end - begin, (step - begin) // every * every)
        return 1 - (1 - jnp.clip(done / (end - begin), 0, 1)) ** 3

    return progress


def mask_statistics(
    params: Any, rules: Rules | NMPattern | str, previous: Any = None
) -> dict[str, dict[str, jax.Array]]:
    """Metrics of the masks of a step, for every leaf that a rule matches.

    Args:
      params: Now.
      rules: As in `sparsify`; see the module. A pattern alone means all kernels.
      previous: None, or the parameters some steps ago.

    Returns:
      Path -> ``kept_magnitude``, the share of ``sum |w|`` in kept units, which tends to 1 under SR-STE (and is 1 for a
      weight of zeros); and with previous ``flip_rate``, the share of all elements that were kept in one mask and not in
      the other, which tends to 0 as masks settle. float32 scalars; runs under jit.

    Raises:
      ValueError: For rules as in `masked_forward`, and for previous parameters of another structure or other shapes.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_nmsparse.training import mask_statistics
      >>> before, after = ({"kernel": jnp.array([[a], [2.0], [0.0], [0.0]])} for a in (1.0, 3.0))
      >>> float(mask_statistics(after, {"kernel": "1:4"}, before)["kernel"]["flip_rate"])
      0.5

    Source: the flip rate after Hu et al., "Accelerating Transformer Pre-training with 2:4 Sparsity", ICML 2024.
    """
    if previous is not None:
        _check_previous(params, previous)
    found: dict[str, dict[str, jax.Array]] = {}
    earlier: dict[str, jax.Array] = {}
    if previous is not None:
        _map_matched("mask_statistics", lambda path, w, _: earlier.setdefault(path, w), previous, rules)

    def measure(path: str, w: jax.Array, pattern: NMPattern) -> jax.Array:
        keep, magnitude = _keep(w, None, pattern), jnp.abs(w.astype(jnp.float32))
        (magnitude,) = over_largest(magnitude, magnitude)
        total = jnp.sum(magnitude)
        found[path] = {"kept_magnitude": jnp.where(total == 0, 1, jnp.sum(jnp.where(keep, magnitude, 0)) / total)}
        if previous is not None:
            flipped = jnp.sum(keep != _keep(earlier[path], None, pattern), dtype=jnp.float32)
            found[path]["flip_rate"] = flipped / max(1, w.size)
        return w

    _map_matched("mask_statistics", measure, params, rules)
    return found


def _check_previous(params: Any, previous: Any) -> None:
    shapes, earlier = ({k: jnp.shape(v) for k, v in jax.tree_util.tree_leaves_with_path(t)} for t in (params, previous))
    if shapes != earlier:
        path = next(path for path in (*shapes, *earlier) if shapes.get(path) != earlier.get(path))
        raise ValueError(
            f"mask_statistics: params{jax.tree_util.keystr(path)} has shape {shapes.get(path)} in params and "
            f"{earlier.get(path)} in previous, expected the same parameters some steps ago"
        )


def _map_matched(
    op: str,
    function: Callable[[str, jax.Array, NMPattern], jax.Array],
    tree: Any,
    rules: Rules | NMPattern | str,
    others: Callable[[jax.Array], jax.Array] = lambda leaf: leaf,
) -> Any:
    """Applies function to (path, matrix, pattern) of the leaves that a rule matches and others to the rest.

    The matrix is ``[*stacked, in_features, out_features]``; what function returns has its shape and is folded back.
    """
    matcher = Matcher(rules, op)
    paths: list[str] = []

    def apply(keys: tuple, leaf: Any) -> Any:
        if jnp.ndim(leaf) < 2:
            return others(leaf)
        path = "/".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in keys)
        paths.append(path)
        rule, _ = matcher.find(path)
        if rule is None:
            return others(leaf)
        pattern, leaf = check_pattern(op, rule.pattern), check_dense(f"{op}: {path}", leaf)
        if path.rpartition("/")[2] == "embedding":
            return function(path, leaf.T, pattern).T
        if jnp.ndim(leaf) > 2 and rule.contracted is None:
            raise ValueError(
                f"{op}: {path} has shape {jnp.shape(leaf)}, of which the rule must say what is contracted: "
                f"Rule('{pattern}', contracted=..., stacked=...)"
            )
        matrix, _, _ = fold_kernel(f"{op}: {path}", leaf, rule.stacked, rule.contracted or 1)
        return function(path, matrix, pattern).reshape(leaf.shape)

    mapped = jax.tree_util.tree_map_with_path(apply, tree)
    matcher.check_all_used(paths)
    return mapped
