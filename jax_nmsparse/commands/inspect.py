"""``inspect``: what a safetensors file holds."""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from typing import Any

import jax.numpy as jnp

from jax_nmsparse.array import NMSparse
from jax_nmsparse.description import Description
from jax_nmsparse.files import Reader
from jax_nmsparse.tables import Table, amount, show, track

HELP = "what a safetensors file holds: weights, patterns, bytes"

_FORMAT = re.compile(r"(?P<layer>.*?)\.?format\.(?P<name>v\d+_[^.]*)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help="a safetensors file")
    parser.add_argument("--all", action="store_true", help="list plain arrays too")
    parser.add_argument("--check", action="store_true", help="read every weight and check its invariants")


def run(arguments: argparse.Namespace) -> int:
    with Reader(arguments.file) as reader:
        layers = dict(filter(None, map(_layer, reader.names)))
        parts = {part: layer for layer in layers for part in _parts(layer, reader)}
        rows, dense, stored = [], 0, 0
        for name in track(reader.names, "inspect", len(reader.names), enabled=arguments.check):
            if name in parts or _layer(name):
                continue
            if name in reader.weights:
                if arguments.check:
                    _check(name, reader.read(name))
                row = _weight_row(name, reader)
            else:
                shape, dtype = reader.array_type(name)
                row = _row(name, shape, "", dtype, _nbytes(name, reader))
            if name in reader.weights or arguments.all:
                rows.append(row)
            dense, stored = dense + row.dense, stored + row.nbytes
        for layer, description in layers.items():
            row = _layer_row(layer, description, reader)
            rows.append(row)
            dense, stored = dense + row.dense, stored + row.nbytes
    title = f"{arguments.file}: {len(reader.weights)} N:M sparse weights, {len(layers)} sparse layers"
    footer = ("total", "", "", "", amount(stored), _ratio(stored, dense))
    show(
        Table(("name", "shape", "pattern", "dtype", "#bytes", "#of dense"), [row.cells for row in rows], title, footer)
    )
    return 0


@dataclasses.dataclass(frozen=True)
class _Row:
    cells: list[str]
    nbytes: int
    dense: int


def _row(name: str, shape: tuple[int, ...], pattern: str, dtype: str, nbytes: int) -> _Row:
    dense = math.prod(shape) * _itemsize(dtype) if pattern else nbytes
    text = "x".join(map(str, shape)) or "scalar"
    return _Row([name, text, pattern, dtype, amount(nbytes), _ratio(nbytes, dense)], nbytes, dense)


def _layer(name: str) -> tuple[str, Description] | None:
    """Name of a layer and its description, where a tensor is the format of its variables."""
    match = _FORMAT.fullmatch(name)
    description = Description.parse(match["layer"], [match["name"]]) if match else None
    return (match["layer"], description) if match and description else None


def _parts(layer: str, reader: Reader) -> list[str]:
    """Names of the tensors that make up the weight of a layer: linen keeps them in two collections."""
    names = reader.names
    beside = [layer, re.sub(r"^nm_mask", "params", layer)]
    found = {f"{place}.{part}".removeprefix(".") for place in beside for part in ("values", "mask", "scales")}
    return [name for name in names if name in found]


def _layer_row(layer: str, description: Description, reader: Reader) -> _Row:
    nbytes, lead, dtype = 0, (), "float32"
    for part in _parts(layer, reader):
        nbytes += _nbytes(part, reader)
        if part.endswith("values"):
            shape, dtype = reader.array_type(part)
            lead = shape[:-5]
    size = (*lead, description.layout.in_features, description.layout.out_features)
    return _row(re.sub(r"^nm_mask\.", "", layer), size, str(description.pattern), dtype, nbytes)


def _nbytes(tensor: str, reader: Reader) -> int:
    shape, dtype = reader.array_type(tensor)
    return math.prod(shape) * _itemsize(dtype)


def _weight_row(name: str, reader: Reader) -> _Row:
    parts, described = reader.parts(name), reader.weights[name]
    nbytes = sum(_nbytes(tensor, reader) for tensor in parts.values())
    return _row(name, tuple(described["shape"]), described["pattern"], reader.array_type(parts["values"])[1], nbytes)


def _check(name: str, w: Any) -> None:
    assert isinstance(w, NMSparse)
    try:
        w.validate()
    except ValueError as error:
        raise ValueError(f"inspect: the weight {name!r} is damaged: {error}") from error


def _itemsize(dtype: str) -> int:
    try:
        return jnp.dtype(dtype).itemsize
    except TypeError:  # a dtype of safetensors that JAX does not know: its bits end its name
        return max(1, int("".join(filter(str.isdigit, dtype.split("_")[0])) or 8) // 8)


def _ratio(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else ""
