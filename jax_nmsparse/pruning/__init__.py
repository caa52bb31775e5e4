"""Choosing which units to keep."""

from jax_nmsparse.pruning.magnitude import prune as prune
