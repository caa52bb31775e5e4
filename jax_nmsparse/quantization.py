"""Weight quantisation: int8 and float8 values with one scale for every output feature."""

from __future__ import annotations

import jax.numpy as jnp
from jax.core import Tracer

from jax_nmsparse.array import NMSparse
from jax_nmsparse.dense_form import scales_like_values

_LARGEST = {jnp.dtype(jnp.int8): 127.0, jnp.dtype(jnp.float8_e4m3fn): 448.0}


def quantize(w: NMSparse, dtype) -> NMSparse:
    """Symmetric quantisation, column by column: ``values = round(W / scales)``, ``scales = max |W| / largest``.

    Args:
      w: A weight with float values and no scales.
      dtype: int8 (largest 127) or float8_e4m3fn (largest 448).

    Returns:
      The weight with values of that dtype and float32 scales ``[..., out_features]``; a column of zeros has scale 1.

    Raises:
      TypeError: For another dtype, or a weight that is quantised already.
      ValueError: Where a concrete weight holds NaN or Inf.

    Example:
      >>> import jax, jax.numpy as jnp, jax_nmsparse as nms
      >>> w = nms.prune(jax.random.normal(jax.random.key(0), (64, 8)), "2:4")
      >>> nms.quantize(w, jnp.int8)
      NMSparse(64x8, 2:4, int8, scales=float32)
    """
    if not isinstance(w, NMSparse):
        raise TypeError(f"quantize: w is a {type(w).__name__}, expected an NMSparse")
    dtype = jnp.dtype(dtype)
    if dtype not in _LARGEST:
        raise TypeError(f"quantize: dtype is {dtype.name}, expected int8 or float8_e4m3fn")
    if w.scales is not None or not jnp.issubdtype(w.dtype, jnp.floating):
        raise TypeError(f"quantize: {w!r} is quantised already; use w.astype(jnp.float32) first")
    if not isinstance(w.values, Tracer) and not bool(jnp.all(jnp.isfinite(w.values.astype(jnp.float32)))):
        raise ValueError("quantize: the weight holds NaN or Inf, which have no scale")
    largest = _LARGEST[dtype]
    layout = w.layout
    values = w.values.astype(jnp.float32)
    peak = jnp.max(jnp.abs(values), axis=(-5, -3, -2)).reshape(*w.shape[:-2], layout.padded_out)
    peak = peak[..., : layout.out_features]
    scales = jnp.where(peak > 0, peak / largest, 1.0)
    scaled = jnp.clip(values / scales_like_values(scales, layout), -largest, largest)
    scaled = jnp.round(scaled) if dtype == jnp.int8 else scaled
    return w._replace(values=scaled.astype(dtype), scales=scales)
