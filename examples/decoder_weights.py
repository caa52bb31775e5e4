"""Parameters of `decoder.Decoder` from a Hugging Face folder: config.json and safetensors, read by name."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import safetensors
from decoder import Config, Decoder, RopeScaling, linear
from flax import nnx

_EXPECTED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "sliding_window": None}
_FAMILIES = ("llama", "mistral")

_LAYER = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
    "attention_norm": ("input_layernorm",),
    "mlp_norm": ("post_attention_layernorm",),
}
_TOP = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}


def _names(path: str) -> list[str]:
    """The tensors of a path of the decoder: those of "layers.0.qkv" are three."""
    if path in _TOP:
        return [f"{_TOP[path]}.weight"]
    layer, _, part = path.rpartition(".")
    return [f"model.{layer}.{name}.weight" for name in _LAYER[part]]


def read_config(path: str | pathlib.Path) -> Config:
    """Reads config.json, in the form of transformers 4 (rope_theta, rope_scaling) or 5 (rope_parameters).

    Raises:
      ValueError: Where it describes something that `Decoder` does not compute.
    """
    fields = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    if fields.get("model_type") not in _FAMILIES:
        raise ValueError(f"{path}: model_type is {fields.get('model_type')!r}, expected one of {', '.join(_FAMILIES)}")
    for name, want in _EXPECTED.items():
        if (fields.get(name, want) or want) != want:
            raise ValueError(f"{path}: {name} is {fields[name]!r}, expected {want!r}: only such decoders run here")
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    heads = fields["num_attention_heads"]
    derived = {
        "num_key_value_heads": fields.get("num_key_value_heads") or heads,
        "head_dim": fields.get("head_dim") or fields["hidden_size"] // heads,
        "rope_theta": fields.get("rope_theta", rope.get("rope_theta", 10000.0)),
        "rope_scaling": _rope_scaling(path, rope),
    }
    known = {f.name for f in dataclasses.fields(Config)} - set(derived)
    config = Config(**{name: fields[name] for name in known if name in fields}, **derived)
    if config.num_attention_heads % config.num_key_value_heads:
        raise ValueError(
            f"{path}: num_attention_heads is {heads}, expected a multiple of num_key_value_heads = "
            f"{config.num_key_value_heads}"
        )
    return config


def _rope_scaling(path: str | pathlib.Path, rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(f"{path}: rope_type is {kind!r}, expected 'default' or 'llama3'")
    return RopeScaling(**{f.name: rope[f.name] for f in dataclasses.fields(RopeScaling)})


class Checkpoint:
    """A `Source` that reads safetensors by name, in one file or in shards with an index.

    Args:
      folder: With model.safetensors, or model.safetensors.index.json and the files that it names.
      dtype: Of the parameters; by default that of each tensor.

    Raises:
      FileNotFoundError: Where there is neither file.
      ValueError: Where a tensor is missing or of another shape than config.json says.
    """

    def __init__(self, folder: str | pathlib.Path, dtype: Any = None) -> None:
        folder = pathlib.Path(folder)
        single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
        if index.is_file():
            files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            self._files = {name: folder / file for name, file in files.items()}
        elif single.is_file():
            with safetensors.safe_open(single, framework="flax") as file:
                self._files = dict.fromkeys(file.keys(), single)
        else:
            raise FileNotFoundError(f"{folder}: expected {single.name} or {index.name}")
        self._folder, self._dtype = folder, dtype

    def _read(self, name: str, shape: tuple[int | None, ...]) -> jax.Array:
        if name not in self._files:
            raise ValueError(f"{self._folder}: {name} is missing from the weights")
        with safetensors.safe_open(self._files[name], framework="flax") as file:
            tensor = file.get_tensor(name)
        if len(tensor.shape) != len(shape) or any(w not in (None, g) for g, w in zip(tensor.shape, shape, strict=True)):
            raise ValueError(
                f"{self._files[name]}: {name} has shape {tuple(tensor.shape)}, expected {shape} (from config.json)"
            )
        return jnp.asarray(tensor, self._dtype)

    def projection(self, path: str, in_features: int, out_features: int) -> nnx.Module:
        # In the file [out_features, in_features].
        kernel = jnp.concatenate([self._read(name, (None, in_features)) for name in _names(path)]).T
        if kernel.shape[1] != out_features:
            raise ValueError(
                f"{self._folder}: {' and '.join(_names(path))} have {kernel.shape[1]} rows together, expected "
                f"{out_features} (from config.json)"
            )
        return linear(kernel)

    def array(self, path: str, *shape: int) -> jax.Array:
        return self._read(_names(path)[0], shape)


def load(folder: str | pathlib.Path, *, dtype: Any = None, scan: bool = False) -> Decoder:
    """The decoder in a Hugging Face folder; dtype as in `Checkpoint`, scan as in `Decoder`."""
    config = read_config(pathlib.Path(folder) / "config.json")
    return Decoder(config, Checkpoint(folder, dtype), scan)


def nbytes(decoder: Decoder) -> int:
    """Bytes of all parameters."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(decoder))
