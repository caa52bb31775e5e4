"""`NMSparseDenseGeneral`: `flax.linen.DenseGeneral` with an N:M sparse kernel."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype
from jax.typing import ArrayLike

from jax_nmsparse import axes
from jax_nmsparse.array import NMSparse, check_pattern
from jax_nmsparse.description import Description
from jax_nmsparse.layer import check_options, check_weight, multiply, pack
from jax_nmsparse.linen.variables import (
    bound_weight,
    dense_params,
    drawn,
    label,
    layer_weight,
    stored_description,
    to_weight,
    variables_of,
)
from jax_nmsparse.pattern import NMPattern


class NMSparseDenseGeneral(nn.Module):
    """`flax.linen.DenseGeneral` with an N:M sparse kernel: a product over several axes, as attention projects heads.

    Arguments, promotion of dtypes and initial values are those of `nn.DenseGeneral`. Its kernel
    ``[*batch, *in_sizes, *features]`` folds into the weight ``[*batch, prod(in_sizes), prod(features)]``, whose groups
    run along the contracted axes in row-major order: in an output projection with ``axis=(-2, -1)`` along head_dim
    first, then heads.

    Variables are those of `NMSparseDense`, with the batch axes in front, and the sizes of all axes in the format
    (``v1_2:4_1x1_8,16x128``).

    Attributes:
      features: Size of the last axis of y, or sizes of its last axes.
      axis: The axis or axes of x that are contracted.
      batch_dims: Leading axes of x that the kernel has too.
      use_bias, dtype, param_dtype, kernel_init, bias_init, precision, promote_dtype: As in `nn.DenseGeneral`.
      pattern, activation, implementation, values_dtype: As in `NMSparseDense`.

    Raises:
      ValueError: Where the variables hold another pattern, block or shape than the module and x need.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_nmsparse.linen import NMSparseDenseGeneral
      >>> query = NMSparseDenseGeneral((4, 16), pattern="2:4")
      >>> variables = query.init(jax.random.key(0), jnp.ones((1, 64)))
      >>> heads = query.apply(variables, jnp.ones((3, 64)))
      >>> heads.shape
      (3, 4, 16)
      >>> out = NMSparseDenseGeneral(64, axis=(-2, -1), pattern="2:4")
      >>> out.apply(out.init(jax.random.key(0), heads), heads).shape
      (3, 64)
    """

    features: int | Sequence[int]
    axis: int | Sequence[int] = -1
    batch_dims: Sequence[int] = ()
    use_bias: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Callable[..., Any] = nn.linear.default_kernel_init
    bias_init: Callable[..., Any] = nn.initializers.zeros_init()
    precision: Any = None
    promote_dtype: Callable[..., Any] = promote_dtype
    _: dataclasses.KW_ONLY
    pattern: NMPattern | str
    activation: str | None = None
    implementation: str | None = None
    values_dtype: Any = None

    @nn.compact
    def __call__(self, inputs: ArrayLike) -> jax.Array:
        """Contracts axis of inputs: ``[*batch, *rest, *features]``, batch axes first, then those that stay."""
        name, x = label(self), jnp.asarray(inputs)
        check_options(name, self.activation, self.implementation)
        features = axes.as_tuple(self.features)
        batch_dims = axes.as_tuple(self.batch_dims)
        axes.check_batch_dims(name, batch_dims)
        axis = axes.normalize(name, axes.as_tuple(self.axis), x.ndim)
        batch = tuple(x.shape[i] for i in batch_dims)
        in_sizes = tuple(x.shape[i] for i in axis)
        x = axes.fold(name, x, axis, batch_dims)
        description = Description(check_pattern(name, self.pattern), in_sizes, features)

        def draw(key):
            flat = math.prod(batch) * math.prod(in_sizes), math.prod(features)
            return drawn(
                self.kernel_init(key, flat, self.param_dtype),
                lambda kernel: kernel.reshape(*batch, -1, flat[1]),
                lambda names: axes.merge_names(names, len(batch), len(in_sizes)),
            )

        w = layer_weight(self, description, draw, dense="kernel", lead=batch)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self._draw_bias, (*batch, *features), self.param_dtype)
            bias = bias.reshape(*batch, -1)
        promote = functools.partial(self.promote_dtype, dtype=self.dtype)
        y = multiply(self, promote, x, w, bias, activation=self.activation)
        return y.reshape(*x.shape[:-1], *features)

    def _draw_bias(self, key, shape, dtype):
        bias = self.bias_init(key, (math.prod(shape),), dtype)
        return nn.meta.replace_boxed(bias, nn.meta.unbox(bias).reshape(shape))

    def weight(self) -> NMSparse:
        """The folded weight that a bound module holds: ``layer.bind(variables).weight()``."""
        pattern, features = check_pattern(label(self), self.pattern), axes.as_tuple(self.features)
        return bound_weight(self, lambda stored: Description(pattern, stored.in_sizes, features))

    to_weight = staticmethod(to_weight)

    @staticmethod
    def from_weight(
        w: NMSparse,
        bias: jax.Array | None = None,
        *,
        in_sizes: Sequence[int] | None = None,
        features: Sequence[int] | None = None,
    ) -> dict[str, dict[str, Any]]:
        """The variables of a layer that holds a given weight.

        Args:
          w: The folded weight; leading axes are batch axes and those of stacked layers.
          bias: None (a layer with use_bias=False), or ``[..., *features]``.
          in_sizes: Sizes of the contracted axes, by default one.
          features: Sizes of the other axes, by default one.

        Returns:
          ``{"params": ..., "nm_mask": ...}``; the arrays are those of w, not copies.

        Raises:
          ValueError, TypeError: For what is no weight, or sizes that do not fit it.
        """
        check_weight(w)
        description = Description(
            w.pattern,
            (w.in_features,) if in_sizes is None else axes.as_tuple(in_sizes),
            (w.out_features,) if features is None else axes.as_tuple(features),
        )
        if description.layout != w.layout:
            raise ValueError(
                f"from_weight: in_sizes {description.in_sizes} and features {description.out_sizes} do not multiply to "
                f"the axes of {w!r}"
            )
        return variables_of(w, description, bias)

    @staticmethod
    def from_dense(
        params: Mapping[str, Any],
        pattern: NMPattern | str,
        *,
        contracted: int = 1,
        stacked: int = 0,
        scores: Any = None,
        exact: bool = False,
        values_dtype: Any = None,
    ) -> dict[str, dict[str, Any]]:
        """The variables that replace those of a trained `nn.DenseGeneral`; runs under jit too, except with exact.

        Args:
          params: ``{"kernel": [..., *in_sizes, *features], "bias": [..., *features]}`` (bias optional), or the whole
            ``{"params": ...}``.
          pattern: The pattern, or a string such as "2:4".
          contracted: How many axes of the kernel are contracted (the length of the module's axis).
          stacked: How many axes stand before them: batch_dims, and those of stacked layers.
          scores, exact, values_dtype: As in `NMSparseDense.from_dense`.

        Returns:
          ``{"params": ..., "nm_mask": ...}``. Nothing of it refers to the dense kernel.

        Raises:
          ValueError, TypeError: For params of something else, or as `prune` and `NMSparse.fromdense`.

        Example:
          >>> import flax.linen as nn, jax, jax.numpy as jnp
          >>> from jax_nmsparse.linen import NMSparseDenseGeneral
          >>> heads = jnp.ones((3, 4, 16))
          >>> trained = nn.DenseGeneral(64, axis=(-2, -1)).init(jax.random.key(0), heads)
          >>> variables = NMSparseDenseGeneral.from_dense(trained, "2:4", contracted=2)
          >>> NMSparseDenseGeneral(64, axis=(-2, -1), pattern="2:4").apply(variables, heads).shape
          (3, 64)
        """
        params = dense_params(params, "kernel", ("bias",), "nn.DenseGeneral")
        kernel = params["kernel"]
        folded, in_sizes, features = axes.fold_kernel("from_dense", kernel, stacked, contracted)
        if scores is not None:
            scores = jnp.asarray(scores).reshape(folded.shape)
        w = pack(folded, pattern, scores=scores, exact=exact, values_dtype=values_dtype)
        return NMSparseDenseGeneral.from_weight(w, params.get("bias"), in_sizes=in_sizes, features=features)

    @staticmethod
    def to_dense(variables: Mapping[str, Any]) -> dict[str, jax.Array]:
        """The parameters of the `nn.DenseGeneral` that computes the same: ``{"kernel": ..., "bias": ...}``."""
        variables = nn.meta.unbox(variables)
        stored, dense = stored_description(variables), to_weight(variables).todense()
        kernel = dense.reshape(*dense.shape[:-2], *stored.in_sizes, *stored.out_sizes)
        bias = variables["params"].get("bias")
        return {"kernel": kernel} if bias is None else {"kernel": kernel, "bias": bias}
