"""Rules: which layers of a model become sparse, and how."""

from __future__ import annotations

import dataclasses
import math
import numbers
import operator
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp

from jax_nmsparse.array import VALUE_DTYPES, check_pattern
from jax_nmsparse.pattern import NMPattern
from jax_nmsparse.pruning.one_shot import METHODS


@dataclasses.dataclass(frozen=True)
class Rule:
    """What to do with a layer, where a pattern alone does not say it.

    Attributes:
      pattern: The `NMPattern`, or a string such as "2:4".
      method: "magnitude", "wanda" or "sparsegpt"; by default that of the call.
      dtype: None keeps that of the kernel; a float dtype casts the kept values, int8 and float8_e4m3fn quantise them.
      contracted: How many axes of a linen kernel are contracted. A kernel of two axes needs no answer; of others the
        parameters alone cannot tell. NNX layers know.
      stacked: How many axes stand before them: batch_dims, and those of layers stacked by nn.scan.
      damping: As in `prune`, for "sparsegpt"; at least 0.

    Raises:
      ValueError, TypeError: For a field that means nothing, naming it.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_nmsparse import Rule
      >>> rules = {"attention/out/kernel": Rule("2:4", contracted=2), "mlp": Rule("8:32", dtype=jnp.int8), "": None}
    """

    pattern: NMPattern | str
    method: str | None = None
    dtype: Any = None
    contracted: int | None = None
    stacked: int = 0
    damping: float = 0.01

    def __post_init__(self) -> None:
        object.__setattr__(self, "pattern", check_pattern("Rule", self.pattern))
        if self.method is not None:
            check_method(self.method, "Rule")
        if self.dtype is not None:
            self._check_dtype()
        if self.contracted is not None:
            object.__setattr__(self, "contracted", _count("contracted", self.contracted, 1))
        object.__setattr__(self, "stacked", _count("stacked", self.stacked, 0))
        if not isinstance(self.damping, numbers.Real):
            raise TypeError(f"Rule: damping is {self.damping!r}, expected a number")
        if not (math.isfinite(self.damping) and self.damping >= 0):
            raise ValueError(f"Rule: damping is {self.damping}, expected a finite number of at least 0")

    def _check_dtype(self) -> None:
        try:
            name, known = jnp.dtype(self.dtype).name, jnp.dtype(self.dtype) in VALUE_DTYPES
        except TypeError:
            name, known = repr(self.dtype), False
        if not known:
            names = ", ".join(dtype.name for dtype in VALUE_DTYPES)
            raise TypeError(f"Rule: dtype is {name}, expected one of {names}")

    @property
    def values_dtype(self) -> Any:
        """int8 or float8_e4m3fn where the values are quantised, otherwise None."""
        return self.dtype if self.dtype is not None and jnp.dtype(self.dtype).itemsize == 1 else None


Rules = Mapping[str, Any]
"""Regular expression, searched in the path of a leaf ("encoder/mlp/up/kernel") -> a pattern, a `Rule`, or None for
dense. The first that is found counts; a leaf that none matches stays dense."""


def _count(name: str, number: Any, least: int) -> int:
    try:
        count = least - 1 if isinstance(number, bool) else operator.index(number)
    except TypeError:
        raise TypeError(f"Rule: {name} is {number!r}, expected a number of axes") from None
    if count < least:
        raise ValueError(f"Rule: {name} is {number!r}, expected a number of axes, at least {least}")
    return count


def check_method(method: str, op: str = "sparsify") -> None:
    if method not in METHODS:
        raise ValueError(f"{op}: method is {method!r}, expected one of {', '.join(METHODS)}")


class Matcher:
    """Finds the rule of a path, and remembers which rules were of use; op is what errors begin with."""

    def __init__(self, rules: Rules | NMPattern | str, op: str = "sparsify") -> None:
        self._op = op
        if isinstance(rules, (NMPattern, str)):
            rules = {"kernel$": rules}
        if not isinstance(rules, Mapping):
            raise TypeError(
                f"{op}: rules is a {type(rules).__name__}, expected a mapping from regular expressions to "
                "patterns, such as {'mlp/.*kernel': '2:4'}"
            )
        self._rules: list[tuple[re.Pattern, Rule | None]] = []
        for expression, rule in rules.items():
            try:
                compiled = re.compile(expression)
            except (re.error, TypeError) as error:
                raise ValueError(f"{op}: {expression!r} is no regular expression: {error}") from error
            self._rules.append((compiled, rule if rule is None or isinstance(rule, Rule) else Rule(rule)))
        self._used: set[int] = set()

    def find(self, path: str) -> tuple[Rule | None, str]:
        """The rule of a leaf, and where it is None the reason."""
        for i, (expression, rule) in enumerate(self._rules):
            if expression.search(path):
                self._used.add(i)
                return rule, "" if rule else f"rule {expression.pattern!r}"
        return None, "no rule"

    def check_all_used(self, paths: Iterable[str]) -> None:
        """Raises where a rule matched nothing: it is most likely misspelt."""
        for i, (expression, _) in enumerate(self._rules):
            if i not in self._used:
                paths = list(paths)
                listed = ", ".join(paths[:5]) + (", ..." if len(paths) > 5 else "")
                raise ValueError(
                    f"{self._op}: the rule {expression.pattern!r} matches no layer that no rule before it matches; "
                    f"the layers are {listed or 'none'}"
                )
