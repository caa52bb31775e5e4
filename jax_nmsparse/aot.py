"""Ahead-of-time compilation: `jax.export` with our custom calls, for this machine or another; kept programs."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import export as jax_export

from jax_nmsparse import dispatch, native
from jax_nmsparse.lowering import COMPRESS_TARGET, EXPAND_TARGET, target_name

_OPS = ("spmm", "spmm_t", "sddmm")
_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


def disabled_checks() -> list[jax_export.DisabledSafetyCheck]:
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
    targets = [target_name(op, name) for name in native.MODULES for op in _OPS]
    return [jax_export.DisabledSafetyCheck.custom_call(target) for target in (*targets, EXPAND_TARGET, COMPRESS_TARGET)]


def export(
    function: Any, *, platforms: Sequence[str] | None = None, cuda_capability: str | None = None
) -> Callable[..., jax_export.Exported]:
    """`jax.export.export` of a jitted function, with our custom calls allowed and chosen for where it will run.

    Without this, a machine without CUDA or without its native module would export plain JAX for "cuda" and not say so.
    The machine that runs the result needs the same version of this package, imported, with that platform's native
    module; what is not exported needs nothing of this one.

    Args:
      function: What `jax.jit` returned.
      platforms: As in `jax.export.export`: "cpu", "cuda" ...; by default the platform of this process.
      cuda_capability: Compute capability of the GPUs it will run on ("9.0" admits Hopper's kernels); None takes kernels
        that run on all of them. Without platforms that of the GPUs present.

    Returns:
      A function of the arguments (or their shapes) that returns the `jax.export.Exported`; `targets` tells which of our
      kernels' custom calls it holds.

    Raises:
      TypeError, ValueError: For platforms that are no list of "cpu", "cuda", "rocm" and "tpu", and for a capability
        that is no "major.minor".
      NotImplementedError: For a product that jit spreads over several devices; under `jax.shard_map` it is exported.

    Example:
      >>> import jax, jax.numpy as jnp, jax_nmsparse as nms
      >>> from jax_nmsparse import aot
      >>> w = nms.prune(jnp.ones((64, 128), jnp.bfloat16), "2:4")
      >>> exported = aot.export(jax.jit(nms.spmm), platforms=["cuda"])(jnp.ones((1, 64), jnp.bfloat16), w)
      >>> aot.targets(exported)
      {'nms_cuda_spmm'}
    """
    if isinstance(platforms, str):
        raise TypeError(f"export: platforms is {platforms!r}, expected a sequence such as [{platforms!r}]")
    if unknown := set(platforms or ()) - set(_PLATFORMS):
        raise ValueError(f"export: platforms holds {sorted(unknown)}, expected some of {', '.join(_PLATFORMS)}")
    if cuda_capability is not None and not re.fullmatch(r"\d+\.\d+", cuda_capability):
        raise ValueError(f"export: cuda_capability is {cuda_capability!r}, expected such as '9.0'")

    def of(*arguments: Any, **keywords: Any) -> jax_export.Exported:
        exporter = jax_export.export(function, platforms=platforms, disabled_checks=disabled_checks())
        try:
            if platforms is None:
                return exporter(*arguments, **keywords)
            with dispatch.compiling_elsewhere(cuda_capability):
                return exporter(*arguments, **keywords)
        except NotImplementedError as error:
            if "host_callbacks" not in str(error):
                raise
            raise NotImplementedError(
                "export: a product is spread over several devices by jit, and the callback that splits it stays in "
                "this process; split it by jax.shard_map (placement.local gives each device's weight)"
            ) from error

    return of


def targets(exported: jax_export.Exported) -> set[str]:
    """The FFI targets of ours that an exported function calls, such as "nms_cuda_spmm"."""
    return set(re.findall(r"@(nms_\w+)\(", exported.mlir_module()))


def cache_programs(directory: str | os.PathLike) -> None:
    """Turns JAX's persistent compilation cache on, so that products on several devices are found in it too.

    JAX writes the address of a partitioning callback into the key of such a program, which differs in every process.
    This leaves it out (``jax_remove_custom_partitioning_ptr_from_cache_key``): right for this package, whose programs
    say in another way what their callbacks compute. Other packages with `custom_partitioning` have to see to it too.

    Args:
      directory: Where compiled programs are kept.

    Example:
      >>> import tempfile
      >>> from jax_nmsparse import aot
      >>> aot.cache_programs(tempfile.mkdtemp())  # doctest: +SKIP
    """
    jax.config.update("jax_compilation_cache_dir", os.fspath(directory))
    jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", True)
