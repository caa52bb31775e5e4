"""Self-describing files: pytrees of arrays and N:M sparse weights as safetensors."""

from __future__ import annotations

import json
import os
import pathlib
import tempfile
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_nmsparse.array import NMSparse
from jax_nmsparse.layout import FORMAT_VERSION
from jax_nmsparse.pattern import NMPattern

_KEY = "jax_nmsparse"
_SEPARATOR = "."
_PARTS = ("values", "mask", "scales")

# safetensors writes and reads float8 and bfloat16 as raw bytes of another NumPy dtype.
_RAW = {"bfloat16": np.uint16, "float8_e4m3fn": np.uint8}


def _safetensors():
    try:
        import safetensors  # noqa: PLC0415  (an extra, needed here alone)
        import safetensors.numpy  # noqa: PLC0415
    except ImportError as error:
        raise ImportError("checkpoint files need safetensors: pip install 'jax_nmsparse[demo]'") from error
    return safetensors


def _flatten(tree: Any, prefix: str, out: dict[str, Any]) -> None:
    if isinstance(tree, Mapping):
        for key, child in tree.items():
            if (not isinstance(key, (str, int)) or isinstance(key, bool)) or key == "":
                raise TypeError(f"save: the key {key!r} under {prefix or 'the root'!r} is no string or integer")
            if _SEPARATOR in str(key):
                raise ValueError(f"save: the key {key!r} holds {_SEPARATOR!r}, which separates levels in the file")
            name = f"{prefix}{_SEPARATOR}{key}" if prefix else str(key)
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
    safetensors = _safetensors()
    if not isinstance(tree, Mapping):
        raise TypeError(f"save: the tree is a {type(tree).__name__}, expected a dict")
    flat: dict[str, Any] = {}
    _flatten(tree, "", flat)
    tensors: dict[str, np.ndarray] = {}
    weights: dict[str, dict[str, Any]] = {}
    dtypes: dict[str, str] = {}

    def put(name: str, array: Any) -> None:
        array = np.asarray(jax.device_get(array), order="C")
        if array.dtype.name in _RAW:
            dtypes[name] = array.dtype.name
            array = array.view(_RAW[array.dtype.name])
        if name in tensors:
            raise ValueError(f"save: two leaves are both named {name!r} in the file")
        tensors[name] = array

    for name, leaf in flat.items():
        if isinstance(leaf, NMSparse):
            weights[name] = {"pattern": str(leaf.pattern), "shape": list(leaf.shape)}
            for part in _PARTS:
                if getattr(leaf, part) is not None:
                    put(f"{name}{_SEPARATOR}{part}", getattr(leaf, part))
        else:
            put(name, leaf)
    described = json.dumps({"format_version": FORMAT_VERSION, "weights": weights, "dtypes": dtypes}, sort_keys=True)
    path = pathlib.Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    os.close(handle)
    try:
        safetensors.numpy.save_file(tensors, temporary, metadata={_KEY: described})
        os.replace(temporary, path)
    except BaseException:
        pathlib.Path(temporary).unlink(missing_ok=True)
        raise


def _description(path: pathlib.Path, metadata: Mapping[str, str] | None) -> dict[str, Any]:
    if not metadata or _KEY not in metadata:
        return {"weights": {}, "dtypes": {}}
    described = json.loads(metadata[_KEY])
    if described["format_version"] != FORMAT_VERSION:
        raise ValueError(
            f"load: {path} has format version {described['format_version']}, this version of jax_nmsparse reads "
            f"{FORMAT_VERSION}"
        )
    return described


def load(path: str | os.PathLike, like: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Reads what `save` wrote; other safetensors files come back as plain arrays.

    Args:
      path: The file.
      like: Optional nested dicts of arrays, `NMSparse` weights or their abstract forms; names, patterns, shapes and
        dtypes of the file must be the same. So the variables of a layer come back only into those of the same pattern.

    Returns:
      Nested dicts with the keys of like, otherwise with strings.

    Raises:
      ValueError: For a file that is damaged, of another format version, or different from `like`.
    """
    safetensors = _safetensors()
    path = pathlib.Path(path)
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            described = _description(path, file.metadata())
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
    except safetensors.SafetensorError as error:
        raise ValueError(f"load: {path} is not a whole safetensors file: {error}") from error
    for name, dtype in described["dtypes"].items():
        tensors[name] = tensors[name].view(jnp.dtype(dtype))
    leaves: dict[str, Any] = {}
    for name, weight in described["weights"].items():
        parts = {part: tensors.pop(f"{name}{_SEPARATOR}{part}", None) for part in _PARTS}
        for part in ("values", "mask"):
            if parts[part] is None:
                raise ValueError(f"load: {path} describes the weight {name!r} but lacks its {part}")
        arrays = {part: jnp.asarray(array) for part, array in parts.items() if array is not None}
        pattern = NMPattern.parse(weight["pattern"])
        leaves[name] = NMSparse(**arrays, shape=tuple(weight["shape"]), pattern=pattern)
    leaves.update({name: jnp.asarray(array) for name, array in tensors.items()})
    if like is not None:
        _check_like(path, leaves, like)
        return _arranged(like, "", leaves)
    tree: dict[str, Any] = {}
    for name, leaf in sorted(leaves.items()):
        *parents, last = name.split(_SEPARATOR)
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
        key: _arranged(child, f"{prefix}{_SEPARATOR}{key}" if prefix else str(key), leaves)
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
