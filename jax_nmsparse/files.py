"""Safetensors files of arrays and N:M sparse weights by name, read one tensor at a time."""

from __future__ import annotations

import json
import os
import pathlib
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_nmsparse.array import NMSparse
from jax_nmsparse.layout import FORMAT_VERSION
from jax_nmsparse.pattern import NMPattern

SEPARATOR = "."
_KEY = "jax_nmsparse"
_PARTS = ("values", "mask", "scales")

# Written as raw bytes of another NumPy dtype, since safetensors does not read float8 into NumPy; the metadata says so.
_RAW = {"bfloat16": np.uint16, "float8_e4m3fn": np.uint8}

_DTYPES = {
    "BOOL": "bool",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
}


def _safetensors() -> Any:
    try:
        import safetensors  # noqa: PLC0415  (an extra, needed here alone)
        import safetensors.numpy  # noqa: PLC0415
    except ImportError as error:
        raise ImportError("safetensors files need the package: pip install 'jax_nmsparse[cli]'") from error
    return safetensors


def check_target(op: str, path: str | os.PathLike) -> None:
    """Raises where no file can appear, or something that is no file would be replaced."""
    path = pathlib.Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{op}: there is no directory {path.parent}")
    if path.is_dir():
        raise IsADirectoryError(f"{op}: {path} is a directory, expected the name of a file")
    if path.exists() and not path.is_file():
        raise FileExistsError(f"{op}: {path} is no regular file, which would be replaced; choose another name")


class Reader:
    """An open file: names, what is under them, and the arrays one at a time. A context manager.

    Attributes:
      names: Of arrays and weights, sorted; a weight counts as one.
      weights: Name -> ``{"pattern": ..., "shape": ...}``.
      metadata: What others wrote into the file's metadata.

    Raises:
      ValueError: For a file that is damaged or of another format version.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        safetensors = _safetensors()
        self.path = pathlib.Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"load: there is no file {self.path}")
        try:
            self._file = safetensors.safe_open(self.path, framework="numpy")
        except safetensors.SafetensorError as error:
            raise ValueError(f"load: {self.path} is not a whole safetensors file: {error}") from error
        self.metadata = dict(self._file.metadata() or {})
        self.weights, self._dtypes = self._description()
        tensors = set(self._file.keys())
        parts = {f"{name}{SEPARATOR}{part}" for name in self.weights for part in _PARTS}
        for name in self.weights:
            for part in _PARTS[:2]:
                if f"{name}{SEPARATOR}{part}" not in tensors:
                    raise ValueError(f"load: {self.path} describes the weight {name!r} but lacks its {part}")
        self._tensors = tensors
        self.names = sorted((tensors - parts) | set(self.weights))

    def __enter__(self) -> Reader:
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)

    def _description(self) -> tuple[dict[str, Any], dict[str, str]]:
        text = self.metadata.pop(_KEY, None)
        if text is None:
            return {}, {}
        try:
            described = json.loads(text)
            version, weights, dtypes = (described[key] for key in ("format_version", "weights", "dtypes"))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"load: {self.path} has a damaged description of its weights: {error!r}") from error
        if version != FORMAT_VERSION:
            raise ValueError(
                f"load: {self.path} has format version {version}, this version of jax_nmsparse reads {FORMAT_VERSION}"
            )
        return weights, dtypes

    def array_type(self, name: str) -> tuple[tuple[int, ...], str]:
        """Shape and dtype of an array, without reading it."""
        piece = self._file.get_slice(name)
        stored: str = piece.get_dtype()
        return tuple(piece.get_shape()), self._dtypes.get(name, _DTYPES.get(stored, stored))

    def parts(self, name: str) -> dict[str, str]:
        """Names of the tensors of a weight: values, mask and, where there are any, scales."""
        stored = {part: f"{name}{SEPARATOR}{part}" for part in _PARTS}
        return {part: tensor for part, tensor in stored.items() if tensor in self._tensors}

    def _array(self, name: str) -> np.ndarray:
        try:
            array = self._file.get_tensor(name)
        except Exception as error:  # safetensors raises AttributeError for a dtype that NumPy lacks
            raise ValueError(
                f"load: {name!r} in {self.path} has dtype {self.array_type(name)[1]}, which cannot be read ({error})"
            ) from error
        return array.view(jnp.dtype(self._dtypes[name])) if name in self._dtypes else array

    def read(self, name: str) -> np.ndarray | NMSparse:
        """An array, in the dtype of the file, or a weight."""
        if name not in self.weights:
            return self._array(name)
        weight = self.weights[name]
        arrays = {part: jnp.asarray(self._array(tensor)) for part, tensor in self.parts(name).items()}
        try:
            pattern, shape = NMPattern.parse(weight["pattern"]), tuple(weight["shape"])
            return NMSparse(**arrays, shape=shape, pattern=pattern)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"load: the weight {name!r} in {self.path} is damaged: {error}") from error


def write(
    path: str | os.PathLike, leaves: Iterable[tuple[str, Any]], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes arrays and weights by name; the file appears whole or not at all.

    Args:
      path: Where to write.
      leaves: Names and arrays or `NMSparse` weights, taken one at a time.
      metadata: More texts for the metadata of the file.

    Raises:
      OSError: Where path cannot become a file, before anything is taken.
      ValueError: For a name that occurs twice.
    """
    safetensors = _safetensors()
    check_target("save", path)
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

    for name, leaf in leaves:
        if isinstance(leaf, NMSparse):
            weights[name] = {"pattern": str(leaf.pattern), "shape": list(leaf.shape)}
            for part in _PARTS:
                if getattr(leaf, part) is not None:
                    put(f"{name}{SEPARATOR}{part}", getattr(leaf, part))
        else:
            put(name, leaf)
    described = json.dumps({"format_version": FORMAT_VERSION, "weights": weights, "dtypes": dtypes}, sort_keys=True)
    path = pathlib.Path(path)
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    try:
        safetensors.numpy.save_file(tensors, temporary, metadata={**(metadata or {}), _KEY: described})
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
