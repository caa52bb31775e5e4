"""``info``: versions, devices, and which native modules loaded."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform

import jax

from jax_nmsparse import native
from jax_nmsparse.layout import FORMAT_VERSION

HELP = "versions, devices, and which native modules loaded"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Nothing to say."""


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def text() -> str:
    """What is printed."""
    lines = [f"jax_nmsparse {_version('jax_nmsparse')} (format {FORMAT_VERSION})"]
    lines += [f"  {name:<8} {_version(name)}" for name in ("jax", "jaxlib", "flax", "numpy")]
    lines.append(f"  python   {platform.python_version()} on {platform.platform()}")
    lines.append("devices")
    lines += [f"  {d.platform}:{d.id} {d.device_kind}" for d in jax.devices()]
    lines.append("native modules")
    for module in native.MODULES.values():
        state = f"loaded, {len(module.targets)} targets" if module.loaded else f"missing: {module.problem}"
        lines.append(f"  _{module.implementation:<5} {state}")
    return "\n".join(lines)


def run(arguments: argparse.Namespace) -> int:
    print(text())
    return 0
