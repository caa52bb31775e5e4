"""N:M sparse networks in JAX."""

from jax_nmsparse import pruning as pruning
from jax_nmsparse import training as training
from jax_nmsparse.array import NMSparse as NMSparse
from jax_nmsparse.conversion import Rule as Rule
from jax_nmsparse.conversion import densify as densify
from jax_nmsparse.conversion import sparsify as sparsify
from jax_nmsparse.explanation import Explanation as Explanation
from jax_nmsparse.explanation import explain as explain
from jax_nmsparse.explanation import supports as supports
from jax_nmsparse.linen import NMSparseDense as NMSparseDense
from jax_nmsparse.linen import NMSparseDenseGeneral as NMSparseDenseGeneral
from jax_nmsparse.linen import NMSparseEmbed as NMSparseEmbed
from jax_nmsparse.ops import grad as grad
from jax_nmsparse.ops import sddmm as sddmm
from jax_nmsparse.ops import spmm as spmm
from jax_nmsparse.ops import spmv as spmv
from jax_nmsparse.ops import value_and_grad as value_and_grad
from jax_nmsparse.pattern import NMPattern as NMPattern
from jax_nmsparse.pruning import prune as prune
from jax_nmsparse.quantization import quantize as quantize
