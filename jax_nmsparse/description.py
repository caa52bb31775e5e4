"""What a layer's variables say about themselves: pattern, block, sizes and format version, in the name of a leaf.

Every way to store a tree of arrays keeps the names of its leaves, and every way to restore one into another tree
compares them. So the layers hold one empty leaf with a name such as ``v1_2:4_1x1_64x48``.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp

from jax_nmsparse.layout import FORMAT_VERSION, Layout
from jax_nmsparse.pattern import NMPattern

_NAME = re.compile(r"v(\d+)_(\d+):(\d+)_(\d+)x(\d+)_([\d,]+)x([\d,]+)(_embedding)?")


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split(","))


def _dims(sizes: tuple[int, ...]) -> str:
    return str(sizes[0]) if len(sizes) == 1 else str(sizes)


@dataclasses.dataclass(frozen=True)
class Description:
    """Pattern and sizes of one weight; `str` and `parse` are the name of the leaf.

    Attributes:
      pattern: The pattern.
      in_sizes: The contracted axes of the dense kernel; one for most layers.
      out_sizes: Its other axes.
      of: Name of the dense parameter: "kernel", or "embedding" where the weight is the transpose of a table.

    Example:
      >>> str(Description(NMPattern(2, 4), (64,), (4, 12)))
      'v1_2:4_1x1_64x4,12'
    """

    pattern: NMPattern
    in_sizes: tuple[int, ...]
    out_sizes: tuple[int, ...]
    of: str = "kernel"

    def __post_init__(self) -> None:
        if min((*self.in_sizes, *self.out_sizes)) < 1:
            raise ValueError(
                f"a layer of in_features {_dims(self.in_sizes)} and out_features {_dims(self.out_sizes)} has no "
                "weight, expected sizes of at least 1"
            )

    @property
    def layout(self) -> Layout:
        return Layout(self.pattern, math.prod(self.in_sizes), math.prod(self.out_sizes))

    def __str__(self) -> str:
        p, sizes = self.pattern, (",".join(map(str, sizes)) for sizes in (self.in_sizes, self.out_sizes))
        suffix = "_embedding" if self.of == "embedding" else ""
        return f"v{FORMAT_VERSION}_{p.n}:{p.m}_{p.block[0]}x{p.block[1]}_{'x'.join(sizes)}{suffix}"

    @classmethod
    def parse(cls, label: str, names: Iterable[str]) -> Description | None:
        """The description among the names of a format; None where somebody made the variables without one.

        Raises:
          ValueError: For several names, something else than a description, or another format version.
        """
        names = list(names)
        if not names:
            return None
        match = _NAME.fullmatch(names[0]) if len(names) == 1 else None
        if match is None:
            raise ValueError(f"{label}: the format holds {names}, expected one name such as v1_2:4_1x1_64x48")
        version, n, m, bk, bn = (int(number) for number in match.groups()[:5])
        if version != FORMAT_VERSION:
            remedy = (
                "upgrade jax_nmsparse" if version > FORMAT_VERSION else "convert them with the version that wrote them"
            )
            raise ValueError(
                f"{label}: the variables have format version {version}, expected {FORMAT_VERSION}; {remedy}"
            )
        return cls(NMPattern(n, m, (bk, bn)), _sizes(match[6]), _sizes(match[7]), "embedding" if match[8] else "kernel")

    def check(self, label: str, names: Iterable[str]) -> None:
        """Raises where the names of a format describe something else than this."""
        stored = Description.parse(label, names)
        if stored is None or stored == self:
            return
        if stored.pattern != self.pattern:
            raise ValueError(
                f"{label}: the variables have pattern {stored.pattern}, expected {self.pattern} (= pattern of the "
                f"module); build the module with pattern='{stored.pattern}', or convert: "
                "from_dense(to_dense(...), pattern)"
            )
        if stored.of != self.of:
            raise ValueError(f"{label}: the variables stand for a dense {stored.of}, expected a {self.of}")
        w = f"w {stored.layout.in_features}x{stored.layout.out_features}"
        if stored.in_sizes != self.in_sizes:
            what = "trailing size" if len(self.in_sizes) == 1 else "contracted sizes"
            got = f"{what} {_dims(self.in_sizes)}"
            raise ValueError(f"{label}: x has {got}, expected {_dims(stored.in_sizes)} (= in_features of {w})")
        raise ValueError(
            f"{label}: features is {_dims(self.out_sizes)}, expected {_dims(stored.out_sizes)} (= out_features of {w})"
        )

    def check_arrays(self, label: str, arrays: Mapping[str, Any], lead: tuple[int, ...] = (), remedy: str = "") -> None:
        """Raises where values, mask or scales have other shapes than described, behind the batch axes lead."""
        layout = self.layout
        expected = {
            "values": layout.values_shape,
            "mask": layout.mask_shape if self.pattern.mask_words > 1 else layout.mask_shape[:-1],
            "scales": (layout.out_features,),
        }
        for name, array in arrays.items():
            want = (*lead, *expected[name])
            if jnp.shape(array) != want:
                raise ValueError(
                    f"{label}: {name} has shape {jnp.shape(array)}, expected {want} (= {name} of a weight "
                    f"{'x'.join(map(str, (*lead, layout.in_features, layout.out_features)))} with pattern "
                    f"{self.pattern}); the variables are of another pattern or size{remedy}"
                )
