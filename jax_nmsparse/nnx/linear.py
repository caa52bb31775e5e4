"""`NMSparseLinear`: `flax.nnx.Linear` with an N:M sparse kernel."""

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
from jax_nmsparse.layer import check_bias, check_options, check_weight, pack
from jax_nmsparse.nnx.variables import NMFormat, NMMask, held, hold, inherited, initialised, placed, product, taken
from jax_nmsparse.pattern import NMPattern

_default_kernel_init = nnx.initializers.lecun_normal()
_default_bias_init = nnx.initializers.zeros_init()
_INHERITED = ("precision", "preferred_element_type")


class NMSparseLinear(nnx.Module):
    """`flax.nnx.Linear` with an N:M sparse kernel: ``y = act(x W + bias)``.

    Arguments, promotion of dtypes and initial values are those of `nnx.Linear` (the kernel is drawn dense by
    kernel_init at ``[in_features, out_features]`` and pruned by magnitude). There is no ``dot_general``: a product
    with a packed kernel is none. An ``out_sharding`` of a call is applied to the result of the product.

    Variables, for one layer (`nnx.vmap` over the constructor puts axes in front of all of them):

    * ``values``: `nnx.Param`, float ``[windows, out_blocks, q, bk, bn]``, the kept units (see `NMSparse`);
    * ``bias``: `nnx.Param`, ``[out_features]``, or None;
    * ``mask``: `NMMask`, uint32, which units are kept;
    * ``format``: format version, pattern, block and sizes, in the name of an empty variable: every state of the layer
      says what it holds, and one of another pattern or size cannot be restored into it.

    With values_dtype they are quantised: ``values`` is an `NMMask`, and ``scales`` an `nnx.Param`, float32
    ``[out_features]``. Otherwise scales is None.

    Args:
      in_features: Size of the last axis of x.
      out_features: Size of the last axis of y.
      use_bias: Whether to add a bias.
      dtype: dtype of the computation; by default that which x and the parameters promote to.
      param_dtype: dtype that values and bias are initialised in.
      precision: As in `jnp.dot`.
      kernel_init: Initialiser of the dense kernel; may be wrapped in `nnx.with_partitioning` with the axes (in, out).
        Where it returns an `NMSparse`, that is the weight.
      bias_init: Initialiser of the bias.
      promote_dtype: Casts (x, values, bias) to the dtype of the computation.
      preferred_element_type: As in `spmm`.
      rngs: The random numbers; ``rngs.params()`` is drawn from exactly as `nnx.Linear` does.
      kernel_metadata: Metadata of values. Names in ``out_sharding`` are those of the axes (in, out); mask and scales
        get theirs from it.
      bias_metadata: Metadata of bias.
      pattern: The `NMPattern`, or a string such as "2:4". Groups run along in_features.
      activation: None, "relu", "gelu" (exact), "gelu_tanh" or "silu", computed in the epilogue of the product.
      implementation: As in `spmm`.
      values_dtype: None, or int8 or float8_e4m3fn for quantised values.

    Raises:
      ValueError: For an unknown activation or implementation; where variables and module do not fit together.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jax_nmsparse.nnx import NMSparseLinear
      >>> layer = NMSparseLinear(64, 48, pattern="2:4", activation="relu", rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((3, 64))).shape
      (3, 48)
      >>> layer.weight
      NMSparse(64x48, 2:4, float32)
    """

    values: nnx.Variable[Any]
    mask: NMMask
    scales: nnx.Param[Any] | None
    format: NMFormat
    bias: nnx.Param[Any] | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        precision: Any = None,
        kernel_init: Callable[..., Any] = _default_kernel_init,
        bias_init: Callable[..., Any] = _default_bias_init,
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
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = use_bias
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.promote_dtype = promote_dtype
        self.preferred_element_type = preferred_element_type
        self.pattern = check_pattern("NMSparseLinear", pattern)
        check_options("NMSparseLinear", activation, implementation)
        self.activation = activation
        self.implementation = implementation
        self.values_dtype = values_dtype
        shape = (in_features, out_features)
        kernel, metadata = initialised(kernel_init(rngs.params(), shape, param_dtype), shape, kernel_metadata)
        hold(self, kernel, self._description, metadata)
        bias = bias_init(rngs.params(), (out_features,), param_dtype) if use_bias else None
        self.bias = nnx.data(None) if bias is None else nnx.Param(bias, **bias_metadata)

    @property
    def _description(self) -> Description:
        return Description(self.pattern, (self.in_features,), (self.out_features,))

    def __call__(self, inputs: ArrayLike, out_sharding: Any = None) -> jax.Array:
        """Applies the layer along the last axis of inputs, ``[..., in_features]``, giving ``[..., out_features]``."""
        if jnp.ndim(inputs) < 1:
            raise ValueError("NMSparseLinear: x has no axes, expected [..., in_features]")
        bias = None if self.bias is None else self.bias[...]
        options = {"activation": self.activation, "preferred_element_type": self.preferred_element_type}
        return placed(product(self, inputs, held(self, self._description, ()), bias, **options), out_sharding)

    @property
    def weight(self) -> NMSparse:
        """The weight that the layer holds, with the batch axes of stacked layers in front.

        Raises:
          ValueError: Where the variables are those of another pattern or size.
        """
        return held(self, self._description)

    @classmethod
    def from_weight(cls, w: NMSparse, bias: Any = None, **options: Any) -> NMSparseLinear:
        """A layer that holds a given weight.

        Args:
          w: The weight; leading axes are those of stacked layers.
          bias: None, or ``[..., out_features]``.
          **options: As in the constructor.

        Returns:
          The layer; its arrays are those of w, not copies.

        Example:
          >>> import jax.numpy as jnp, jax_nmsparse as nms
          >>> from jax_nmsparse.nnx import NMSparseLinear
          >>> NMSparseLinear.from_weight(nms.NMSparse.fromdense(jnp.eye(4), "1:4"))(jnp.arange(4.0))
          Array([0., 1., 2., 3.], dtype=float32)
        """
        check_weight(w)
        check_bias(bias, w, (w.out_features,))
        return cls(
            w.in_features,
            w.out_features,
            use_bias=bias is not None,
            kernel_init=lambda *_: w,
            bias_init=lambda *_: bias,
            **taken(w),
            **options,
        )

    @classmethod
    def from_dense(
        cls,
        linear: nnx.Linear,
        pattern: NMPattern | str,
        *,
        scores: Any = None,
        exact: bool = False,
        values_dtype: Any = None,
        **options: Any,
    ) -> NMSparseLinear:
        """The layer that replaces a trained `nnx.Linear`; runs under `nnx.jit` too, except with exact.

        Args:
          linear: The layer; leading axes of its variables are those of stacked layers.
          pattern: The pattern, or a string such as "2:4".
          scores: As in `prune`: scores or a boolean mask of the kernel's shape; by default magnitude.
          exact: The kernel satisfies the pattern already; raise where it does not, rather than drop weights.
          values_dtype: None, or int8 or float8_e4m3fn to quantise.
          **options: Other arguments of the constructor, such as activation; dtype, precision and the like are those of
            linear.

        Returns:
          The layer. Nothing of it refers to the dense kernel.

        Raises:
          TypeError, ValueError: As `prune` and `NMSparse.fromdense`.

        Example:
          >>> import jax.numpy as jnp
          >>> from flax import nnx
          >>> from jax_nmsparse.nnx import NMSparseLinear
          >>> trained = nnx.Linear(64, 48, rngs=nnx.Rngs(0))
          >>> NMSparseLinear.from_dense(trained, "8:32")(jnp.ones((3, 64))).shape
          (3, 48)
        """
        if not isinstance(linear, nnx.Linear):
            raise TypeError(f"from_dense: the layer is a {type(linear).__name__}, expected an nnx.Linear")
        w = pack(linear.kernel[...], pattern, scores=scores, exact=exact, values_dtype=values_dtype)
        bias = None if linear.bias is None else linear.bias[...]
        return cls.from_weight(w, bias, **{**inherited(linear, *_INHERITED), **options})

    def to_dense(self) -> nnx.Linear:
        """The `nnx.Linear` that computes the same, but for the activation.

        Example:
          >>> from flax import nnx
          >>> from jax_nmsparse.nnx import NMSparseLinear
          >>> NMSparseLinear(64, 48, pattern="2:4", rngs=nnx.Rngs(0)).to_dense().kernel.shape
          (64, 48)
        """
        kernel, bias = self.weight.todense(), None if self.bias is None else self.bias[...]
        return nnx.Linear(
            self.in_features,
            self.out_features,
            use_bias=self.use_bias,
            kernel_init=lambda *_: kernel,
            bias_init=lambda *_: bias,
            rngs=nnx.Rngs(0),
            **inherited(self, *_INHERITED),
        )
