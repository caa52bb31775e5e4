"""`NMSparseDense`: `flax.linen.Dense` with an N:M sparse kernel."""

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
from jax_nmsparse.layer import check_options, check_weight, multiply, pack
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


class NMSparseDense(nn.Module):
    """`flax.linen.Dense` with an N:M sparse kernel: ``y = act(x W + bias)``.

    Arguments, promotion of dtypes and initial values are those of `nn.Dense` (the kernel is drawn dense by kernel_init
    at ``[in_features, features]`` and pruned by magnitude). `nn.Dense` takes ``dot_general`` too; a product with a
    packed kernel is none, so there is no such argument here.

    Variables, for one layer (`nn.scan` and `nn.vmap` put axes in front; name both collections in variable_axes):

    * ``params/values``: float ``[windows, out_blocks, q, bk, bn]``, the kept units (see `NMSparse`);
    * ``params/bias``: ``[features]``, with use_bias;
    * ``nm_mask/mask``: uint32, which units are kept. No leaf of params is an integer, so gradients and optax run over
      params untouched, and the pattern cannot be lost by training;
    * ``nm_mask/format/<v1_2:4_1x1_64x48>``: format version, pattern, block and shape, in the name of an empty leaf: so
      every checkpoint of the variables says what it holds, and a wrong pattern or input size raises under jit too.

    With values_dtype they are quantised: ``nm_mask/values``, constant, and ``params/scales``, float32 ``[features]``.

    Attributes:
      features: Size of the last axis of y.
      use_bias: Whether to add a bias.
      dtype: dtype of the computation; by default that which x and the parameters promote to.
      param_dtype: dtype that values and bias are initialised in.
      precision: As in `jnp.dot`.
      kernel_init: Initialiser of the dense kernel; may be wrapped in `nn.with_partitioning` with the axes (in, out).
      bias_init: Initialiser of the bias.
      promote_dtype: Casts (x, values, bias) to the dtype of the computation.
      pattern: The `NMPattern`, or a string such as "2:4". Groups run along in_features.
      activation: None, "relu", "gelu" (exact), "gelu_tanh" or "silu", computed in the epilogue of the product.
      implementation: As in `spmm`.
      values_dtype: None, or int8 or float8_e4m3fn for quantised values.

    Raises:
      ValueError: Where the variables hold another pattern, block or shape than the module and x need; the message
        names the layer.

    Example:
      >>> import jax, jax.numpy as jnp, jax_nmsparse as nms
      >>> from jax_nmsparse.linen import NMSparseDense
      >>> layer = NMSparseDense(48, pattern="2:4", activation="relu")
      >>> variables = layer.init(jax.random.key(0), jnp.ones((1, 64)))
      >>> layer.apply(variables, jnp.ones((3, 64))).shape
      (3, 48)
      >>> layer.bind(variables).weight()
      NMSparse(64x48, 2:4, float32)
    """

    features: int
    use_bias: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None
    kernel_init: Callable[..., Any] = nn.linear.default_kernel_init
    bias_init: Callable[..., Any] = nn.initializers.zeros_init()
    promote_dtype: Callable[..., Any] = promote_dtype
    _: dataclasses.KW_ONLY
    pattern: NMPattern | str
    activation: str | None = None
    implementation: str | None = None
    values_dtype: Any = None

    @nn.compact
    def __call__(self, inputs: ArrayLike) -> jax.Array:
        """Applies the layer along the last axis of inputs, ``[..., in_features]``, giving ``[..., features]``."""
        check_options(label(self), self.activation, self.implementation)
        if jnp.ndim(inputs) < 1:
            raise ValueError(f"{label(self)}: x has no axes, expected [..., in_features]")
        pattern, in_features = check_pattern(label(self), self.pattern), jnp.shape(inputs)[-1]

        def draw(key):
            kernel = self.kernel_init(key, (in_features, self.features), self.param_dtype)
            return drawn(kernel, lambda array: array, tuple)

        w = layer_weight(self, Description(pattern, (in_features,), (self.features,)), draw, dense="kernel")
        bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype) if self.use_bias else None
        promote = functools.partial(self.promote_dtype, dtype=self.dtype)
        return multiply(self, promote, inputs, w, bias, activation=self.activation)

    def weight(self) -> NMSparse:
        """The weight that a bound module holds: ``layer.bind(variables).weight()``."""
        pattern = check_pattern(label(self), self.pattern)
        return bound_weight(self, lambda stored: Description(pattern, stored.in_sizes, (self.features,)))

    to_weight = staticmethod(to_weight)

    @staticmethod
    def from_weight(w: NMSparse, bias: jax.Array | None = None) -> dict[str, dict[str, Any]]:
        """The variables of a layer that holds a given weight.

        Args:
          w: The weight; leading axes become those of stacked layers.
          bias: None (a layer with use_bias=False), or ``[..., out_features]``.

        Returns:
          ``{"params": ..., "nm_mask": ...}``; the arrays are those of w, not copies.

        Raises:
          ValueError, TypeError: For what is no weight, or a bias of another shape.

        Example:
          >>> import jax.numpy as jnp, jax_nmsparse as nms
          >>> from jax_nmsparse.linen import NMSparseDense
          >>> variables = NMSparseDense.from_weight(nms.NMSparse.fromdense(jnp.eye(4), "1:4"))
          >>> NMSparseDense(4, use_bias=False, pattern="1:4").apply(variables, jnp.arange(4.0))
          Array([0., 1., 2., 3.], dtype=float32)
        """
        check_weight(w)
        return variables_of(w, Description(w.pattern, (w.in_features,), (w.out_features,)), bias)

    @staticmethod
    def from_dense(
        params: Mapping[str, Any],
        pattern: NMPattern | str,
        *,
        scores: Any = None,
        exact: bool = False,
        values_dtype: Any = None,
    ) -> dict[str, dict[str, Any]]:
        """The variables that replace those of a trained `nn.Dense`; runs under jit too, except with exact.

        Args:
          params: ``{"kernel": [..., in_features, features], "bias": [..., features]}`` (bias optional), or the whole
            ``{"params": ...}``. Leading axes are those of stacked layers.
          pattern: The pattern, or a string such as "2:4".
          scores: As in `prune`: scores or a boolean mask of the kernel's shape; by default magnitude.
          exact: The kernel satisfies the pattern already; raise where it does not, rather than drop weights.
          values_dtype: None, or int8 or float8_e4m3fn to quantise.

        Returns:
          ``{"params": ..., "nm_mask": ...}``. Nothing of it refers to the dense kernel.

        Raises:
          ValueError, TypeError: For params of something else, or as `prune` and `NMSparse.fromdense`.

        Example:
          >>> import flax.linen as nn, jax, jax.numpy as jnp
          >>> from jax_nmsparse.linen import NMSparseDense
          >>> trained = nn.Dense(48).init(jax.random.key(0), jnp.ones((1, 64)))
          >>> variables = NMSparseDense.from_dense(trained, "8:32")
          >>> NMSparseDense(48, pattern="8:32").apply(variables, jnp.ones((3, 64))).shape
          (3, 48)
        """
        params = dense_params(params, "kernel", ("bias",), "nn.Dense")
        w = pack(params["kernel"], pattern, scores=scores, exact=exact, values_dtype=values_dtype)
        return NMSparseDense.from_weight(w, params.get("bias"))

    @staticmethod
    def to_dense(variables: Mapping[str, Any]) -> dict[str, jax.Array]:
        """The parameters of the `nn.Dense` that computes the same: ``{"kernel": ..., "bias": ...}``.

        Example:
          >>> import jax, jax.numpy as jnp
          >>> from jax_nmsparse.linen import NMSparseDense
          >>> variables = NMSparseDense(48, pattern="2:4").init(jax.random.key(0), jnp.ones((1, 64)))
          >>> NMSparseDense.to_dense(variables)["kernel"].shape
          (64, 48)
        """
        kernel = NMSparseDense.to_weight(variables).todense()
        bias = nn.meta.unbox(variables["params"]).get("bias")
        return {"kernel": kernel} if bias is None else {"kernel": kernel, "bias": bias}
