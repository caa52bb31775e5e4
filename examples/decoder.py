"""A Llama decoder in Flax NNX whose projections are dense or N:M sparse.

    h = embedding[token]
    h = h + out(attention(rope(q), rope(k), v))       (q, k, v) = qkv(RMSNorm(h))        in every layer
    h = h + down(silu(gate) * up)                     (gate, up) = gate_up(RMSNorm(h))
    logits = head(RMSNorm(h))

The projections that read the same input are one product each, `qkv` and `gate_up`: fewer and larger calls, in which a
memory-bound kernel is nearer to its floor. Groups of N:M run along in_features, so that this changes no pattern.

Parameters come from a `Source` while the modules are built: random numbers (`Random`), or files (`decoder_weights`).
`jax_nmsparse.sparsify` makes any of the projections, the head and the embedding sparse afterwards. Everything is a
pytree: a decoder passes `jax.jit` as an argument.

The layers are unrolled, or with ``scan`` one layer whose parameters have a leading axis, which `jax.lax.scan` runs. A
scan slices parameters and cache of every layer out of stacks: XLA copies what it slices for a custom call on a CPU, and
the cache on a GPU. So decode unrolled; scan where compiling time matters more (docs/decisions.md).

Source: Touvron et al., "LLaMA", 2023, arXiv:2302.13971; grouped-query attention after Ainslie et al., EMNLP 2023;
rotary positions after Su et al., "RoFormer", 2021, arXiv:2104.09864; scaling of positions as in Llama 3.1.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.typing import ArrayLike


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretching of slow rotations, named as in config.json."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of a decoder, named as in config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """Columns of q, k and v in `qkv`."""
        keys = self.num_key_value_heads * self.head_dim
        return self.num_attention_heads * self.head_dim, keys, keys

    def projections(self) -> dict[str, tuple[int, int]]:
        """(in_features, out_features) of the projections of a layer."""
        hidden, queries = self.hidden_size, self.qkv_sizes[0]
        return {
            "qkv": (hidden, sum(self.qkv_sizes)),
            "out": (queries, hidden),
            "gate_up": (hidden, 2 * self.intermediate_size),
            "down": (self.intermediate_size, hidden),
        }


class Source(Protocol):
    """Where the parameters of a decoder come from. Paths are such as "layers.3.qkv", "head", "embedding"."""

    def projection(self, path: str, in_features: int, out_features: int) -> nnx.Module:
        """A module that maps ``[..., in_features]`` to ``[..., out_features]``."""
        ...

    def array(self, path: str, *shape: int) -> jax.Array:
        """The embedding or the scale of a norm."""
        ...


def linear(kernel: jax.Array) -> nnx.Linear:
    """The dense projection ``x @ kernel``."""
    return nnx.Linear(
        *kernel.shape,
        use_bias=False,
        dtype=kernel.dtype,
        param_dtype=kernel.dtype,
        kernel_init=lambda *_: kernel,
        rngs=nnx.Rngs(0),
    )


def embed(table: jax.Array) -> nnx.Embed:
    """The embedding ``table[token]``, whose transpose is the head where they are tied."""
    return nnx.Embed(
        *table.shape, dtype=table.dtype, param_dtype=table.dtype, embedding_init=lambda *_: table, rngs=nnx.Rngs(0)
    )


@dataclasses.dataclass
class Random:
    """Random dense parameters: kernels of variance 1 / in_features, scales of 1."""

    key: jax.Array
    dtype: jnp.dtype = jnp.dtype(jnp.float32)

    def _normal(self, shape: tuple[int, ...], scale: float) -> jax.Array:
        self.key, key = jax.random.split(self.key)
        return jax.random.normal(key, shape, self.dtype) * jnp.asarray(scale, self.dtype)

    def projection(self, path: str, in_features: int, out_features: int) -> nnx.Module:
        return linear(self._normal((in_features, out_features), 1 / math.sqrt(in_features)))

    def array(self, path: str, *shape: int) -> jax.Array:
        return self._normal(shape, 1.0) if path == "embedding" else jnp.ones(shape, self.dtype)


def inverse_frequencies(config: Config) -> np.ndarray:
    """Radians per position of every pair of dimensions, float64 ``[head_dim / 2]``."""
    frequency = config.rope_theta ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
    if (scaling := config.rope_scaling) is None:
        return frequency
    turns = scaling.original_max_position_embeddings * frequency / (2 * np.pi)
    # 0 where a rotation turns seldom within the original context (stretched), 1 where often (kept).
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = np.clip(kept, 0, 1)
    return frequency * (kept + (1 - kept) / scaling.factor)


def rotation(config: Config, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines, float32 ``[..., 1, head_dim / 2]`` for positions ``[...]``; the 1 is the axis of heads."""
    angles = positions[..., None, None].astype(jnp.float32) * inverse_frequencies(config).astype(np.float32)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, turn: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotary positions: turns the pairs (x_i, x_{i + head_dim/2}) of ``[batch, tokens, heads, head_dim]``."""
    cos, sin = turn
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of the tokens so far, in buffers of a fixed length. Donate it: it is updated in place.

    Prompts of different lengths end in the same slot: the shorter ones are padded on the left.

    Attributes:
      keys: For every layer ``[batch, kv_heads, length, head_dim]``; one array with a leading axis where the decoder is
        stacked.
      values: The same.
      position: int32 scalar, the slots that are filled.
      start: int32 ``[batch]``, the first slot of each sequence that is no padding; None where nothing is padded.
    """

    keys: tuple[jax.Array, ...] | jax.Array
    values: tuple[jax.Array, ...] | jax.Array
    position: jax.Array
    start: jax.Array | None


class RMSNorm(nnx.Module):
    """``scale * x / sqrt(mean(x²) + epsilon)``, in float32."""

    def __init__(self, scale: jax.Array, epsilon: float) -> None:
        self.scale = nnx.Param(scale)
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        return (x.astype(jnp.float32) * self._factor(x)).astype(x.dtype) * self.scale[...]

    def into(self, projection: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
        """``projection(self(x))`` of a linear projection, with the factor of each token behind the product.

        So one pass over x gives both the scaled x and the factor, and the factor joins whatever reads the product: one
        kernel instead of two, which counts where a whole product takes 5 us. float16 might overflow on the way.
        """
        if x.dtype == jnp.float16:
            return projection(self(x))
        return (projection(x * self.scale[...]) * self._factor(x)).astype(x.dtype)

    def _factor(self, x: jax.Array) -> jax.Array:
        """``1 / sqrt(mean(x²) + epsilon)``, float32 ``[..., 1]``."""
        return lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True) + self.epsilon)


def attend(q: jax.Array, keys: jax.Array, values: jax.Array, visible: jax.Array) -> jax.Array:
    """Grouped-query attention of one token on a cache, ``softmax(q kᵀ / sqrt(head_dim)) v``.

    Args:
      q: ``[batch, heads, head_dim]``.
      keys, values: ``[batch, kv_heads, length, head_dim]``; query head h reads key head ``h * kv_heads // heads``.
      visible: bool ``[1 or batch, length]``.

    Returns:
      ``[batch, heads, head_dim]``.
    """
    batch, heads, head_dim = q.shape
    grouped = q.reshape(batch, keys.shape[1], -1, head_dim)
    both = ((0, 1), (0, 1))
    scores = lax.dot_general(grouped, keys, (((3,), (3,)), both), preferred_element_type=jnp.float32)
    scores = jnp.where(visible[:, None, None], scores / math.sqrt(head_dim), -jnp.inf)
    weights = jax.nn.softmax(scores).astype(values.dtype)
    return lax.dot_general(weights, values, (((3,), (2,)), both)).reshape(batch, heads, head_dim)


def attend_causally(q: jax.Array, k: jax.Array, v: jax.Array, start: jax.Array | None) -> jax.Array:
    """Grouped-query attention of a whole prompt on itself, each ``[batch, tokens, its heads, head_dim]``."""
    mask = None if start is None else (jnp.arange(q.shape[1]) >= start[:, None])[:, None, None, :]
    # cuDNN's flash attention never stores the scores.
    flash = jax.default_backend() == "gpu" and q.dtype.itemsize == 2 and q.shape[-1] % 8 == 0 and mask is None
    return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, implementation="cudnn" if flash else "xla")


@dataclasses.dataclass(frozen=True)
class Step:
    """What all layers of one pass share.

    Attributes:
      turn: Of `rotation`.
      start: As in `Cache`.
      position: The first slot of the tokens in the cache.
    """

    turn: tuple[jax.Array, jax.Array]
    start: jax.Array | None
    position: jax.Array


class Layer(nnx.Module):
    """One layer; `Decoder` has the equations."""

    def __init__(self, config: Config, source: Source, path: str) -> None:
        self.config = config
        self.attention_norm = RMSNorm(source.array(f"{path}.attention_norm", config.hidden_size), config.rms_norm_eps)
        self.mlp_norm = RMSNorm(source.array(f"{path}.mlp_norm", config.hidden_size), config.rms_norm_eps)
        parts = {name: source.projection(f"{path}.{name}", *size) for name, size in config.projections().items()}
        self.qkv, self.out, self.gate_up, self.down = parts["qkv"], parts["out"], parts["gate_up"], parts["down"]

    def __call__(self, h: jax.Array, step: Step, buffers: tuple | None = None, layer: jax.Array | None = None):
        """Applies the layer.

        Args:
          h: ``[batch, tokens, hidden_size]``.
          step: Shared by all layers.
          buffers: None, or the (keys, values) of the cache; for one token they are read too.
          layer: None, or where the buffers are those of all layers, which one this is.

        Returns:
          (h, buffers).
        """
        q, k, v = self._heads(self.attention_norm.into(self.qkv, h), step.turn)
        if buffers is not None:
            buffers = tuple(_write(b, new, step.position, layer) for b, new in zip(buffers, (k, v), strict=True))
        if buffers is not None and h.shape[1] == 1:
            keys, values = buffers if layer is None else (lax.dynamic_index_in_dim(b, layer, 0, False) for b in buffers)
            slots = jnp.arange(keys.shape[2])[None]
            visible = slots <= step.position
            if step.start is not None:
                visible &= slots >= step.start[:, None]
            mixed = attend(q[:, 0], keys, values, visible)
        else:
            mixed = attend_causally(q, k, v, step.start)
        h = h + self.out(mixed.reshape(*h.shape[:2], -1))
        gate, up = jnp.split(self.mlp_norm.into(self.gate_up, h), 2, axis=-1)
        return h + self.down(jax.nn.silu(gate) * up), buffers

    def _heads(self, qkv: jax.Array, turn: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        sizes = self.config.qkv_sizes
        parts = jnp.split(qkv, [sizes[0], sizes[0] + sizes[1]], axis=-1)
        q, k, v = (part.reshape(*qkv.shape[:2], -1, self.config.head_dim) for part in parts)
        return rotate(q, turn), rotate(k, turn), v


def _write(buffer: jax.Array, new: jax.Array, position: jax.Array, layer: jax.Array | None) -> jax.Array:
    """Puts new ``[batch, tokens, kv_heads, head_dim]`` into the slots from position on."""
    new = jnp.swapaxes(new, 1, 2).astype(buffer.dtype)
    if layer is None:
        return lax.dynamic_update_slice(buffer, new, (0, 0, position, 0))
    return lax.dynamic_update_slice(buffer, new[None], (layer, 0, 0, position, 0))


def stack(layers: list[Layer]) -> Layer:
    """One layer whose parameters have a leading axis, for `jax.lax.scan`."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)


class Decoder(nnx.Module):
    """Tokens to logits of the next ones.

    Args:
      config: Sizes.
      source: Gives the parameters, one projection after another.
      scan: Whether the layers become one that is scanned, all with the same patterns then.

    Example:
      >>> decoder = Decoder(Config(256, 32, 64, 2, 4, 2, 8), Random(jax.random.key(0)))
      >>> cache = decoder.empty_cache(batch=1, length=16)
      >>> logits, cache = decoder.prefill(jnp.array([[3, 1, 4]]), cache)
      >>> logits, cache = decoder.decode(logits.argmax(-1), cache)
    """

    def __init__(self, config: Config, source: Source, scan: bool = False) -> None:
        self.config = config
        self.embedding = embed(source.array("embedding", config.vocab_size, config.hidden_size))
        layers = [Layer(config, source, f"layers.{i}") for i in range(config.num_hidden_layers)]
        self.layers: Any = stack(layers) if scan else nnx.List(layers)
        self.norm = RMSNorm(source.array("norm", config.hidden_size), config.rms_norm_eps)
        tied = config.tie_word_embeddings
        self.head = nnx.data(None if tied else source.projection("head", config.hidden_size, config.vocab_size))

    def empty_cache(self, batch: int, length: int, start: ArrayLike | None = None) -> Cache:
        """A cache for that many sequences and slots; start as in `Cache`."""
        c = self.config
        shape = (batch, c.num_key_value_heads, length, c.head_dim)
        dtype = self.norm.scale[...].dtype

        def buffers():
            if isinstance(self.layers, Layer):
                return jnp.zeros((c.num_hidden_layers, *shape), dtype)
            return tuple(jnp.zeros(shape, dtype) for _ in range(c.num_hidden_layers))

        start = None if start is None else jnp.asarray(start, jnp.int32)
        return Cache(buffers(), buffers(), jnp.zeros((), jnp.int32), start)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits ``[batch, tokens, vocab_size]``, float32, of whole sequences ``[batch, tokens]`` without a cache."""
        turn = rotation(self.config, jnp.arange(tokens.shape[1])[None])
        h, _ = self._run(tokens, Step(turn, None, jnp.zeros((), jnp.int32)), None)
        return self._logits(h)

    def prefill(self, tokens: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """Reads prompts, int32 ``[batch, tokens]``, into an empty cache.

        Returns:
          Logits of the next token, float32 ``[batch, vocab_size]``, and the filled cache.
        """
        return self._extend(tokens, dataclasses.replace(cache, position=jnp.zeros((), jnp.int32)))

    def decode(self, token: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """Reads one token more of every sequence, int32 ``[batch]``; returns as `prefill`."""
        return self._extend(token[:, None], cache)

    def _extend(self, tokens: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        positions = cache.position + jnp.arange(tokens.shape[1])[None]
        if cache.start is not None:
            positions = jnp.maximum(positions - cache.start[:, None], 0)
        step = Step(rotation(self.config, positions), cache.start, cache.position)
        h, (keys, values) = self._run(tokens, step, (cache.keys, cache.values))
        cache = Cache(keys, values, cache.position + tokens.shape[1], cache.start)
        return self._logits(h[:, -1]), cache

    def _run(self, tokens: jax.Array, step: Step, buffers: tuple | None) -> tuple[jax.Array, Any]:
        """The hidden states behind all layers, and the buffers of the cache with the tokens in them."""
        h = self.embedding(tokens)
        if isinstance(self.layers, Layer):

            def body(carry, xs):
                (h, buffers), (layer, index) = carry, xs
                return layer(h, step, buffers, index), None

            carry, _ = lax.scan(body, (h, buffers), (self.layers, jnp.arange(self.config.num_hidden_layers)))
            return carry
        pairs: list[Any] = [None] * len(self.layers) if buffers is None else list(zip(*buffers, strict=True))
        for i, layer in enumerate(self.layers):
            h, pairs[i] = layer(h, step, pairs[i])
        return h, None if buffers is None else tuple(zip(*pairs, strict=True))

    def _logits(self, h: jax.Array) -> jax.Array:
        h = self.norm(h)
        return (self.embedding.attend(h) if self.head is None else self.head(h)).astype(jnp.float32)
