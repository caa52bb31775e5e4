"""Flax NNX layers with N:M sparse weights."""

from jax_nmsparse.nnx.embed import NMSparseEmbed as NMSparseEmbed
from jax_nmsparse.nnx.general import NMSparseLinearGeneral as NMSparseLinearGeneral
from jax_nmsparse.nnx.linear import NMSparseLinear as NMSparseLinear
from jax_nmsparse.nnx.variables import NMMask as NMMask
