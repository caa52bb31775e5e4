"""The command line, ``python -m jax_nmsparse``: arguments in, exit code out."""

from __future__ import annotations

import argparse
import sys
from types import ModuleType

from jax_nmsparse.commands import bench, info, inspect, plan, prune

COMMANDS: tuple[ModuleType, ...] = (info, inspect, prune, bench, plan)
"""The subcommands, in the order of the help; each is named after its module."""


def parser() -> argparse.ArgumentParser:
    """The parser of all subcommands."""
    whole = argparse.ArgumentParser(prog="python -m jax_nmsparse", description="N:M sparse networks in JAX.")
    commands = whole.add_subparsers(dest="command", required=True)
    for module in COMMANDS:
        one = commands.add_parser(module.__name__.rpartition(".")[2], help=module.HELP, description=module.HELP)
        module.add_arguments(one)
        one.set_defaults(run=module.run)
    return whole


def main(arguments: list[str] | None = None) -> int:
    """Runs one subcommand.

    Returns:
      0 where it was done, 1 where it could not be (the reason is on standard error), 2 for wrong usage (by argparse),
      130 where it was interrupted.
    """
    parsed = parser().parse_args(arguments)
    try:
        return parsed.run(parsed)
    except (ValueError, TypeError, NotImplementedError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
