"""`NMSparseEmbed`: `flax.nnx.Embed` with an N:M sparse table, for heads that are tied to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from jax.typing import ArrayLike

from jax_nmsparse.array import NMSparse, check_pattern
from jax_nmsparse.description import Description
from jax_nmsparse.embedding import embed
from jax_nmsparse.layer import check_options, check_weight, pack
from jax_nmsparse.nnx.variables import NMFormat, NMMask, held, hold, inherited, initialised, placed, product, taken
from jax_nmsparse.pattern import NMPattern

_default_embed_init = nnx.initializers.variance_scaling(1.0, "fan_in", "normal", out_axis=0)


class NMSparseEmbed(nnx.Module):
    """`flax.nnx.Embed` with an N:M sparse table ``E``: ``y = E[ids]``, and ``attend``: ``logits = x Eᵀ``.

    The table is stored as the weight of the head, ``Eᵀ``, ``[features, num_embeddings]``: the head contracts features,
    so groups run along features. Looking a row up unpacks one packed column (see `embedding.lookup`); neither
    direction makes a dense table.

    Arguments, promotion of dtypes and initial values are those of `nnx.Embed`. Variables are those of `NMSparseLinear`
    without a bias.

    Args:
      num_embeddings: Rows of the table.
      features: Its columns.
      dtype, param_dtype, embedding_init, promote_dtype, rngs, embedding_metadata: As in `nnx.Embed`; embedding_init
        may return the `NMSparse` itself.
      pattern, implementation, values_dtype: As in `NMSparseLinear`; a block is ``features x num_embeddings``.
      precision: As in `jnp.dot`, for attend.

    Raises:
      ValueError: For ids that are no integers, or variables that do not fit the module.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jax_nmsparse.nnx import NMSparseEmbed
      >>> embed = NMSparseEmbed(1000, 64, pattern="8:32", rngs=nnx.Rngs(0))
      >>> x = embed(jnp.array([3, 999]))
      >>> x.shape
      (2, 64)
      >>> embed.attend(x).shape
      (2, 1000)
    """

    values: nnx.Variable[Any]
    mask: NMMask
    scales: nnx.Param[Any] | None
    format: NMFormat

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        embedding_init: Callable[..., Any] = _default_embed_init,
        promote_dtype: Callable[..., Any] = dtypes.promote_dtype,
        rngs: nnx.Rngs,
        embedding_metadata: Mapping[str, Any] = MappingProxyType({}),
        pattern: NMPattern | str,
        precision: Any = None,
        implementation: str | None = None,
        values_dtype: Any = None,
    ) -> None:
        self.num_embeddings = num_embeddings
        self.features = features
        self.param_dtype = param_dtype
        self.promote_dtype = promote_dtype
        self.pattern = check_pattern("NMSparseEmbed", pattern)
        check_options("NMSparseEmbed", None, implementation)
        self.precision = precision
        self.implementation = implementation
        self.values_dtype = values_dtype
        shape = (num_embeddings, features)
        table, metadata = initialised(embedding_init(rngs.params(), shape, param_dtype), shape, embedding_metadata)
        if metadata.get("out_sharding") is not None:
            metadata["out_sharding"] = tuple(reversed(metadata["out_sharding"]))
        hold(self, table if isinstance(table, NMSparse) else table.T, self._description, metadata)
        self.dtype = dtype or (param_dtype if self.scales is not None else self.values.dtype)

    @property
    def _description(self) -> Description:
        return Description(self.pattern, (self.features,), (self.num_embeddings,), "embedding")

    def __call__(self, inputs: ArrayLike, out_sharding: Any = None) -> jax.Array:
        """Rows of the table: ``[*inputs.shape, features]``; see `nnx.Embed` for ids that are out of range."""

        def promote(*arrays, **options):
            return self.promote_dtype(arrays, dtype=self.dtype, **options)

        return placed(embed(self, promote, held(self, self._description, ()), inputs), out_sharding)

    def attend(self, query: ArrayLike, out_sharding: Any = None) -> jax.Array:
        """Products with every row: ``[..., features]`` -> ``[..., num_embeddings]``."""
        return placed(product(self, query, held(self, self._description, ()), None), out_sharding)

    @property
    def weight(self) -> NMSparse:
        """The weight ``Eᵀ`` that the layer holds, with the batch axes of stacked layers in front."""
        return held(self, self._description)

    @classmethod
    def from_weight(cls, w: NMSparse, **options: Any) -> NMSparseEmbed:
        """A layer that holds a given weight ``Eᵀ``, ``[..., features, num_embeddings]``; its arrays are not copied."""
        check_weight(w)
        return cls(
            w.out_features,
            w.in_features,
            embedding_init=lambda *_: w,
            **taken(w),
            **options,
        )

    @classmethod
    def from_dense(
        cls,
        table: nnx.Embed,
        pattern: NMPattern | str,
        *,
        scores: Any = None,
        exact: bool = False,
        values_dtype: Any = None,
        **options: Any,
    ) -> NMSparseEmbed:
        """The layer that replaces a trained `nnx.Embed`; the arguments are those of `NMSparseLinear.from_dense`.

        Example:
          >>> import jax.numpy as jnp
          >>> from flax import nnx
          >>> from jax_nmsparse.nnx import NMSparseEmbed
          >>> trained = nnx.Embed(100, 32, rngs=nnx.Rngs(0))
          >>> NMSparseEmbed.from_dense(trained, "2:4")(jnp.array([[1, 2]])).shape
          (1, 2, 32)
        """
        if not isinstance(table, nnx.Embed):
            raise TypeError(f"from_dense: the layer is a {type(table).__name__}, expected an nnx.Embed")
        if scores is not None:
            scores = jnp.swapaxes(scores, -1, -2)
        kernel = jnp.swapaxes(table.embedding[...], -1, -2)
        w = pack(kernel, pattern, scores=scores, exact=exact, values_dtype=values_dtype)
        return cls.from_weight(w, **{**inherited(table), **options})

    def to_dense(self) -> nnx.Embed:
        """The `nnx.Embed` with the same table."""
        table = jnp.swapaxes(self.weight.todense(), -1, -2)
        embedding_init: Any = lambda *_: table  # noqa: E731
        return nnx.Embed(
            self.num_embeddings, self.features, embedding_init=embedding_init, rngs=nnx.Rngs(0), **inherited(self)
        )
