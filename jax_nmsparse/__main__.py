"""``python -m jax_nmsparse info``: versions, devices, and which native modules loaded."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import sys

import jax

from jax_nmsparse import native
from jax_nmsparse.commands import plan
from jax_nmsparse.layout import FORMAT_VERSION


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def info() -> str:
    """The text of ``info``."""
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


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m jax_nmsparse", description="N:M sparse networks in JAX.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="versions, devices, and which native modules loaded")
    planner = commands.add_parser("plan", help=plan.HELP, description=plan.HELP)
    plan.add_arguments(planner)
    planner.set_defaults(run=plan.run)
    parsed = parser.parse_args(arguments)
    if parsed.command == "plan":
        return parsed.run(parsed)
    print(info())
    return 0


if __name__ == "__main__":
    sys.exit(main())
