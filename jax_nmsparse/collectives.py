"""Which collectives a compiled program holds, and how many bytes they move: read from its HLO text."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import jax.numpy as jnp

KINDS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute")

_INSTRUCTION = re.compile(rf"= (?P<type>\(.*?\)|\S+) (?P<kind>{'|'.join(KINDS)})(?P<start>-start)?\((?P<rest>.*)")
_ARRAY = re.compile(r"(?P<dtype>[a-z]+\d*[a-z0-9]*)\[(?P<dims>[\d,]*)\]")
_LISTED = re.compile(r"replica_groups=(?:\{\{(?P<first>[\d,]+)\}|\[\d+,(?P<size>\d+)\])")
_NAMED = re.compile(r"replica_groups=mesh\[(?P<mesh>[^\]]*)\] \{(?P<axes>[^}]*)\}")
_DTYPES = {"pred": 1, "bf16": 2, "f8e4m3fn": 1}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program; in the body of a loop it runs in every iteration.

    Attributes:
      kind: One of `KINDS`.
      shapes: What it moves, as HLO writes it: ("f32[16,64]",).
      bytes: Size of those arrays on one device, whole: of the result, for a reduce-scatter of the operand.
      devices: How many devices take part in one group; 0 where the program does not say.
    """

    kind: str
    shapes: tuple[str, ...]
    bytes: int
    devices: int


def _bytes(dtype: str, dims: str) -> int:
    if dtype in _DTYPES:
        size = _DTYPES[dtype]
    else:
        size = jnp.dtype({"f": "float", "s": "int", "u": "uint", "c": "complex"}[dtype[0]] + dtype[1:]).itemsize
    return size * math.prod(int(d) for d in dims.split(",") if d)


def _devices(attributes: str) -> int:
    """Devices in a replica group, which XLA writes as a list, as [groups, devices], or by axes of a mesh."""
    if listed := _LISTED.search(attributes):
        return int(listed["size"]) if listed["size"] else len(listed["first"].split(","))
    if named := _NAMED.search(attributes):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named["mesh"])}
        # A part of an axis is written 'name':(before)size.
        axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", named["axes"])
        return math.prod(int(part) if part else sizes[name] for name, part in axes)
    return 0


def collectives(program: Any) -> list[Collective]:
    """The collectives of a compiled program in order of appearance.

    Args:
      program: What ``jax.jit(f).lower(...).compile()`` returns, or its ``as_text()``.

    Returns:
      One `Collective` for each instruction.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_nmsparse.collectives import collectives
      >>> collectives(jax.jit(jnp.sin).lower(jnp.ones(3)).compile())
      []
      >>> text = "%r = f32[4,8]{1,0} all-reduce(%x), channel_id=1, replica_groups=[2,4]<=[8], to_apply=%add"
      >>> collectives(text)
      [Collective(kind='all-reduce', shapes=('f32[4,8]',), bytes=128, devices=4)]
    """
    text = program if isinstance(program, str) else program.as_text()
    found = []
    for match in _INSTRUCTION.finditer(text):
        arrays = list(_ARRAY.finditer(match["type"]))
        if match["start"] and match["type"].startswith("(") and match["kind"] in ("all-gather", "collective-permute"):
            # (operands, results, context): only the results are moved.
            arrays = [a for a in arrays if a["dims"] or a["dtype"] != "u32"]
            arrays = arrays[len(arrays) // 2 :]
        devices = _devices(match["rest"])
        size = sum(_bytes(a["dtype"], a["dims"]) for a in arrays)
        if match["kind"] == "reduce-scatter":
            size *= max(1, devices)
        found.append(Collective(match["kind"], tuple(a[0] for a in arrays), size, devices))
    return found
