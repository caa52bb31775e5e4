"""``prune``: a safetensors file with some of its matrices N:M sparse."""

from __future__ import annotations

import argparse
import functools
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jax_nmsparse.array import VALUE_DTYPES
from jax_nmsparse.conversion import Report, Rule
from jax_nmsparse.conversion.kernels import Candidate, Job, each, plan
from jax_nmsparse.files import Reader, check_target, write
from jax_nmsparse.pruning import Statistics
from jax_nmsparse.pruning.one_shot import METHODS
from jax_nmsparse.tables import amount, show

HELP = "a safetensors file with some of its matrices N:M sparse"

EXCLUDED = "embed|wte|wpe"
_FLOATS = ("float32", "bfloat16", "float16", "float64")
_LAYOUTS = ("auto", "in-out", "out-in")
_EPILOG = """\
The groups of a pattern run along the contracted axis, in_features. Matrices of Flax ("...kernel") are [in_features,
out_features]; those of PyTorch ("...weight"), and embedding tables, are [out_features, in_features], which is what
--layout auto reads from their names. A weight is written as [in_features, out_features] under the name of its matrix:
NAME.values, NAME.mask, NAME.scales, with a description in the file's metadata. jax_nmsparse.checkpoint.load reads it.

Exit code 0: written; 1: it could not be done, the reason is on standard error and nothing was written; 2: wrong usage.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog, parser.formatter_class = _EPILOG, argparse.RawDescriptionHelpFormatter
    parser.add_argument("input", help="a safetensors file")
    parser.add_argument("output", help="where to write")
    parser.add_argument("--pattern", required=True, help="2:4, 8:32, 8:32/1x128 ...")
    parser.add_argument(
        "--include",
        action="append",
        metavar="REGEX",
        help="prune matrices in whose name this is found (may be repeated; by default all of two axes)",
    )
    parser.add_argument(
        "--exclude",
        action="append",
        metavar="REGEX",
        help=f"but not those (may be repeated; by default {EXCLUDED!r}; --exclude '' excludes none)",
    )
    parser.add_argument("--method", choices=METHODS, default="magnitude", help="default: magnitude")
    parser.add_argument(
        "--statistics",
        metavar="FILE",
        help="safetensors file with LAYER.tokens, LAYER.squares and LAYER.gram of what layers read, for wanda and "
        "sparsegpt; LAYER is the name of a matrix without its last part",
    )
    names = sorted(dtype.name for dtype in VALUE_DTYPES)
    parser.add_argument(
        "--dtype", choices=names, metavar="DTYPE", help=f"of the kept values: {', '.join(names)}; 8 bits are quantised"
    )
    parser.add_argument("--layout", choices=_LAYOUTS, default="auto", help="axes of the matrices; see below")
    parser.add_argument("--force", action="store_true", help="replace an output that exists")
    parser.add_argument("--quiet", action="store_true", help="no progress and no table")


def run(arguments: argparse.Namespace) -> int:
    output = pathlib.Path(arguments.output)
    check_target("prune", output)
    if output.exists() and not arguments.force:
        raise FileExistsError(f"prune: {output} exists already; --force replaces it")
    with Reader(arguments.input) as reader:
        candidates = list(_candidates(reader, arguments.layout))
        if not candidates:
            raise ValueError(
                f"prune: {arguments.input} holds no matrix to prune: none of two axes and a float dtype that is not "
                "sparse already; inspect --all lists what it holds"
            )
        rules = _rules(arguments, [candidate.name for candidate in candidates])
        statistics = _statistics(arguments.statistics)
        steps = plan(candidates, rules, method=arguments.method, statistics=statistics, masks=None)
        jobs = {step.candidate.name for step in steps if isinstance(step, Job)}
        reports: list[Any] = []

        def leaves() -> Iterator[tuple[str, Any]]:
            """The names that stay as they are, then the weights; each is read when it is asked for."""
            yield from ((name, reader.read(name)) for name in reader.names if name not in jobs)
            for step in each(steps, not arguments.quiet):
                if isinstance(step, Job):
                    w, report = step.run(donate=False)
                    yield step.candidate.name, w
                    reports.append(report)
                else:
                    reports.append(step)

        write(output, leaves(), reader.metadata)
    if not arguments.quiet:
        show(Report(tuple(reports)))
        before, after = (pathlib.Path(path).stat().st_size for path in (arguments.input, output))
        print(f"{arguments.input}: {amount(before)} -> {output}: {amount(after)}")
    return 0


def _candidates(reader: Reader, layout: str) -> Iterator[Candidate]:
    for name in reader.names:
        if name in reader.weights:
            continue
        shape, dtype = reader.array_type(name)
        if len(shape) != 2 or 0 in shape or dtype not in _FLOATS:
            continue
        path, _, leaf = name.rpartition(".")
        transposed = layout == "out-in" or (layout == "auto" and leaf in ("weight", "embedding"))
        narrowed = dtype == "float64" and not jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
        problem = "float64 needs 64-bit types; set JAX_ENABLE_X64=1" if narrowed else ""
        take = functools.partial(reader.read, name)
        yield _Named(path, leaf, transposed, shape, dtype, contracted=1, stacked=0, take=take, problem=problem)


class _Named(Candidate):
    """A candidate whose full name is that in the file."""

    @property
    def name(self) -> str:
        return f"{self.path}.{self.leaf}" if self.path else self.leaf


def _rules(arguments: argparse.Namespace, names: list[str]) -> dict[str, Rule | None]:
    excluded = [e for e in arguments.exclude or () if e]
    if both := set(excluded) & set(arguments.include or ()):
        raise ValueError(f"prune: {min(both)!r} is given to --include and to --exclude; leave one of them out")
    if arguments.exclude is None and any(re.search(EXCLUDED, name) for name in names):
        excluded = [EXCLUDED]
    rules: dict[str, Rule | None] = dict.fromkeys(excluded)
    rules.update(dict.fromkeys(arguments.include or [""], Rule(arguments.pattern, dtype=arguments.dtype)))
    return rules


def _statistics(path: str | None) -> dict[str, Statistics] | None:
    if path is None:
        return None
    found: dict[str, dict[str, np.ndarray]] = {}
    with Reader(path) as reader:
        for name in reader.names:
            layer, _, part = name.rpartition(".")
            array = reader.read(name)
            if part not in ("tokens", "squares", "gram") or not isinstance(array, np.ndarray):
                raise ValueError(f"prune: {path} holds {name!r}, expected LAYER.tokens, LAYER.squares and LAYER.gram")
            found.setdefault(layer.replace("/", "."), {})[part] = array
    for layer, parts in found.items():
        if not {"tokens", "squares"} <= set(parts):
            raise ValueError(f"prune: {path} holds only {sorted(parts)} of {layer}, expected tokens and squares")
    return {layer: Statistics(**parts) for layer, parts in found.items()}  # pyright: ignore[reportArgumentType]
