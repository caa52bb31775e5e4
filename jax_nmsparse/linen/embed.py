"""`NMSparseEmbed`: `flax.linen.Embed` with an N:M sparse table, for heads that are tied to it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype
from jax.typing import ArrayLike

from jax_nmsparse.array import NMSparse, check_pattern
from jax_nmsparse.description import Description
from jax_nmsparse.embedding import embed
from jax_nmsparse.layer import check_weight, multiply, pack
from jax_nmsparse.linen.variables import (
    bound_weight,
    dense_params,
    drawn,
    label,
    layer_weight,
    to_weight,
    variables_of,
)
from jax_nmsparse.pattern import NMPattern


class NMSparseEmbed(nn.Module):
    """`flax.linen.Embed` with an N:M sparse table ``E``: ``y = E[ids]``, and ``attend``: ``logits = x Eᵀ``.

    The table is stored as the weight of the head, ``Eᵀ``, ``[features, num_embeddings]``: the head contracts features,
    so groups run along features. Looking a row up unpacks one packed column (see `embedding.lookup`); neither
    direction makes a dense table.

    Arguments, promotion of dtypes and initial values are those of `nn.Embed`. Variables are those of `NMSparseDense`
    without a bias.

    Attributes:
      num_embeddings: Rows of the table.
      features: Its columns.
      dtype, param_dtype, embedding_init, promote_dtype: As in `nn.Embed`.
      pattern, implementation, values_dtype: As in `NMSparseDense`; a block is ``features x num_embeddings``.
      precision: As in `jnp.dot`, for attend.

    Raises:
      ValueError: For ids that are no integers, or variables that do not fit the module.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_nmsparse.linen import NMSparseEmbed
      >>> embed = NMSparseEmbed(1000, 64, pattern="8:32")
      >>> variables = embed.init(jax.random.key(0), jnp.array([0]))
      >>> x = embed.apply(variables, jnp.array([3, 999]))
      >>> x.shape
      (2, 64)
      >>> embed.apply(variables, x, method="attend").shape
      (2, 1000)
    """

    num_embeddings: int
    features: int
    dtype: Any = None
    param_dtype: Any = jnp.float32
    embedding_init: Callable[..., Any] = nn.linear.default_embed_init
    promote_dtype: Callable[..., Any] = promote_dtype
    _: dataclasses.KW_ONLY
    pattern: NMPattern | str
    precision: Any = None
    implementation: str | None = None
    values_dtype: Any = None

    def setup(self) -> None:
        def draw(key):
            table = self.embedding_init(key, (self.num_embeddings, self.features), self.param_dtype)
            return drawn(table, jnp.transpose, lambda names: tuple(reversed(names)))

        self._weight = layer_weight(self, self._description(), draw, dense="embedding")

    def _description(self) -> Description:
        return Description(
            check_pattern(label(self), self.pattern), (self.features,), (self.num_embeddings,), "embedding"
        )

    def __call__(self, inputs: ArrayLike) -> jax.Array:
        """Rows of the table: ``[*inputs.shape, features]``; see `nn.Embed` for ids that are out of range."""
        return embed(self, functools.partial(self.promote_dtype, dtype=self.dtype), self._weight, inputs)

    def attend(self, query: ArrayLike) -> jax.Array:
        """Products with every row: ``[..., features]`` -> ``[..., num_embeddings]``."""
        return multiply(
            self, lambda x, w, _: (*self.promote_dtype(x, w, dtype=self.dtype), None), query, self._weight, None
        )

    def weight(self) -> NMSparse:
        """The weight ``Eᵀ`` that a bound module holds: ``layer.bind(variables).weight()``."""
        return bound_weight(self, lambda stored: self._description())

    to_weight = staticmethod(to_weight)

    @staticmethod
    def from_weight(w: NMSparse) -> dict[str, dict[str, Any]]:
        """The variables of a layer that holds a given weight ``Eᵀ``, ``[..., features, num_embeddings]``."""
        check_weight(w)
        return variables_of(w, Description(w.pattern, (w.in_features,), (w.out_features,), "embedding"), None)

    @staticmethod
    def from_dense(
        params: Mapping[str, Any],
        pattern: NMPattern | str,
        *,
        scores: Any = None,
        exact: bool = False,
        values_dtype: Any = None,
    ) -> dict[str, dict[str, Any]]:
        """The variables that replace those of a trained `nn.Embed`; runs under jit too, except with exact.

        Args:
          params: ``{"embedding": [..., num_embeddings, features]}``, or the whole ``{"params": ...}``.
          pattern: The pattern, or a string such as "2:4". Groups run along features.
          scores: As in `prune`, of the shape of the table.
          exact, values_dtype: As in `NMSparseDense.from_dense`.

        Returns:
          ``{"params": ..., "nm_mask": ...}``. Nothing of it refers to the dense table.

        Example:
          >>> import flax.linen as nn, jax, jax.numpy as jnp
          >>> from jax_nmsparse.linen import NMSparseEmbed
          >>> trained = nn.Embed(100, 32).init(jax.random.key(0), jnp.array([0]))
          >>> variables = NMSparseEmbed.from_dense(trained, "2:4")
          >>> NMSparseEmbed(100, 32, pattern="2:4").apply(variables, jnp.array([[1, 2]])).shape
          (1, 2, 32)
        """
        table = dense_params(params, "embedding", (), "nn.Embed")["embedding"]
        if scores is not None:
            scores = jnp.swapaxes(scores, -1, -2)
        w = pack(jnp.swapaxes(table, -1, -2), pattern, scores=scores, exact=exact, values_dtype=values_dtype)
        return NMSparseEmbed.from_weight(w)

    @staticmethod
    def to_dense(variables: Mapping[str, Any]) -> dict[str, jax.Array]:
        """The parameters of the `nn.Embed` with the same table: ``{"embedding": ...}``."""
        return {"embedding": jnp.swapaxes(to_weight(variables).todense(), -1, -2)}
