"""`NMSparseLinearGeneral`: `flax.nnx.LinearGeneral` with an N:M sparse kernel."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.core import FrozenDict
from flax.nnx.nn import dtypes
from jax.typing import ArrayLike

from jax_nmsparse import axes
from jax_nmsparse.array import NMSparse, check_pattern
from jax_nmsparse.description import Description
from jax_nmsparse.layer import check_bias, check_options, check_weight, pack
from jax_nmsparse.nnx.variables import NMFormat, NMMask, held, hold, inherited, initialised, placed, product, taken
from jax_nmsparse.pattern import NMPattern

_default_kernel_init = nnx.initializers.lecun_normal()
_default_bias_init = nnx.initializers.zeros_init()
_INHERITED = ("precision", "preferred_element_type", "axis", "batch_axis")


class NMSparseLinearGeneral(nnx.Module):
    """`flax.nnx.LinearGeneral` with an N:M sparse kernel: a product over several axes, as attention projects heads.

    Arguments, promotion of dtypes and initial values are those of `nnx.LinearGeneral`. Its kernel
    ``[*batch, *in_features, *out_features]`` folds into the weight ``[*batch, prod(in_features), prod(out_features)]``,
    whose groups run along the contracted axes in row-major order: in an output projection with ``axis=(-2, -1)`` along
    head_dim first, then heads.

    Variables are those of `NMSparseLinear`, with the batch axes in front, and the sizes of all axes in the format
    (``v1_2:4_1x1_8,16x128``).

    Args:
      in_features: Size or sizes of the contracted axes of x.
      out_features: Size or sizes of the last axes of y.
      axis: The axis or axes of x that are contracted.
      batch_axis: Leading axes of x that the kernel has too, with their sizes.
      use_bias, dtype, param_dtype, kernel_init, bias_init, precision, promote_dtype, preferred_element_type, rngs,
        kernel_metadata, bias_metadata: As in `nnx.LinearGeneral`; kernel_init may return the `NMSparse` itself.
      pattern, activation, implementation, values_dtype: As in `NMSparseLinear`.

    Raises:
      ValueError: Where variables, module and x do not fit together.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jax_nmsparse.nnx import NMSparseLinearGeneral
      >>> heads = NMSparseLinearGeneral(64, (4, 16), pattern="2:4", rngs=nnx.Rngs(0))(jnp.ones((3, 64)))
      >>> heads.shape
      (3, 4, 16)
      >>> NMSparseLinearGeneral((4, 16), 64, axis=(-2, -1), pattern="2:4", rngs=nnx.Rngs(0))(heads).shape
      (3, 64)
    """

    values: nnx.Variable[Any]
    mask: NMMask
    scales: nnx.Param[Any] | None
    format: NMFormat
    bias: nnx.Param[Any] | None

    def __init__(
        self,
        in_features: int | Sequence[int],
        out_features: int | Sequence[int],
        *,
        axis: int | Sequence[int] = -1,
        batch_axis: Mapping[int, int] = MappingProxyType({}),
        use_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Callable[..., Any] = _default_kernel_init,
        bias_init: Callable[..., Any] = _default_bias_init,
        precision: Any = None,
        promote_dtype: Callable[..., Any] = dtypes.promote_dtype,
        preferred_element_type: Any = None,
        rngs: nnx.Rngs,
        kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
        pattern: NMPattern | str,
        activation: str | None = None,
        implementation: str | None = None,
        values_dtype: Any = None,
    ) -> None:
        self.in_features = axes.as_tuple(in_features)
        self.out_features = axes.as_tuple(out_features)
        self.axis = axes.as_tuple(axis)
        self.batch_axis = FrozenDict(batch_axis)
        self.use_bias = use_bias
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.promote_dtype = promote_dtype
        self.preferred_element_type = preferred_element_type
        self.pattern = check_pattern("NMSparseLinearGeneral", pattern)
        check_options("NMSparseLinearGeneral", activation, implementation)
        self.activation = activation
        self.implementation = implementation
        self.values_dtype = values_dtype
        if len(self.in_features) != len(self.axis):
            raise ValueError(
                f"NMSparseLinearGeneral: in_features is {self.in_features} and axis {self.axis}, expected as many"
            )
        axes.check_batch_dims("NMSparseLinearGeneral", tuple(self.batch_axis))
        lead, layout = self._lead, self._description.layout
        flat = (math.prod(lead) * layout.in_features, layout.out_features)
        kernel, metadata = initialised(
            kernel_init(rngs.params(), flat, param_dtype), (*lead, layout.in_features, flat[1]), kernel_metadata
        )
        if metadata.get("out_sharding") is not None:
            names = axes.merge_names(metadata["out_sharding"], len(lead), len(self.in_features))
            metadata["out_sharding"] = names
        hold(self, kernel, self._description, metadata)
        self.bias = nnx.data(None)
        if use_bias:
            shape = (*lead, *self.out_features)
            bias = bias_init(rngs.params(), (math.prod(shape),), param_dtype)
            bias, metadata = initialised(bias, shape, bias_metadata)
            self.bias = nnx.Param(bias, **metadata)

    @property
    def _lead(self) -> tuple[int, ...]:
        return tuple(self.batch_axis.values())

    @property
    def _description(self) -> Description:
        return Description(self.pattern, self.in_features, self.out_features)

    def __call__(self, inputs: ArrayLike, out_sharding: Any = None) -> jax.Array:
        """Contracts axis of inputs: ``[*batch, *rest, *out_features]``, batch axes first, then those that stay."""
        label, x = "NMSparseLinearGeneral", jnp.asarray(inputs)
        axis = axes.normalize(label, self.axis, x.ndim)
        sizes = tuple(x.shape[i] for i in axis)
        if sizes != self.in_features:
            raise ValueError(
                f"{label}: x has sizes {sizes} along axes {axis}, expected {self.in_features} (= in_features)"
            )
        w = held(self, self._description, self._lead)
        x = axes.fold(label, x, axis, tuple(self.batch_axis))
        bias = None if self.bias is None else self.bias[...].reshape(*self._lead, -1)
        options = {"activation": self.activation, "preferred_element_type": self.preferred_element_type}
        y = product(self, x, w, bias, **options).reshape(*x.shape[:-1], *self.out_features)
        return placed(y, out_sharding)

    @property
    def weight(self) -> NMSparse:
        """The folded weight that the layer holds, with the batch axes, and those of stacked layers, in front."""
        return held(self, self._description)

    @classmethod
    def from_weight(
        cls,
        w: NMSparse,
        bias: Any = None,
        *,
        in_features: int | Sequence[int] | None = None,
        out_features: int | Sequence[int] | None = None,
        **options: Any,
    ) -> NMSparseLinearGeneral:
        """A layer that holds a given weight.

        Args:
          w: The folded weight; leading axes are batch axes and those of stacked layers.
          bias: None, or ``[..., *out_features]``.
          in_features: Sizes of the contracted axes, by default one.
          out_features: Sizes of the other axes, by default one.
          **options: As in the constructor.

        Returns:
          The layer; its arrays are those of w, not copies.
        """
        check_weight(w)
        in_features = axes.as_tuple(w.in_features if in_features is None else in_features)
        out_features = axes.as_tuple(w.out_features if out_features is None else out_features)
        if Description(w.pattern, in_features, out_features).layout != w.layout:
            raise ValueError(
                f"from_weight: in_features {in_features} and out_features {out_features} do not multiply to the axes "
                f"of {w!r}"
            )
        check_bias(bias, w, out_features)
        layer = cls(
            in_features,
            out_features,
            use_bias=False,
            kernel_init=lambda *_: w,
            **taken(w),
            **options,
        )
        if bias is not None:
            layer.use_bias, layer.bias = True, nnx.Param(bias)
        return layer

    @classmethod
    def from_dense(
        cls,
        linear: nnx.LinearGeneral,
        pattern: NMPattern | str,
        *,
        scores: Any = None,
        exact: bool = False,
        values_dtype: Any = None,
        **options: Any,
    ) -> NMSparseLinearGeneral:
        """The layer that replaces a trained `nnx.LinearGeneral`; arguments as in `NMSparseLinear.from_dense`.

        Example:
          >>> import jax.numpy as jnp
          >>> from flax import nnx
          >>> from jax_nmsparse.nnx import NMSparseLinearGeneral
          >>> trained = nnx.LinearGeneral((4, 16), 64, axis=(-2, -1), rngs=nnx.Rngs(0))
          >>> NMSparseLinearGeneral.from_dense(trained, "2:4")(jnp.ones((3, 4, 16))).shape
          (3, 64)
        """
        if not isinstance(linear, nnx.LinearGeneral):
            raise TypeError(f"from_dense: the layer is a {type(linear).__name__}, expected an nnx.LinearGeneral")
        kernel, contracted = linear.kernel[...], len(linear.in_features)
        lead = kernel.ndim - contracted - len(linear.out_features)
        folded, _, _ = axes.fold_kernel("from_dense", kernel, lead, contracted)
        if scores is not None:
            scores = jnp.asarray(scores).reshape(folded.shape)
        w = pack(folded, pattern, scores=scores, exact=exact, values_dtype=values_dtype)
        bias = None if linear.bias is None else linear.bias[...]
        sizes = {"in_features": linear.in_features, "out_features": linear.out_features}
        return cls.from_weight(w, bias, **{**inherited(linear, *_INHERITED), **sizes, **options})

    def to_dense(self) -> nnx.LinearGeneral:
        """The `nnx.LinearGeneral` that computes the same, but for the activation."""
        dense, bias = self.weight.todense(), None if self.bias is None else self.bias[...]
        linear = nnx.eval_shape(
            lambda: nnx.LinearGeneral(
                self.in_features,
                self.out_features,
                use_bias=self.use_bias,
                rngs=nnx.Rngs(0),
                **inherited(self, *_INHERITED),
            )
        )
        linear.kernel.set_value(dense.reshape(*dense.shape[:-2], *self.in_features, *self.out_features))
        if bias is not None and linear.bias is not None:
            linear.bias.set_value(bias)
        return linear
