"""Devices, markers and fixtures that all tests share; the oracle and the tolerances are in oracle.py."""
# ruff: noqa: E402

import os

# Before JAX starts: eight CPU devices for the sharding tests, and machine code that is compiled fast rather than runs
# fast, since the tests compile thousands of small programs. Flags that are set already stay.
for _flag in ("--xla_force_host_platform_device_count=8", "--xla_backend_optimization_level=0"):
    if _flag.split("=")[0] not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_flag}".strip()

import hypothesis
import jax
import numpy as np
import pytest

pytest.register_assert_rewrite("oracle")

# Every new shape compiles, so a time limit for one example would only measure the compiler.
hypothesis.settings.register_profile(
    "jax_nmsparse",
    deadline=None,
    max_examples=25,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("jax_nmsparse")


def _gpu_problem() -> str | None:
    """Why tests that need a GPU cannot run here, or None."""
    try:
        jax.devices("cuda")
    except RuntimeError:
        return "no CUDA device"
    from jax_nmsparse import native

    module = native.MODULES["cuda"]
    return None if module.loaded else f"the native module _cuda {module.problem}"


def pytest_collection_modifyitems(items) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    problem = _gpu_problem() if marked else None
    for item in marked:
        if problem:
            item.add_marker(pytest.mark.skip(reason=problem))


@pytest.fixture
def x64():
    """64-bit types for the length of a test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20231)


@pytest.fixture(scope="module", autouse=True)
def _free_compiled_programs():
    """Thousands of compiled programs would otherwise hold gigabytes."""
    yield
    jax.clear_caches()
