"""What the layers of Flax linen and Flax NNX share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_nmsparse import dispatch, ops, reference
from jax_nmsparse.array import NMSparse, check_pattern
from jax_nmsparse.description import Description
from jax_nmsparse.pattern import NMPattern
from jax_nmsparse.pruning import prune
from jax_nmsparse.quantization import quantize


def pack(
    kernel: Any, pattern: NMPattern | str, *, scores: Any = None, exact: bool = False, values_dtype: Any = None
) -> NMSparse:
    """A dense kernel ``[..., in_features, out_features]`` as a weight; the arguments are those of `from_dense`."""
    if exact and scores is not None:
        raise ValueError("from_dense: scores choose what to drop, exact=True drops nothing; give one of them")
    pattern = check_pattern("from_dense", pattern)
    w = NMSparse.fromdense(kernel, pattern) if exact else prune(kernel, pattern, scores=scores)
    return w if values_dtype is None else quantize(w, values_dtype)


def check_options(layer: str, activation: Any, implementation: Any) -> None:
    """Raises for what no call of the layer could do."""
    for name, given, known in (
        ("activation", activation, reference.ACTIVATIONS),
        ("implementation", implementation, dispatch.IMPLEMENTATIONS),
    ):
        if given is not None and given not in known:
            raise ValueError(f"{layer}: {name} is {given!r}, expected None or one of {', '.join(known)}")


def check_weight(w: Any) -> None:
    if not isinstance(w, NMSparse):
        raise TypeError(f"from_weight: w is a {type(w).__name__}, expected an NMSparse; from_dense prunes a kernel")


def check_bias(bias: Any, w: NMSparse, sizes: tuple[int, ...]) -> None:
    expected = (*w.shape[:-2], *sizes)
    if bias is not None and jnp.shape(bias) != expected:
        raise ValueError(
            f"from_weight: bias has shape {jnp.shape(bias)}, expected {expected} (= out_features of {w!r})"
        )


def weight(description: Description, values: Any, mask: Any, scales: Any) -> NMSparse:
    """The weight of arrays with any batch axes."""
    layout = description.layout
    shape = (*values.shape[:-5], layout.in_features, layout.out_features)
    return NMSparse(values, mask, shape=shape, pattern=description.pattern, scales=scales)


def multiply(
    layer: Any, promote: Callable[..., Any], x: ArrayLike, w: NMSparse, bias: jax.Array | None, **options: Any
) -> jax.Array:
    """``act(x W + bias)`` in the dtype that promote casts (x, values, bias) to.

    The layer has param_dtype, precision and implementation.
    """
    # Quantised values stand for a kernel of param_dtype.
    kernel = w.values if w.scales is None else jnp.zeros((1,), layer.param_dtype)
    x, kernel, bias = promote(x, kernel, bias)
    w = w._replace(values=kernel) if w.scales is None else w
    y = ops.spmm(x, w, bias=bias, precision=layer.precision, implementation=layer.implementation, **options)
    return y if options.get("preferred_element_type") is not None else y.astype(jnp.result_type(x))
