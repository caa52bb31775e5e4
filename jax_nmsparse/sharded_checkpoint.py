"""Checkpoints of sharded pytrees by orbax: saved on one mesh, restored on another.

Every process writes and reads its own parts of values and mask; no weight is gathered or made dense. Beside the arrays
stands what every weight is: pattern, shape and format version, which restoring checks, since a mask of 2:4 has the
shape of one of 16:32.
"""

from __future__ import annotations

import os
import pathlib
from typing import Any

import jax

from jax_nmsparse.array import NMSparse
from jax_nmsparse.layout import FORMAT_VERSION


def _orbax() -> Any:
    try:
        import orbax.checkpoint as ocp  # noqa: PLC0415  (comes with Flax, needed here alone)
    except ImportError as error:
        raise ImportError("sharded checkpoints need orbax: pip install orbax-checkpoint") from error
    return ocp


def _described(tree: Any) -> dict[str, Any]:
    """Pattern and shape of every weight, by its place in the pytree."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: isinstance(node, NMSparse))
    weights = {
        jax.tree_util.keystr(path): {"pattern": str(leaf.pattern), "shape": list(leaf.shape)}
        for path, leaf in leaves
        if isinstance(leaf, NMSparse)
    }
    return {"format_version": FORMAT_VERSION, "weights": weights}


def _absolute(path: str | os.PathLike) -> pathlib.Path:
    return pathlib.Path(path).absolute()


def save(path: str | os.PathLike, tree: Any) -> None:
    """Writes a pytree of (sharded) arrays and weights to a new directory; it appears whole or not at all.

    With several processes all of them call it, with the same path on a file system that they share.

    Args:
      path: A directory that does not exist yet.
      tree: Any pytree of arrays and `NMSparse` weights: parameters, optimiser state, steps.

    Raises:
      ValueError: Where the directory exists.
    """
    ocp = _orbax()
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        arguments = ocp.args.Composite(state=ocp.args.PyTreeSave(tree), weights=ocp.args.JsonSave(_described(tree)))
        checkpointer.save(_absolute(path), args=arguments)


def describe(path: str | os.PathLike) -> dict[str, Any]:
    """What the weights of a checkpoint are, without reading them.

    Returns:
      ``{"format_version": 1, "weights": {place in the pytree: {"pattern": "2:4", "shape": [64, 8]}}}``.
    """
    ocp = _orbax()
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        return checkpointer.restore(_absolute(path), args=ocp.args.Composite(weights=ocp.args.JsonRestore())).weights


def restore(path: str | os.PathLike, like: Any) -> Any:
    """Reads what `save` wrote, every array straight into its sharding.

    Args:
      path: The directory.
      like: A pytree of the same structure whose leaves say shape, dtype and sharding: `placement.abstract`.

    Returns:
      The pytree.

    Raises:
      ValueError: Where a weight has another pattern or shape, or the checkpoint another format version.

    Example:
      >>> import os, tempfile, jax, jax.numpy as jnp, jax_nmsparse as nms
      >>> from jax_nmsparse import placement, sharded_checkpoint
      >>> path = os.path.join(tempfile.mkdtemp(), "step_0")
      >>> sharded_checkpoint.save(path, {"w": nms.NMSparse.fromdense(jnp.eye(8), "1:4")})
      >>> mesh = jax.make_mesh((1,), ("tensor",), devices=jax.devices()[:1])
      >>> columns = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "tensor"))
      >>> shapes = jax.eval_shape(lambda: {"w": nms.prune(jnp.zeros((8, 8)), "1:4")})
      >>> sharded_checkpoint.restore(path, placement.abstract(shapes, columns))
      {'w': NMSparse(8x8, 1:4, float32)}
    """
    ocp = _orbax()
    found, expected = describe(path), _described(like)
    if found["format_version"] != FORMAT_VERSION:
        raise ValueError(
            f"restore: {path} has format version {found['format_version']}, this version of jax_nmsparse reads "
            f"{FORMAT_VERSION}"
        )
    for name in sorted(found["weights"].keys() | expected["weights"].keys()):
        got, want = found["weights"].get(name), expected["weights"].get(name)
        if got != want:
            raise ValueError(f"restore: the weight {name} in {path} is {_text(got)}, expected {_text(want)} (= like)")
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        how = ocp.checkpoint_utils.construct_restore_args(like)
        arguments = ocp.args.Composite(state=ocp.args.PyTreeRestore(like, restore_args=how))
        return checkpointer.restore(_absolute(path), args=arguments).state


def _text(weight: dict[str, Any] | None) -> str:
    return "missing" if weight is None else f"{'x'.join(map(str, weight['shape']))} {weight['pattern']}"
