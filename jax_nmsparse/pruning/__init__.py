"""Choosing which units to keep."""

from jax_nmsparse.pruning.calibration import Statistics as Statistics
from jax_nmsparse.pruning.calibration import calibrate as calibrate
from jax_nmsparse.pruning.one_shot import prune as prune
from jax_nmsparse.pruning.permutation import find_permutation as find_permutation
from jax_nmsparse.pruning.sparsegpt import sparsegpt as sparsegpt
from jax_nmsparse.pruning.transposable import transposable_mask as transposable_mask
from jax_nmsparse.pruning.wanda import wanda_scores as wanda_scores
