"""Flax NNX layers with N:M sparse weights."""

from jax_nmsparse.nnx.linear import NMMask as NMMask
from jax_nmsparse.nnx.linear import NMSparseLinear as NMSparseLinear
