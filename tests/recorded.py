"""Calls that recorded times are of: rows of benchmarks/results and points of the dispatch table."""

import jax
import jax.numpy as jnp

import jax_nmsparse as nms
from jax_nmsparse.kernels import Call
from jax_nmsparse.layout import Layout

PRECISIONS = {
    "default": None,
    "tf32x3": jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3,
    "highest": jax.lax.Precision.HIGHEST,
}


def call(
    op: str, pattern: nms.NMPattern, dtype: str, precision: str, tokens: int, in_features: int, out_features: int
) -> Call:
    """`dtype`: of x and the values ("int8 x int8"), or of the values alone; x of quantised ones is bfloat16."""
    *x, values = (jnp.dtype(name) for name in dtype.split(" x "))
    x = x[0] if x else jnp.dtype(jnp.bfloat16) if values.itemsize == 1 else values
    result = jnp.dtype(jnp.float32) if x.itemsize == 1 else x
    return Call(op, Layout(pattern, in_features, out_features), 1, tokens, x, values, result, PRECISIONS[precision])
