"""Functions of weights on meshes of explicit axis types, where the sharding of an array is part of its type.

There the sharding of every operand is known while tracing. So a function of whole windows and column blocks runs as a
`jax.shard_map` over the explicit axes: each device works on its own part, a sum over a sharded axis is one collective,
and JAX derives the gradients. Factors name the axes (see `meshes`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_nmsparse.compat import unify_varying
from jax_nmsparse.layout import Layout
from jax_nmsparse.meshes import UNSPLIT, Axes, Factors, check_whole, padded_spec, parts_of, scatter_axis


def _spec_of(x: Any) -> tuple[Axes, ...]:
    """For every axis of an array, the explicit mesh axes that split it."""
    aval = jax.typeof(x)
    return padded_spec(aval.sharding.spec, aval.ndim)


def is_split(*arrays: Any) -> bool:
    """Whether an explicit mesh axis splits any of the arrays; None is skipped."""
    return any(any(_spec_of(x)) for x in arrays if x is not None)


def check_whole_array(op: str, name: str, array: Any) -> None:
    """Raises for an array that explicit mesh axes split, where an algorithm needs all of it in one place."""
    if is_split(array):
        raise ValueError(
            f"{op}: {name} of shape {array.shape} is split over explicit mesh axes, {jax.typeof(array).sharding.spec}, "
            "expected one that is whole on every device; jax.sharding.reshard(array, jax.sharding.PartitionSpec())"
        )


def check_folds(what: str, array: Any, groups: Iterable[Sequence[int]]) -> None:
    """Raises where axes of the array fold into one and explicit mesh axes split another than the first of them."""
    shape, spec = jnp.shape(array), _spec_of(array)
    for group in groups:
        for i, axis in enumerate(group):
            if spec[axis] and math.prod(shape[a] for a in group[:i]) > 1:
                raise ValueError(
                    f"{what} of shape {shape} is split over explicit mesh axes, "
                    f"{jax.typeof(array).sharding.spec}; its axes {tuple(group)} become one and may be split along the "
                    "first of them only; use jax.sharding.reshard"
                )


def sum_over_tokens(function: Callable[..., Any], x: jax.Array, where: jax.Array | None) -> Any:
    """``function(x, where)``, sums over all axes of ``x [..., features]`` but the last, each device adding its tokens.

    Args:
      function: Gives a pytree of sums.
      x: Split by explicit mesh axes or not; features are gathered.
      where: None, or ``[...]``.

    Returns:
      The pytree, whole on every device.
    """
    if not is_split(x, where):
        return function(x, where)
    mesh = next(m for m in (jax.typeof(a).sharding.mesh for a in (x, where) if a is not None) if not m.empty)
    *lead, _ = _spec_of(x)
    spec, axes = PartitionSpec(*(entry or None for entry in lead)), tuple(a for entry in lead for a in entry)
    operands = [_reshard(a, mesh, spec) for a in (x, where) if a is not None]
    names = _explicit_axes(mesh)

    def local(x: jax.Array, where: jax.Array | None = None) -> Any:
        sums = function(x, where)
        # The number of tokens of a part does not depend on the part, so its type says that it is the same everywhere.
        return jax.tree.map(lambda s: lax.psum(unify_varying(s, x)[0], axes), sums) if axes else sums

    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(spec,) * len(operands),
        out_specs=PartitionSpec(),
        axis_names=names if len(names) < len(mesh.axis_names) else set(),
    )(*operands)


def _explicit_axes(mesh: Any) -> set[str]:
    return {a for a, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit}


def _factor_axes(op: str, operands: Sequence[tuple[Any, Factors]]) -> dict[str, Axes]:
    """The mesh axes that split each factor; operands agree, or leave it whole."""
    found: dict[str, Axes] = {}
    for array, names in operands:
        for factor, axes in zip(names, _spec_of(array), strict=True):
            if axes and factor != "c" and found.setdefault(factor, axes) != axes:
                raise ValueError(
                    f"{op}: one axis is sharded over {found[factor]} in one operand and over {axes} in another; "
                    "jax.sharding.reshard one of them"
                )
    inside = sorted(found.keys() & UNSPLIT)
    if inside:
        raise ValueError(
            f"{op}: a weight is sharded over {found[inside[0]]} inside its windows; only batch axes, "
            "windows and column blocks can be split"
        )
    used: dict[str, str] = {}
    for factor, axes in found.items():
        for axis in axes:
            if used.setdefault(axis, factor) != factor:
                raise ValueError(
                    f"{op}: mesh axis {axis!r} shards two different axes of the operands; jax.sharding.reshard one of "
                    "them"
                )
    return found


def run(
    op: str,
    layout: Layout,
    operands: Sequence[tuple[Any, Factors]],
    result: Factors,
    local: Callable[..., jax.Array],
    *,
    summed: str = "",
    out_sharding: Any = None,
) -> jax.Array:
    """Runs a function of a weight on each device's part of its operands.

    Args:
      op: Who asks, for errors.
      layout: Of the whole weight.
      operands: (array, the factor of each of its axes).
      result: The factor of each axis of the result.
      local: ``local(layout of the part, parts, axes, scatter)``; it adds up its result by
        ``add_parts(y, axes, scatter)``.
      summed: First letter of the factors that the function sums over, if any.
      out_sharding: A `NamedSharding` or `PartitionSpec` for the result; needed where a summed factor is sharded.

    Raises:
      ValueError: Where shardings contradict each other, cut through windows, or leave the result's sharding open.
    """
    axes = _factor_axes(op, operands)
    mesh = next(m for m in (jax.typeof(x).sharding.mesh for x, _ in operands) if not m.empty)
    parts = {f: parts_of(mesh, axes.get(f, ())) for f in ("w", "o")}
    check_whole(op, layout, parts["w"], parts["o"])
    piece = Layout(layout.pattern, layout.in_features // parts["w"], layout.out_features // parts["o"])
    added = tuple(a for f, named in sorted(axes.items()) if summed and f.startswith(summed) for a in named)
    if added and out_sharding is None:
        raise ValueError(
            f"{op}: an axis that is summed over is sharded over the explicit mesh axes {', '.join(map(repr, added))}; "
            "say how the result is sharded by out_sharding, or reshard the operands"
        )
    wanted = None if out_sharding is None else _wanted(op, out_sharding, len(result))
    natural = [axes.get(factor, ()) for factor in result]
    scatter = scatter_axis(natural, added, wanted)
    final = [have + (added if i == scatter else ()) for i, have in enumerate(natural)]
    if "o" in result:
        axes["c"] = final[result.index("o")]
    specs = [PartitionSpec(*(axes.get(f) or None for f in names)) for _, names in operands]
    names = _explicit_axes(mesh)
    y = jax.shard_map(
        lambda *pieces: local(piece, pieces, added, scatter),
        mesh=mesh,
        in_specs=tuple(specs),
        out_specs=PartitionSpec(*(have or None for have in final)),
        # All of them are named by none: vmap over a sharded axis takes that axis away from the mesh.
        axis_names=names if len(names) < len(mesh.axis_names) else set(),
    )(*(_reshard(x, mesh, spec) for (x, _), spec in zip(operands, specs, strict=True)))
    if wanted is None or wanted == tuple(final):
        return y
    return _reshard(y, mesh, PartitionSpec(*(want or None for want in wanted)))


def _reshard(x: jax.Array, mesh: Any, spec: PartitionSpec) -> jax.Array:
    if _spec_of(x) == padded_spec(spec, x.ndim):
        return x
    return jax.sharding.reshard(x, NamedSharding(mesh, spec))


def _wanted(op: str, out_sharding: Any, ndim: int) -> tuple[Axes, ...]:
    spec = out_sharding.spec if isinstance(out_sharding, NamedSharding) else out_sharding
    if not isinstance(spec, PartitionSpec) or len(spec) > ndim:
        raise ValueError(
            f"{op}: out_sharding is {out_sharding!r}, expected a NamedSharding or a PartitionSpec of at most {ndim} "
            "entries"
        )
    return padded_spec(spec, ndim)


def place(op: str, y: jax.Array, out_sharding: Any) -> jax.Array:
    """A result whose operands no explicit axis splits, with the sharding that was asked for, if any."""
    if out_sharding is None:
        return y
    _wanted(op, out_sharding, y.ndim)
    mesh = out_sharding.mesh if isinstance(out_sharding, NamedSharding) else jax.sharding.get_abstract_mesh()
    if AxisType.Explicit not in (mesh.axis_types or ()):
        raise ValueError(
            f"{op}: out_sharding is given, but the mesh has no explicit axes; on other meshes use "
            "jax.lax.with_sharding_constraint on the result"
        )
    return jax.sharding.reshard(y, out_sharding)


def by_parts(function: Callable[..., Any], trailing: Sequence[int], op: str = "") -> Callable[..., Any]:
    """A function ``f(*arrays, layout)`` of a weight that runs on each device's part where its arrays are split.

    Args:
      function: Local to windows and column blocks; its results have them as their first axes after the batch axes.
      trailing: For each array its number of axes after the batch axes: the first two are windows (in_features) and
        column blocks (out_features), a single one is out_features, and 0 stands for a scalar. Arrays may be None.
      op: Who asks, for errors; by default the function's name.
    """

    def whole(*arguments: Any) -> Any:
        *arrays, layout = arguments
        if not is_split(*arrays):
            return function(*arguments)
        lead = tuple(f"b{i}" for i in range(arrays[0].ndim - trailing[0]))

        def local(piece: Layout, parts: tuple[Any, ...], axes: Axes, scatter: int | None) -> Any:
            rest = iter(parts)
            return function(*(None if a is None else next(rest) for a in arrays), piece)

        names = ((*lead, *("woqkn"[:axes] if axes > 1 else "c")) if axes else () for axes in trailing)
        operands = [(a, f) for a, f in zip(arrays, names, strict=True) if a is not None]
        return run(op or function.__name__.strip("_"), layout, operands, (*lead, "w", "o"), local)

    return whole
