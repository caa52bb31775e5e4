"""Self-describing files: pytrees of arrays and N:M sparse weights as safetensors."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jax_nmsparse.array import NMSparse
from jax_nmsparse.files import SEPARATOR, Reader, write


def _flatten(tree: Any, prefix: str, out: dict[str, Any]) -> None:
    if isinstance(tree, Mapping):
        for key, child in tree.items():
            if (not isinstance(key, (str, int)) or isinstance(key, bool)) or key == "":
                raise TypeError(f"save: the key {key!r} under {prefix or 'the root'!r} is no string or integer")
            if SEPARATOR in str(key):
                raise ValueError(f"save: the key {key!r} holds {SEPARATOR!r}, which separates levels in the file")
            name = f"{prefix}{SEPARATOR}{key}" if prefix else str(key)
            if name in out:
                raise ValueError(f"save: two leaves are both named {name!r} in the file")
            _flatten(child, name, out)
    elif isinstance(tree, NMSparse) or (hasattr(tree, "shape") and hasattr(tree, "dtype")):
        out[prefix] = tree
    else:
        raise TypeError(
            f"save: {prefix!r} is a {type(tree).__name__}, expected an array, an NMSparse or a dict of them"
        )


def save(path: str | os.PathLike, tree: Mapping[str, Any]) -> None:
    """Writes nested dicts of arrays and `NMSparse` weights to one safetensors file.

    A weight becomes the tensors NAME.values, NAME.mask and NAME.scales; the file's metadata says its pattern, block,
    shape and format version. The variables of layers, of linen or of NNX (``nnx.to_pure_dict(nnx.state(model))``), say
    it themselves, in the name of a tensor. The file appears whole or not at all.

    Args:
      path: Where to write.
      tree: Nested dicts; keys are strings or integers.

    Raises:
      TypeError, ValueError: For a key or leaf that cannot be written; nothing is written then.

    Example:
      >>> import os, tempfile, jax.numpy as jnp, jax_nmsparse as nms
      >>> from jax_nmsparse import checkpoint
      >>> path = os.path.join(tempfile.mkdtemp(), "w.safetensors")
      >>> checkpoint.save(path, {"mlp": {"w": nms.NMSparse.fromdense(jnp.eye(8), "1:4")}})
      >>> checkpoint.load(path)
      {'mlp': {'w': NMSparse(8x8, 1:4, float32)}}
    """
    if not isinstance(tree, Mapping):
        raise TypeError(f"save: the tree is a {type(tree).__name__}, expected a dict")
    flat: dict[str, Any] = {}
    _flatten(tree, "", flat)
    write(path, flat.items())


def load(path: str | os.PathLike, like: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Reads what `save` wrote; other safetensors files come back as plain arrays.

    Args:
      path: The file.
      like: Optional nested dicts of arrays, `NMSparse` weights or their abstract forms; names, patterns, shapes and
        dtypes of the file must be the same. So the variables of a layer come back only into those of the same pattern.

    Returns:
      Nested dicts with the keys of like, otherwise with strings.

    Raises:
      FileNotFoundError: Where there is none.
      ValueError: For a file that is damaged, of another format version, or different from `like`.
    """
    with Reader(path) as reader:
        leaves = {name: reader.read(name) for name in reader.names}
    leaves = {name: leaf if isinstance(leaf, NMSparse) else jnp.asarray(leaf) for name, leaf in leaves.items()}
    if like is not None:
        _check_like(pathlib.Path(path), leaves, like)
        return _arranged(like, "", leaves)
    tree: dict[str, Any] = {}
    for name, leaf in sorted(leaves.items()):
        *parents, last = name.split(SEPARATOR)
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


def _arranged(like: Any, prefix: str, leaves: Mapping[str, Any]) -> Any:
    """The leaves in nested dicts with the keys of like."""
    if not isinstance(like, Mapping):
        return leaves[prefix]
    return {
        key: _arranged(child, f"{prefix}{SEPARATOR}{key}" if prefix else str(key), leaves)
        for key, child in like.items()
    }


def _describe(leaf: Any) -> str:
    if isinstance(leaf, NMSparse):
        return repr(leaf)
    return f"array {'x'.join(map(str, leaf.shape)) or 'scalar'} {jnp.dtype(leaf.dtype).name}"


def _check_like(path: pathlib.Path, leaves: Mapping[str, Any], like: Mapping[str, Any]) -> None:
    expected: dict[str, Any] = {}
    _flatten(like, "", expected)
    missing, extra = sorted(expected.keys() - leaves.keys()), sorted(leaves.keys() - expected.keys())
    if missing or extra:
        raise ValueError(f"load: {path} lacks {missing} and has besides {extra}")
    for name, leaf in expected.items():
        if _describe(leaf) != _describe(leaves[name]):
            raise ValueError(f"load: {name!r} in {path} is {_describe(leaves[name])}, expected {_describe(leaf)}")
