"""One step of a tensor-parallel decoder: grouped-query attention over a cache, gated MLPs; weights sparse or dense.

A plain function of arrays, so that the same program runs on any mesh: query, key, value, gate and up by columns
(heads), output and down by rows, the cache by heads. Embedding and head are left out; the new keys and values are
returned.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jax_nmsparse.planning import Model, projections


def place(model: Model) -> dict[str, Any]:
    """How weights and caches of one layer are split over the mesh axis "d"."""
    specs = {name: P(None, "d") if split == "columns" else P("d") for name, split, _, _ in projections(model)}
    return specs | {"keys": P(None, None, "d"), "values": P(None, None, "d")}


def shapes(model: Model) -> dict[str, tuple[int, int]]:
    """(in_features, out_features) of the weights of one layer."""
    return {name: (rows, columns) for name, _, rows, columns in projections(model)}


def cache(key: jax.Array, model: Model, batch: int, context: int, dtype: Any) -> dict[str, jax.Array]:
    """Random keys and values of `context` positions: ``[batch, context, kv_heads, head]`` each."""
    shape = (batch, context, model.kv_heads, model.hidden // model.heads)
    keys, values = jax.random.split(key)
    return {"keys": jax.random.normal(keys, shape, dtype), "values": jax.random.normal(values, shape, dtype)}


def _norm(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + 1e-5)).astype(x.dtype)


def _attend(query: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
    """``[batch, kv_heads, group, head]`` over ``[batch, positions, kv_heads, head]``."""
    scores = jnp.einsum("bhgd,bphd->bhgp", query, keys, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(scores / math.sqrt(query.shape[-1])).astype(values.dtype)
    return jnp.einsum("bhgp,bphd->bhgd", weights, values)


def step(model: Model):
    """(h ``[batch, hidden]``, layers) -> (h, new keys, new values) after all layers."""
    head = model.hidden // model.heads

    def run(h: jax.Array, layers: list[dict[str, Any]]) -> tuple[jax.Array, list[jax.Array], list[jax.Array]]:
        new_keys, new_values = [], []
        for layer in layers:
            x = _norm(h)
            batch = x.shape[0]
            query = (x @ layer["query"]).reshape(batch, model.kv_heads, -1, head)
            key, value = ((x @ layer[name]).reshape(batch, 1, model.kv_heads, head) for name in ("key", "value"))
            keys, values = (
                jnp.concatenate([old, new], 1) for old, new in ((layer["keys"], key), (layer["values"], value))
            )
            h = h + _attend(query, keys, values).reshape(batch, -1) @ layer["output"]
            x = _norm(h)
            h = h + (jax.nn.silu(x @ layer["gate"]) * (x @ layer["up"])) @ layer["down"]
            new_keys.append(key)
            new_values.append(value)
        return h, new_keys, new_values

    return run
