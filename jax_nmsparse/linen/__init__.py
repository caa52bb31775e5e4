"""Flax linen layers with N:M sparse weights."""

from jax_nmsparse.linen.dense import NMSparseDense as NMSparseDense
from jax_nmsparse.linen.embed import NMSparseEmbed as NMSparseEmbed
from jax_nmsparse.linen.general import NMSparseDenseGeneral as NMSparseDenseGeneral
from jax_nmsparse.linen.variables import MASK_COLLECTION as MASK_COLLECTION
