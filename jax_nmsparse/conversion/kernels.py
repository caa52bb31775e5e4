"""From one dense kernel to one weight: what linen trees, NNX modules and files have in common."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from jax_nmsparse import axes
from jax_nmsparse.array import VALUE_DTYPES, NMSparse
from jax_nmsparse.conversion.report import LayerReport
from jax_nmsparse.conversion.rules import Matcher, Rule, check_method
from jax_nmsparse.pruning import Statistics, prune
from jax_nmsparse.pruning.one_shot import check_inputs, check_second_order
from jax_nmsparse.pruning.selection import over_largest, score_dtype
from jax_nmsparse.quantization import quantize
from jax_nmsparse.tables import track


@contextlib.contextmanager
def named(what: str) -> Iterator[None]:
    """Errors begin with what they are about."""
    try:
        yield
    except (ValueError, TypeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{what}: {error}") from error


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A dense kernel ``[*stacked, *in_sizes, *out_sizes]``, or a transposed one ``[*stacked, out, in]``, as tables are.

    Attributes:
      path: Of the layer.
      leaf: Its name in the layer: "kernel", "embedding".
      transposed: Whether the contracted axis is the last one.
      shape, dtype: Of the kernel.
      contracted, stacked: As in `Rule`; None where only a rule can tell.
      take: Gives the kernel, for the last time.
      place: Where the caller finds the layer again.
      peek: Gives the kernel beforehand, where the model is changed by its conversion.
      problem: Why the layer cannot be converted.
    """

    path: str
    leaf: str
    transposed: bool
    shape: tuple[int, ...]
    dtype: Any
    contracted: int | None
    stacked: int
    take: Callable[[], Any]
    place: Any = None
    peek: Callable[[], Any] | None = None
    problem: str = ""

    @property
    def name(self) -> str:
        return f"{self.path}/{self.leaf}" if self.path else self.leaf

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize

    def dense_report(self, note: str) -> LayerReport:
        dtype = jnp.dtype(self.dtype).name
        return LayerReport(self.path, self.shape, "dense", "", dtype, self.nbytes, self.nbytes, note=note)


@dataclasses.dataclass(frozen=True)
class Job:
    """A candidate that becomes sparse, and all that is needed for it.

    Attributes:
      candidate: The kernel; contracted and stacked are known.
      rule: Its rule.
      method: "magnitude", "wanda", "sparsegpt" or "mask".
      inputs: `Statistics`, for the methods that need them, or for the error of the output.
      mask: A boolean mask of the kernel's shape, for "mask".
    """

    candidate: Candidate
    rule: Rule
    method: str
    inputs: Statistics | None
    mask: Any

    @property
    def sizes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """in_sizes and out_sizes of a kernel that is not transposed."""
        first, last = self.candidate.stacked, self.candidate.stacked + (self.candidate.contracted or 1)
        return self.candidate.shape[first:last], self.candidate.shape[last:]

    def fold(self, array: Any) -> Any:
        """An array of the kernel's shape as ``[*stacked, in_features, out_features]``."""
        if self.candidate.transposed:
            return jnp.swapaxes(array, -1, -2)
        return axes.fold_kernel("", array, self.candidate.stacked, self.candidate.contracted or 1)[0]

    def check(self) -> None:
        """Raises what `run` would raise."""
        with named(f"sparsify: {self.candidate.name}"):
            if self.mask is not None:
                # A mask that is known while the kernel is traced can be checked all the same.
                with jax.ensure_compile_time_eval():
                    NMSparse.fromdense(self.fold(jnp.asarray(self.mask) != 0).astype(jnp.int8), self._pattern)
            peek = self.candidate.peek
            kernel = jax.ShapeDtypeStruct(self.candidate.shape, self.candidate.dtype) if peek is None else peek()
            folded = jax.eval_shape(self.fold, kernel)
            if self.inputs is not None:
                check_inputs(self.method, folded.shape, self.candidate.dtype, self.inputs)
            second_order, quantised = self.method == "sparsegpt", self.rule.values_dtype is not None
            if peek is None or not (second_order or quantised):
                return
            dense = self.fold(jnp.asarray(kernel))
            if isinstance(dense, Tracer):
                return
            if second_order:
                check_second_order(dense, self.inputs, self.rule.damping)
            elif not bool(jnp.all(jnp.isfinite(dense.astype(jnp.float32)))):
                raise ValueError("the kernel holds NaN or Inf (in float32), which cannot be quantised")

    def run(self, *, donate: bool) -> tuple[NMSparse, LayerReport]:
        """Takes the kernel and packs it.

        Args:
          donate: Delete the kernel's buffer, whoever else refers to it.
        """
        kernel = self.candidate.take()
        with named(f"sparsify: {self.candidate.name}"):
            dense = self.fold(jnp.asarray(kernel))
            w = self._pack(dense)
            errors = _errors(dense, w, None if self.inputs is None else self.inputs.gram)
        traced = isinstance(errors[0], Tracer)
        # Not before both are computed: deleting a buffer that is still read would wait anyway.
        weight_error, output_error = (None if traced or e is None else float(e) for e in errors)
        if donate and isinstance(kernel, jax.Array) and not traced:
            kernel.delete()
        report = LayerReport(
            self.candidate.path,
            self.candidate.shape,
            str(w.pattern),
            self.method,
            jnp.dtype(w.dtype).name,
            self.candidate.nbytes,
            w.nbytes,
            weight_error,
            output_error,
        )
        return w, report

    @property
    def _pattern(self) -> Any:
        return self.rule.pattern

    def _pack(self, dense: jax.Array) -> NMSparse:
        if self.method == "mask":
            mask = self.fold(jnp.asarray(self.mask) != 0)
            # Groups of which the mask keeps less than n are filled with zeros.
            w = prune(jnp.where(mask, dense, 0), self._pattern, scores=mask)
        else:
            inputs = None if self.method == "magnitude" else self.inputs
            w = prune(dense, self._pattern, method=self.method, inputs=inputs, damping=self.rule.damping)
        if self.rule.values_dtype is not None:
            return quantize(w, self.rule.values_dtype)
        return w if self.rule.dtype is None else w.astype(self.rule.dtype)


@jax.jit
def _errors(dense: jax.Array, w: NMSparse, gram: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
    """Relative errors of the weight, and of its products with the inputs whose ``x^T x`` is gram.

    All are divided by their largest number first, so that no square overflows or vanishes; NaN and Inf give NaN.
    """
    dtype = score_dtype(dense.dtype)
    dense = dense.astype(dtype)
    dense, stored = over_largest(dense, dense, w.todense().astype(dtype))
    delta = dense - stored

    def relative(numerator: jax.Array, denominator: jax.Array) -> jax.Array:
        # Rounding may take a sum that is zero below it.
        return jnp.sqrt(jnp.where(numerator <= 0, 0, numerator / jnp.maximum(denominator, 0)))

    weight = relative(jnp.sum(jnp.square(delta)), jnp.sum(jnp.square(dense)))
    if gram is None:
        return weight, None
    (gram,) = over_largest(gram.astype(dtype), gram.astype(dtype))

    def energy(kernel: jax.Array) -> jax.Array:
        return jnp.sum(kernel * jnp.matmul(gram, kernel, precision=lax.Precision.HIGHEST))

    return weight, relative(energy(delta), energy(dense))


def each(steps: list[Job | LayerReport], progress: bool) -> Iterator[Job | LayerReport]:
    """The steps of a plan, which is emptied on the way: a step that is done keeps no kernel alive."""
    queue = collections.deque(steps)
    steps.clear()

    def drained() -> Iterator[Job | LayerReport]:
        while queue:
            yield queue.popleft()

    def label(step: Job | LayerReport) -> str:
        return step.candidate.path if isinstance(step, Job) else step.path

    return track(drained(), "sparsify", len(queue), enabled=progress, label=label)


def flatten(tree: Any, what: str) -> dict[str, Any]:
    """Path -> leaf of nested mappings, whose keys may be paths already; None and empty nodes are left out."""
    if tree is None:
        return {}
    if not isinstance(tree, Mapping):
        raise TypeError(f"sparsify: {what} is a {type(tree).__name__}, expected a mapping from paths, or nested ones")
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat.update({f"{key}/{path}": leaf for path, leaf in flatten(value, what).items()})
        elif value is not None:
            flat[str(key)] = value
    return flat


def plan(
    candidates: Iterable[Candidate], rules: Any, *, method: str, statistics: Any, masks: Any
) -> list[Job | LayerReport]:
    """What to do with every candidate, checked before anything is touched.

    Returns:
      A `Job` for every candidate that becomes sparse, and the report of every one that stays dense, in order.

    Raises:
      ValueError, TypeError: For rules that match nothing or cannot be followed, missing statistics, wrong masks.
    """
    check_method(method)
    matcher, steps, candidates = Matcher(rules), [], list(candidates)
    flat_statistics, flat_masks = flatten(statistics, "statistics"), _flat_masks(masks)
    for candidate in candidates:
        rule, note = matcher.find(candidate.name)
        if rule is None:
            steps.append(candidate.dense_report(note))
        else:
            steps.append(_job(candidate, rule, rule.method or method, flat_statistics, flat_masks))
    matcher.check_all_used(candidate.name for candidate in candidates)
    _check_names(step.candidate.name for step in steps if isinstance(step, Job))
    pruned = {name for step in steps if isinstance(step, Job) for name in (step.candidate.name, step.candidate.path)}
    if unused := sorted(flat_masks.keys() - pruned):
        raise ValueError(
            f"sparsify: masks holds {', '.join(unused)}, where no layer is made sparse; leave it out, or set it to None"
        )
    for step in steps:
        if isinstance(step, Job):
            step.check()
    return steps


def _check_names(names: Iterable[str]) -> None:
    twice = [name for name, count in collections.Counter(names).items() if count > 1]
    if twice:
        raise ValueError(
            f"sparsify: two layers have the path {twice[0]}, so no rule, mask or statistics can tell them apart; "
            "rename one of them (a name that contains '/' reads like nested ones)"
        )


def _flat_masks(masks: Any) -> dict[str, Any]:
    """Path -> mask; nested under "params", as variables are, or not."""
    wrapped = isinstance(masks, Mapping) and set(masks) == {"params"} and isinstance(masks["params"], Mapping)
    return flatten(masks["params"] if wrapped else masks, "masks")


def _job(candidate: Candidate, rule: Rule, method: str, statistics: Mapping[str, Any], masks: Mapping[str, Any]) -> Job:
    candidate = _resolved(candidate, rule)
    mask = next((masks[name] for name in (candidate.name, candidate.path) if name in masks), None)
    if mask is not None:
        mask = mask if hasattr(mask, "dtype") else np.asarray(mask)
        if np.shape(mask) != candidate.shape:
            raise ValueError(
                f"sparsify: the mask of {candidate.name} has shape {np.shape(mask)}, expected {candidate.shape}"
            )
        dtype = jnp.result_type(mask)
        if dtype not in (jnp.bool_, jnp.uint8):
            raise TypeError(f"sparsify: the mask of {candidate.name} has dtype {dtype}, expected bool (or uint8)")
        method = "mask"
    inputs = statistics.get(candidate.path)
    if inputs is not None and not isinstance(inputs, Statistics):
        raise TypeError(f"sparsify: statistics of {candidate.path} is a {type(inputs).__name__}, expected Statistics")
    if method in ("wanda", "sparsegpt") and inputs is None:
        raise ValueError(
            f"sparsify: method {method!r} needs statistics of what {candidate.path} reads, but statistics holds none; "
            "calibrate with that layer (pruning.calibrate), or give it a Rule with method='magnitude'"
        )
    return Job(candidate, rule, method, inputs, mask)


def _resolved(candidate: Candidate, rule: Rule) -> Candidate:
    """The candidate with contracted and stacked, or an error where it cannot be converted."""
    if candidate.problem:
        raise ValueError(
            f"sparsify: {candidate.name} cannot become sparse: {candidate.problem}; leave it dense by a rule before "
            f"the one that matches it, {{{candidate.path!r}: None, ...}}"
        )
    if jnp.dtype(candidate.dtype) not in VALUE_DTYPES:
        names = ", ".join(dtype.name for dtype in VALUE_DTYPES)
        raise TypeError(
            f"sparsify: {candidate.name} has dtype {jnp.dtype(candidate.dtype).name}, supported are {names}"
        )
    asked = rule.dtype is not None and jnp.dtype(rule.dtype) == jnp.float64
    if asked and jax.dtypes.canonicalize_dtype(jnp.float64) != jnp.float64:
        raise ValueError(
            f"sparsify: the rule of {candidate.name} asks for float64, which needs 64-bit types; set JAX_ENABLE_X64=1"
        )
    if rule.values_dtype is not None and not jnp.issubdtype(candidate.dtype, jnp.floating):
        raise TypeError(
            f"sparsify: {candidate.name} has dtype {jnp.dtype(candidate.dtype).name}, expected a float dtype where the "
            f"rule quantises to {jnp.dtype(rule.dtype).name}"
        )
    if candidate.contracted is not None:
        return candidate
    first = rule.stacked + (rule.contracted or 1)
    known = rule.contracted is not None or len(candidate.shape) == rule.stacked + 2
    if rule.contracted is not None and not first < len(candidate.shape):
        raise ValueError(
            f"sparsify: {candidate.name} has shape {candidate.shape}, expected more axes than the {rule.contracted} "
            f"contracted and {rule.stacked} stacked ones of its rule"
        )
    if not known:
        raise ValueError(
            f"sparsify: {candidate.name} has shape {candidate.shape}, of which the parameters alone do not say what is "
            "contracted; use Rule(pattern, contracted=..., stacked=...), or leave it dense by a rule before the one "
            f"that matches it, {{{candidate.path!r}: None, ...}}"
        )
    return dataclasses.replace(candidate, contracted=rule.contracted or 1, stacked=rule.stacked)
