"""``plan``: memory, bytes and times of a sparse transformer on a mesh that need not be here."""

from __future__ import annotations

import argparse

from jax_nmsparse import planning

HELP = "memory, bytes and times of a sparse transformer on a mesh of devices that need not be here"


def _mesh(text: str) -> tuple[int, int]:
    data, _, tensor = text.partition("x")
    if not (data.isdigit() and tensor.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a mesh, expected DATAxTENSOR such as 8x8")
    return int(data), int(tensor)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, choices=list(planning.models()))
    parser.add_argument("--mesh", type=_mesh, default=(1, 1), help="DATAxTENSOR, for example 8x8")
    parser.add_argument("--pattern", default="16:32", help="of every projection, for example 8:32/1x128")
    parser.add_argument("--tokens", type=int, default=1, help="in one step, of every data-parallel group")
    parser.add_argument("--context", type=int, default=4096, help="positions of keys and values for every sequence")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="NVIDIA H200", help="device kind with recorded ceilings")
    parser.add_argument("--link", type=float, help="GB/s that a device sends; by default its data sheet's")


def run(arguments: argparse.Namespace) -> int:
    print(
        planning.plan(
            arguments.model,
            mesh=arguments.mesh,
            pattern=arguments.pattern,
            tokens=arguments.tokens,
            context=arguments.context,
            dtype=arguments.dtype,
            device=arguments.device,
            link=None if arguments.link is None else 1e9 * arguments.link,
        )
    )
    return 0
