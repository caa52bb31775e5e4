"""Where the arrays of a weight lie on a mesh: shardings from one for the dense weight, padding, rules for Flax models.

A sharding of the dense weight ``[..., in_features, out_features]`` says everything: windows are split as in_features
are, column blocks as out_features, scales as out_features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from jax_nmsparse.array import NMSparse, check_pattern
from jax_nmsparse.layout import Layout
from jax_nmsparse.meshes import check_whole, padded_spec, parts_of
from jax_nmsparse.pattern import NMPattern

Rules = Mapping[str, Any] | Sequence[tuple[str, Any]]
"""Logical axis name -> mesh axis (or a tuple of them, or None), as in `flax.linen.logical_axis_rules`."""


def _is_weight(node: Any) -> bool:
    return isinstance(node, NMSparse)


def shardings(tree: Any, sharding: Any) -> Any:
    """For every leaf of a pytree its sharding; a weight's arrays follow one sharding of the dense weight.

    ``jax.device_put(w, NamedSharding(...))`` cannot work, since values, mask and scales have different axes;
    ``jax.device_put(w, shardings(w, NamedSharding(...)))`` does.

    Args:
      tree: An `NMSparse`, or any pytree of weights and arrays; abstract ones (`jax.ShapeDtypeStruct`) too.
      sharding: A `NamedSharding` for everything, or a prefix pytree of them, as in `jax.device_put`. For a weight
        ``[..., in_features, out_features]`` it is that of the dense weight.

    Returns:
      A pytree of the structure of tree, with the `NamedSharding` of every array; for ``in_shardings`` of `jax.jit`
      too.

    Raises:
      ValueError: Where a part would not hold whole windows and whole column blocks, or the spec is too long.
      TypeError: For anything but a `NamedSharding`.

    Example:
      >>> import jax, jax.numpy as jnp, jax_nmsparse as nms
      >>> from jax.sharding import NamedSharding, PartitionSpec as P
      >>> from jax_nmsparse.placement import shardings
      >>> mesh = jax.make_mesh((1, 1), ("data", "tensor"), devices=jax.devices()[:1])
      >>> w = nms.prune(jnp.ones((64, 8)), "2:4")
      >>> s = shardings(w, NamedSharding(mesh, P("data", "tensor")))
      >>> tuple(s.values.spec), tuple(s.mask.spec)
      (('data', 'tensor', None, None, None), ('data', 'tensor'))
      >>> w = jax.device_put(w, s)
    """
    flat, structure = jax.tree.flatten(tree, is_leaf=_is_weight)
    chosen = jax.tree.broadcast(sharding, jax.tree.unflatten(structure, [0] * len(flat)))
    placed = [_one(leaf, s) for leaf, s in zip(flat, jax.tree.leaves(chosen), strict=True)]
    return jax.tree.unflatten(structure, placed)


def _one(leaf: Any, sharding: Any) -> Any:
    if not isinstance(sharding, NamedSharding):
        raise TypeError(f"shardings: the sharding is a {type(sharding).__name__}, expected a NamedSharding")
    if not _is_weight(leaf):
        return sharding
    spec, mesh = sharding.spec, sharding.mesh
    if len(spec) > leaf.ndim:
        raise ValueError(
            f"shardings: the sharding {spec} has {len(spec)} entries, expected at most {leaf.ndim} (= axes of {leaf!r})"
        )
    *lead, rows, columns = padded_spec(spec, leaf.ndim)
    check_whole("shardings", leaf.layout, parts_of(mesh, rows), parts_of(mesh, columns))

    def like(*entries: tuple[str, ...], ndim: int) -> NamedSharding:
        full = [entry or None for entry in entries] + [None] * (ndim - len(entries))
        return NamedSharding(mesh, PartitionSpec(*full), memory_kind=sharding.memory_kind)

    return leaf._replace(
        values=like(*lead, rows, columns, ndim=leaf.values.ndim),
        mask=like(*lead, rows, columns, ndim=leaf.mask.ndim),
        scales=None if leaf.scales is None else like(*lead, columns, ndim=leaf.scales.ndim),
    )


def local(w: NMSparse) -> NMSparse:
    """Inside `jax.shard_map`: the weight that this device holds.

    A weight that shard_map has cut still says the shape of the whole one. ``in_specs`` takes one spec for values and
    mask, as a prefix: ``PartitionSpec(None, "tensor")`` for columns, ``PartitionSpec("tensor")`` for rows.

    Args:
      w: The weight that shard_map gave, cut into whole windows and column blocks.

    Raises:
      ValueError: Where a padded axis was cut: the last part would be shorter than the others.

    Example:
      >>> import jax, jax.numpy as jnp, jax_nmsparse as nms
      >>> from jax.sharding import AxisType, PartitionSpec as P
      >>> from jax_nmsparse.placement import local
      >>> mesh = jax.make_mesh((1,), ("tensor",), devices=jax.devices()[:1], axis_types=(AxisType.Auto,))
      >>> f = jax.shard_map(lambda x, w: x @ local(w), mesh=mesh,
      ...                   in_specs=(P(), P(None, "tensor")), out_specs=P(None, "tensor"))
      >>> f(jnp.ones((2, 64)), nms.prune(jnp.ones((64, 8)), "2:4")).shape
      (2, 8)
    """
    layout = w.layout
    windows, blocks = w.values.shape[-5:-3]
    sizes = []
    for name, whole, padded, unit, count in (
        ("in_features", layout.in_features, layout.padded_in, layout.rows_per_window, windows),
        ("out_features", layout.out_features, layout.padded_out, layout.bn, blocks),
    ):
        if count * unit != padded and padded != whole:
            raise ValueError(
                f"local: {name} is {whole}, expected a multiple of {unit} where it is cut (pattern {layout.pattern}); "
                "pad the dense weight (placement.pad)"
            )
        sizes.append(whole if count * unit == padded else count * unit)
    shape = (*w.values.shape[:-5], *sizes)
    return NMSparse(w.values, w.mask, shape=shape, pattern=w.pattern, scales=w.scales)


def padded_shape(
    shape: Sequence[int], pattern: NMPattern | str, mesh: Any = None, spec: PartitionSpec | None = None
) -> tuple[int, ...]:
    """The smallest dense shape, at least `shape`, of which every device holds whole windows and column blocks.

    Args:
      shape: ``(..., in_features, out_features)``.
      pattern: The pattern, or a string.
      mesh, spec: How the dense weight will be split; without them for one part.

    Raises:
      ValueError, TypeError: For a shape of fewer than two axes, a spec that is too long or names an axis that the mesh
        does not have, or one without a mesh.

    Example:
      >>> import jax
      >>> from jax_nmsparse.placement import padded_shape
      >>> padded_shape((100, 300), "8:32/1x128")
      (128, 384)
    """
    pattern = check_pattern("padded_shape", pattern)
    if len(shape) < 2:
        raise ValueError(f"padded_shape: the shape is {tuple(shape)}, expected (..., in_features, out_features)")
    *lead, in_features, out_features = shape
    rows, columns = ((), ()) if spec is None else _split(mesh, spec, len(shape))
    layout = Layout(pattern, in_features, out_features)
    unit_in = layout.rows_per_window * (parts_of(mesh, rows) if rows else 1)
    unit_out = layout.bn * (parts_of(mesh, columns) if columns else 1)
    return (*lead, -(-in_features // unit_in) * unit_in, -(-out_features // unit_out) * unit_out)


def _split(mesh: Any, spec: Any, ndim: int) -> tuple[tuple[str, ...], ...]:
    """The mesh axes of in_features and of out_features."""
    if mesh is None:
        raise TypeError("padded_shape: spec is given and mesh is None, expected the mesh whose axes spec names")
    if not isinstance(spec, PartitionSpec):
        raise TypeError(f"padded_shape: spec is a {type(spec).__name__}, expected a PartitionSpec of the dense weight")
    if len(spec) > ndim:
        raise ValueError(f"padded_shape: spec {spec} has {len(spec)} entries, expected at most {ndim} (= axes)")
    entries = padded_spec(spec, ndim)
    for axis in (a for entry in entries for a in entry):
        if axis not in mesh.axis_names:
            raise ValueError(
                f"padded_shape: spec {spec} names the mesh axis {axis!r}, expected one of "
                f"{', '.join(map(repr, mesh.axis_names))}"
            )
    return entries[-2:]


def pad(dense: ArrayLike, pattern: NMPattern | str, mesh: Any = None, spec: PartitionSpec | None = None) -> jax.Array:
    """A dense weight with zero rows and columns up to `padded_shape`: prune it then.

    x is padded with ``x.shape[-1]`` zeros to match, or left as the layer before gives it where its columns were padded
    too: columns of zeros give zeros, which zero rows ignore.

    Args:
      dense: ``[..., in_features, out_features]``.
      pattern, mesh, spec: As in `padded_shape`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_nmsparse.placement import pad
      >>> pad(jnp.ones((40, 8)), "2:4").shape
      (64, 8)
    """
    dense = jnp.asarray(dense)
    shape = padded_shape(dense.shape, pattern, mesh, spec)
    return jnp.pad(dense, [(0, new - old) for old, new in zip(dense.shape, shape, strict=True)])


def sharding_rules(mesh: Any, names: Any, rules: Rules) -> Any:
    """From logical axis names to shardings, for the variables of a Flax model: linen or NNX.

    Args:
      mesh: The mesh.
      names: A pytree of `PartitionSpec` of logical names: ``nn.get_partition_spec(variables)`` of linen,
        ``nnx.get_partition_spec(state)`` of NNX. A kernel_init wrapped in ``nn.with_logical_partitioning(init,
        ("embed", "mlp"))`` gives values, mask and bias of an `NMSparseDense` these names.
      rules: (logical name, mesh axis) pairs, or a mapping; the first pair of a name counts, mesh axes that an array
        uses already are passed over, names without a rule are not split.

    Returns:
      The same pytree with a `NamedSharding` in place of each spec.

    Raises:
      ValueError: Where a rule names an axis that the mesh does not have.

    Example:
      >>> import jax
      >>> from jax.sharding import PartitionSpec as P
      >>> from jax_nmsparse.placement import sharding_rules
      >>> mesh = jax.make_mesh((1, 1), ("data", "tensor"), devices=jax.devices()[:1])
      >>> tuple(sharding_rules(mesh, {"values": P("embed", "mlp")}, {"mlp": "tensor"})["values"].spec)
      (None, 'tensor')
    """
    table: dict[str, tuple[str, ...]] = {}
    for name, axes in rules.items() if isinstance(rules, Mapping) else rules:
        axes = padded_spec((axes,), 1)[0]
        unknown = [a for a in axes if a not in mesh.axis_names]
        if unknown:
            raise ValueError(
                f"sharding_rules: the rule for {name!r} names the mesh axis {unknown[0]!r}, expected one of "
                f"{', '.join(map(repr, mesh.axis_names))}"
            )
        table.setdefault(name, axes)

    def resolve(spec: Any) -> NamedSharding:
        used: set[str] = set()
        entries = []
        for names in padded_spec(spec, len(spec)):
            axes = tuple(a for name in names for a in table.get(name, ()) if a not in used)
            used.update(axes)
            entries.append(axes or None)
        return NamedSharding(mesh, PartitionSpec(*entries))

    return jax.tree.map(resolve, names, is_leaf=lambda node: isinstance(node, PartitionSpec))


def abstract(tree: Any, sharding: Any) -> Any:
    """The shapes, dtypes and shardings of a pytree without its contents: what a checkpoint is restored into.

    Args:
      tree: A pytree of weights and arrays, or of `jax.ShapeDtypeStruct` (from `jax.eval_shape`).
      sharding: As in `shardings`.

    Example:
      >>> import jax, jax.numpy as jnp, jax_nmsparse as nms
      >>> from jax_nmsparse.placement import abstract
      >>> mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
      >>> replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
      >>> abstract(nms.prune(jnp.ones((64, 8)), "2:4"), replicated)
      NMSparse(64x8, 2:4, float32)
    """
    placed = shardings(tree, sharding)
    return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), tree, placed)
