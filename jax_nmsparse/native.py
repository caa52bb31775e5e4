"""Loads the native modules and registers their FFI targets. Both are optional."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pathlib

import jax

_PLATFORMS = {"cpu": "cpu", "cuda": "CUDA"}


@dataclasses.dataclass(frozen=True)
class NativeModule:
    """What became of one native module.

    Attributes:
      implementation: "cpu" or "cuda".
      targets: FFI targets that it registered; empty where it is missing.
      problem: Why it is missing, or None.
    """

    implementation: str
    targets: frozenset[str]
    problem: str | None

    @property
    def loaded(self) -> bool:
        return self.problem is None


def _load(implementation: str) -> NativeModule:
    name = f"jax_nmsparse._{implementation}"
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        built = any(pathlib.Path(__file__).parent.glob(f"_{implementation}.*"))
        problem = f"cannot be loaded: {error}" if built else "was not built (see the build's status lines)"
        return NativeModule(implementation, frozenset(), problem)
    targets = module.registrations()
    for target, capsule in targets.items():
        jax.ffi.register_ffi_target(target, capsule, platform=_PLATFORMS[implementation])
    return NativeModule(implementation, frozenset(targets), None)


MODULES: dict[str, NativeModule] = {implementation: _load(implementation) for implementation in _PLATFORMS}
"""The native modules by implementation, loaded when the package is imported."""


@functools.cache
def cuda_capability() -> str | None:
    """Compute capability of the GPUs that JAX sees ("9.0"); None where there is none, or they differ."""
    if jax.default_backend() != "gpu":
        return None
    found = {getattr(d, "compute_capability", None) for d in jax.local_devices()}
    return found.pop() if len(found) == 1 else None
