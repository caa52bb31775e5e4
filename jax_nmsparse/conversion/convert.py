"""Whole models: `sparsify` and `densify`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flax import nnx

from jax_nmsparse.conversion.modules import densify_module, sparsify_module
from jax_nmsparse.conversion.report import Report
from jax_nmsparse.conversion.rules import Rules
from jax_nmsparse.conversion.trees import densify_variables, sparsify_variables
from jax_nmsparse.pattern import NMPattern


def sparsify(
    model: Any,
    rules: Rules | NMPattern | str,
    *,
    method: str = "magnitude",
    statistics: Mapping[str, Any] | None = None,
    masks: Mapping[str, Any] | None = None,
    donate: bool = False,
    progress: bool = False,
) -> tuple[Any, Report]:
    """Converts the layers of a model to N:M sparse ones, by rules.

    Rules map regular expressions to a pattern, a `Rule`, or None for dense. Each is searched in the path of a leaf,
    ``encoder/mlp/up/kernel`` or ``embed/embedding``; the first that is found counts, what none matches stays dense::

        {"attention": None, "mlp/(up|down)/kernel": "8:32", "embedding$": "2:4", "kernel$": Rule("2:4", dtype="int8")}

    A pattern instead of rules means all kernels. Embedding tables become `NMSparseEmbed`, whose groups run along the
    features. A key of a tree that is no string counts as its text; one that contains "/" reads like nested ones.

    Memory: layers are converted one after the other, and each dense kernel is let go of before the next. An NNX module
    is changed in place, so its kernels are free as soon as nobody else holds them. A linen tree belongs to the caller
    and holds its kernels; donate deletes each one when it has been packed, so that at most one layer is in memory twice
    (the tree is of no use afterwards). Arrays of NumPy cannot be deleted.

    All or nothing: rules, masks, statistics, places in the model and, for "sparsegpt" and quantised values, the numbers
    themselves (finite weights, an H that can be factorised) are checked for every layer before the first is changed.
    What can still fail half-way is what nobody can foresee: no memory, an interrupt, numbers that overflow in the
    updates of SparseGPT. An NNX module then has sparse layers up to there and dense ones after; without donate a linen
    tree is as it was.

    While tracing (`jax.jit`, `jax.eval_shape`; `nnx.jit`, `nnx.eval_shape`) it works too: return the model alone, since
    a report is no JAX type. Errors of layers are None then, nothing is deleted, and what depends on numbers is not
    checked; so ``jax.eval_shape(lambda tree: sparsify(tree, rules)[0], tree)`` says what a checkpoint is restored into.

    Args:
      model: Parameters or variables of a linen model (nested mappings; `nn.Partitioned` boxes are taken off), or an
        `nnx.Module`.
      rules: See above.
      method: "magnitude", "wanda" or "sparsegpt", where a rule names none.
      statistics: Path of a layer -> `pruning.Statistics`, as `pruning.calibrate` returns them; needed by "wanda" and
        "sparsegpt". Where they have x^T x, the report says the error of the layer's output.
      masks: Masks, bool or uint8, of the kernels' shapes from elsewhere (jaxpruner): nested like the parameters, or by
        path; None where there is none. A layer that has one keeps what is True, whatever the method. A mask that keeps
        more than its pattern raises; one that keeps less is fine.
      donate: Delete the dense kernels, whoever else holds them.
      progress: Show a progress bar on standard error.

    Returns:
      The model and a `Report`, which prints as a table. Of linen: variables ``{"params": ..., "nm_mask": ...}`` for the
      same model with `NMSparseDense` for `nn.Dense`, `NMSparseDenseGeneral` for `nn.DenseGeneral` and `NMSparseEmbed`
      for `nn.Embed`, under the same paths; other collections are kept. Of NNX: the same module, whose layers were
      replaced (another one only where the model itself is a single layer).

    Raises:
      ValueError, TypeError: For a rule that matches nothing or cannot be followed, missing statistics or some that do
        not fit, masks of another shape or dtype, of no sparse layer, or that keep more than their pattern, and as
        `prune` and `quantize`, naming the layer, before anything was changed; see above. For a traced mask, and for
        leaves that are no arrays.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp, jax_nmsparse as nms
      >>> net = nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(4)])
      >>> params = net.init(jax.random.key(0), jnp.ones((1, 16)))
      >>> variables, report = nms.sparsify(params, {"layers_0": "2:4"})
      >>> [layer.pattern for layer in report.layers]
      ['2:4', 'dense']
      >>> sparse = nn.Sequential([nms.NMSparseDense(32, pattern="2:4"), nn.relu, nn.Dense(4)])
      >>> sparse.apply(variables, jnp.ones((1, 16))).shape
      (1, 4)
    """
    options: dict[str, Any] = {"method": method, "statistics": statistics, "masks": masks}
    if isinstance(model, nnx.Module):
        return sparsify_module(model, rules, donate=donate, progress=progress, **options)
    if isinstance(model, Mapping):
        return sparsify_variables(model, rules, donate=donate, progress=progress, **options)
    raise TypeError(
        f"sparsify: the model is a {type(model).__name__}, expected an nnx.Module, or parameters of a linen model as "
        "nested mappings"
    )


def densify(model: Any) -> Any:
    """The inverse of `sparsify`, as far as there is one: dense kernels with zeros where weights were dropped.

    Args:
      model: Variables of a linen model with its "nm_mask" collection, or an `nnx.Module`, which is changed in place.

    Returns:
      Variables for the model with the dense layers of Flax, or the module.

    Raises:
      ValueError: For an NNX layer with an activation of its own, which no dense layer computes; for packed values
        without their mask.

    Example:
      >>> from flax import nnx
      >>> import jax_nmsparse as nms
      >>> model, _ = nms.sparsify(nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0))), "2:4")
      >>> type(model.layers[0]).__name__, type(nms.densify(model).layers[0]).__name__
      ('NMSparseLinear', 'Linear')
    """
    if isinstance(model, nnx.Module):
        return densify_module(model)
    if isinstance(model, Mapping):
        return densify_variables(model)
    raise TypeError(f"densify: the model is a {type(model).__name__}, expected an nnx.Module or nested mappings")
