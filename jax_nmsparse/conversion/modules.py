"""Conversion of Flax NNX modules, in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
from flax import nnx

from jax_nmsparse.array import NMSparse
from jax_nmsparse.conversion.kernels import Candidate, Job, each, plan
from jax_nmsparse.conversion.report import LayerReport, Report
from jax_nmsparse.nnx import NMSparseEmbed, NMSparseLinear, NMSparseLinearGeneral
from jax_nmsparse.nnx.variables import inherited

_DENSE = (nnx.Linear, nnx.LinearGeneral, nnx.Embed)
_SPARSE = (NMSparseLinear, NMSparseLinearGeneral, NMSparseEmbed)

Put = Callable[[Any], None]


class _Places:
    """The layers of a model, and every place that holds one: several where it is shared."""

    def __init__(self, model: nnx.Module, kinds: tuple[type, ...]) -> None:
        self.layers: dict[int, tuple[str, Any]] = {}
        self.places: dict[int, list[Put | None]] = {}
        self.fixed: dict[int, str] = {}
        self._kinds = kinds
        self._seen: set[int] = set()
        self._visit(model, (), None)

    def _visit(self, value: Any, path: tuple[str, ...], put: Put | None) -> None:
        if isinstance(value, self._kinds):
            self.layers.setdefault(id(value), ("/".join(path), value))
            self.places.setdefault(id(value), []).append(put)
            if put is _fixed:
                self.fixed[id(value)] = "/".join(path)
            return
        if id(value) in self._seen or not isinstance(value, (nnx.Module, dict, list, tuple)):
            return
        self._seen.add(id(value))
        for key, child, set_child in _children(value):
            self._visit(child, (*path, key), set_child)

    def check(self, op: str, layers: Iterable[int]) -> None:
        """Raises where a layer cannot be replaced."""
        for layer in layers:
            if layer in self.fixed:
                raise TypeError(
                    f"{op}: {self.fixed[layer]}: a layer lies in a tuple, which cannot be changed in place; "
                    "use nnx.List"
                )

    def replace(self, layer: int, new: Any) -> None:
        """Puts new into every place of a layer but the root."""
        for put in self.places[layer]:
            if put is not None:
                put(new)


def _fixed(new: Any) -> None:
    """The place of an item of a tuple; `_Places.check` refuses it."""


def _children(value: Any) -> Iterator[tuple[str, Any, Put]]:
    def item(container: Any, key: Any) -> Put:
        return lambda new: container.__setitem__(key, new)

    def attribute(container: Any, key: str) -> Put:
        return lambda new: setattr(container, key, new)

    if isinstance(value, nnx.Module):
        yield from ((k, child, attribute(value, k)) for k, child in vars(value).items() if not k.startswith("_"))
    elif isinstance(value, dict):
        yield from ((str(k), child, item(value, k)) for k, child in value.items())
    else:
        writable = isinstance(value, list)
        yield from ((str(i), child, item(value, i) if writable else _fixed) for i, child in enumerate(value))


def _candidate(path: str, layer: Any, tied: dict[int, str]) -> Candidate:
    """The candidate of a layer; tied remembers which layer had a variable first."""
    leaf = "embedding" if isinstance(layer, nnx.Embed) else "kernel"
    variable = getattr(layer, leaf)
    first = tied.setdefault(id(variable), path)
    contracted, others = 1, 1
    if isinstance(layer, nnx.LinearGeneral):
        contracted, others = len(layer.in_features), len(layer.out_features)
    kind = type(layer)
    problem = "" if kind in _DENSE else f"its class is {kind.__name__}, which may compute something else"
    problem = problem if first == path else f"its {leaf} is that of {first} too, and would no longer be tied to it"

    if isinstance(variable.get_raw_value(), jax.ShapeDtypeStruct):
        raise TypeError(
            f"sparsify: {path}/{leaf} is a ShapeDtypeStruct, expected an array; of shapes alone, "
            "nnx.eval_shape(lambda: sparsify(make_model(), rules)[0]) gives the abstract sparse model"
        )
    stacked, kernel = len(variable.shape) - contracted - others, lambda: variable[...]
    return Candidate(
        path=path,
        leaf=leaf,
        transposed=leaf == "embedding",
        shape=variable.shape,
        dtype=variable.dtype,
        contracted=contracted,
        stacked=stacked,
        take=kernel,
        place=id(layer),
        peek=kernel,
        problem=problem,
    )


def _sparse_layer(layer: Any, w: NMSparse) -> Any:
    common = inherited(layer)
    if isinstance(layer, nnx.Embed):
        return NMSparseEmbed.from_weight(w, **common)
    common |= inherited(layer, "precision", "preferred_element_type")
    bias = None if layer.bias is None else layer.bias[...]
    if isinstance(layer, nnx.Linear):
        return NMSparseLinear.from_weight(w, bias, **common)
    common |= {name: getattr(layer, name) for name in ("in_features", "out_features", "axis", "batch_axis")}
    return NMSparseLinearGeneral.from_weight(w, bias, **common)


def sparsify_module(
    model: nnx.Module, rules: Any, *, donate: bool, progress: bool, **options: Any
) -> tuple[nnx.Module, Report]:
    """See `sparsify`."""
    places = _Places(model, _DENSE)
    tied: dict[int, str] = {}
    steps = plan([_candidate(path, layer, tied) for path, layer in places.layers.values()], rules, **options)
    places.check("sparsify", [step.candidate.place for step in steps if isinstance(step, Job)])
    reports: list[LayerReport] = []
    for job in each(steps, progress):
        if isinstance(job, LayerReport):
            reports.append(job)
            continue
        key = job.candidate.place
        w, report = job.run(donate=donate)
        # Popped, so that nothing here keeps the dense layer alive.
        new = _sparse_layer(places.layers.pop(key)[1], w)
        places.replace(key, new)
        model = new if not job.candidate.path else model
        reports.append(report)
    return model, Report(tuple(reports))


def densify_module(model: nnx.Module) -> nnx.Module:
    """See `densify`."""
    places = _Places(model, _SPARSE)
    for path, layer in places.layers.values():
        if getattr(layer, "activation", None) is not None:
            raise ValueError(
                f"densify: {path} has activation={layer.activation!r}, which no dense layer of Flax computes; apply it "
                "in the model"
            )
    places.check("densify", places.layers)
    for key, (path, layer) in places.layers.items():
        dense = layer.to_dense()
        places.replace(key, dense)
        model = dense if not path else model
    return model
