"""Whole models from dense to N:M sparse and back."""

from jax_nmsparse.conversion.convert import densify as densify
from jax_nmsparse.conversion.convert import sparsify as sparsify
from jax_nmsparse.conversion.report import LayerReport as LayerReport
from jax_nmsparse.conversion.report import Report as Report
from jax_nmsparse.conversion.rules import Rule as Rule
