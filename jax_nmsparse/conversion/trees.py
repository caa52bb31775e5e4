"""Conversion of the parameters of Flax linen models."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_nmsparse.conversion.kernels import Candidate, Job, each, named, plan
from jax_nmsparse.conversion.report import LayerReport, Report
from jax_nmsparse.linen import MASK_COLLECTION, NMSparseDenseGeneral, NMSparseEmbed
from jax_nmsparse.linen.variables import stored_description

_REMEDIES = {
    jax.ShapeDtypeStruct: "; jax.eval_shape(lambda tree: sparsify(tree, rules)[0], tree) gives shapes of the result",
    nnx.Param: "; give sparsify the nnx.Module itself, whose layers change, and not its state",
}


def as_variables(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Variables of a model as nested dicts that may be changed; arrays are not copied."""

    def copied(node: Any) -> Any:
        if isinstance(node, Mapping):
            return {key: copied(node[key]) for key in sorted(node, key=str)}
        return nn.meta.unbox(node)

    plain: dict[str, Any] = copied(tree)
    return plain if isinstance(plain.get("params"), dict) else {"params": plain}


def _candidates(params: dict[Any, Any], path: tuple[Any, ...] = ()) -> Iterator[Candidate]:
    for leaf in ("kernel", "embedding"):
        if leaf in params and not isinstance(params[leaf], dict):
            others = set(params) - {leaf, *(("bias",) if leaf == "kernel" else ())}
            array = params[leaf]
            if not isinstance(array, (jax.Array, np.ndarray)):
                name = f"sparsify: {'/'.join(map(str, (*path, leaf)))} is a {type(array).__name__}, expected an array"
                raise TypeError(name + _REMEDIES.get(type(array), ""))
            beside = ", ".join(sorted(map(str, others)))
            yield Candidate(
                path="/".join(map(str, path)),
                leaf=leaf,
                transposed=leaf == "embedding",
                shape=array.shape,
                dtype=array.dtype,
                contracted=1 if leaf == "embedding" and array.ndim == 2 else None,
                stacked=0,
                take=lambda leaf=leaf: params.pop(leaf),
                place=path,
                peek=lambda leaf=leaf: params[leaf],
                problem=f"it lies beside {beside}, which no N:M sparse layer has" if others else "",
            )
    for key, child in params.items():
        if isinstance(child, dict):
            yield from _candidates(child, (*path, key))


def _arrays(node: Any) -> Iterator[Any]:
    """The leaves; JAX could not sort keys of several types."""
    for child in node.values() if isinstance(node, dict) else ():
        yield from _arrays(child) if isinstance(child, dict) else (child,)


def _node(tree: dict[Any, Any], path: tuple[Any, ...], *, create: bool = False) -> dict[Any, Any]:
    for key in path:
        tree = tree.setdefault(key, {}) if create else tree[key]
    return tree


def sparsify_variables(
    tree: Mapping[str, Any], rules: Any, *, donate: bool, progress: bool, **options: Any
) -> tuple[dict[str, Any], Report]:
    """See `sparsify`."""
    variables = as_variables(tree)
    params = variables["params"]
    steps = plan(_candidates(params), rules, **options)
    _check_biases(params, [step for step in steps if isinstance(step, Job)])
    # An array that lies in two places must outlive the first.
    uses = collections.Counter(map(id, _arrays(variables)))
    reports: list[LayerReport] = []
    for job in each(steps, progress):
        if isinstance(job, LayerReport):
            reports.append(job)
            continue
        node = _node(params, job.candidate.place)
        w, report = job.run(donate=donate and uses[id(node[job.candidate.leaf])] == 1)
        reports.append(report)
        if job.candidate.leaf == "embedding":
            new = NMSparseEmbed.from_weight(w)
        else:
            in_sizes, features = job.sizes
            new = NMSparseDenseGeneral.from_weight(w, node.pop("bias", None), in_sizes=in_sizes, features=features)
        node.update(new["params"])
        masks = variables.setdefault(MASK_COLLECTION, {})
        _node(masks, job.candidate.place, create=True).update(new[MASK_COLLECTION])
    return variables, Report(tuple(reports))


def _check_biases(params: dict[str, Any], jobs: list[Job]) -> None:
    for job in jobs:
        bias = _node(params, job.candidate.place).get("bias")
        stacked = job.candidate.shape[: job.candidate.stacked]
        if bias is not None and jnp.shape(bias) != (*stacked, *job.sizes[1]):
            raise ValueError(
                f"sparsify: {job.candidate.name} has shape {job.candidate.shape} and its bias {jnp.shape(bias)}, which "
                f"does not fit {job.candidate.contracted} contracted and {job.candidate.stacked} stacked axes; say "
                "what they are by Rule(pattern, contracted=..., stacked=...)"
            )


def densify_variables(tree: Mapping[str, Any]) -> dict[str, Any]:
    """See `densify`."""
    variables = as_variables(tree)
    masks = variables.pop(MASK_COLLECTION, {})

    def visit(params: dict[Any, Any], constants: dict[Any, Any], path: tuple[Any, ...] = ()) -> None:
        if "mask" in constants and "format" in constants:
            layer = {"params": dict(params), MASK_COLLECTION: constants}
            with named(f"densify: {'/'.join(map(str, path))}"):
                embedding = stored_description(layer).of == "embedding"
                dense = NMSparseEmbed.to_dense(layer) if embedding else NMSparseDenseGeneral.to_dense(layer)
            params.clear()
            params.update(dense)
            return
        for key, child in constants.items():
            if not isinstance(child, dict) or not isinstance(params.get(key, {}), dict):
                raise ValueError(f"densify: {MASK_COLLECTION} holds {key!r}, expected the variables of layers")
            visit(params.setdefault(key, {}), child, (*path, key))

    visit(variables["params"], masks)
    _check_all_dense(variables["params"])
    return variables


def _check_all_dense(params: dict[str, Any], path: tuple[str, ...] = ()) -> None:
    for key, child in params.items():
        if isinstance(child, dict):
            _check_all_dense(child, (*path, str(key)))
        elif key == "values" and jnp.ndim(child) >= 5:  # windows, out_blocks, q, bk, bn
            raise ValueError(
                f"densify: {'/'.join(path)} holds packed values, but {MASK_COLLECTION} holds no mask for it; pass the "
                "variables with both collections"
            )
