"""Ahead-of-time compilation: what `jax.export` has to be told about our custom calls."""

from __future__ import annotations

from jax import export

from jax_nmsparse import native
from jax_nmsparse.lowering import target_name


def disabled_checks() -> list[export.DisabledSafetyCheck]:
    """The checks to disable so that `jax.export` accepts the native kernels.

    JAX promises stability for its own custom calls only; these are ours, stable within a version of this package.

    Returns:
      One check for each FFI target.

    Example:
      >>> import jax, jax.numpy as jnp, jax_nmsparse as nms
      >>> from jax_nmsparse.aot import disabled_checks
      >>> w = nms.prune(jnp.ones((8, 8)), "2:4")
      >>> exported = jax.export.export(jax.jit(nms.spmm), disabled_checks=disabled_checks())(jnp.ones((2, 8)), w)
      >>> restored = jax.export.deserialize(exported.serialize())
      >>> restored.call(jnp.ones((2, 8)), w).shape
      (2, 8)
    """
    targets = [target_name(op, name) for name in native.MODULES for op in ("spmm", "spmm_t", "sddmm")]
    return [export.DisabledSafetyCheck.custom_call(target) for target in targets]
