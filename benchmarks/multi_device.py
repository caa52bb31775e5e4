"""Several devices of one machine: dense against N:M, tensor and data parallel: ``python -m benchmarks.multi_device``.

Takes the devices that are present and measures on one of them and on all of them (or on the numbers that --devices
names), in one run:

    mlp          columns, then rows, over the devices: forward, and forward + backward by x and both weights
    decoder      one step of a tensor-parallel decoder with a cache, a token for every sequence
    classifier   one training step of a sparse classifier, its batch over the devices

Every row stands beside the dense program of the same dtype and mesh. Before it is timed its result is compared with
that of one device, and its program is searched for collectives: a weight that is gathered stops the run.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import json
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

# NCCL's use of NVLink multicast needs rights that containers seldom have, and fails late where they are missing.
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_nmsparse as nms
from benchmarks import decoding, run, timing
from jax_nmsparse import placement
from jax_nmsparse.collectives import collectives
from jax_nmsparse.planning import Model, models

TOLERANCE = {"bfloat16": 2.0**-6, "float16": 2.0**-9, "float32": 2.0**-9}
"""Largest difference from one device over the root mean square: partial sums are rounded, and TF32 may be used."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes:
      mlp: (width, hidden) of the MLPs.
      tokens: For each of them.
      patterns: Of the weights.
      classifier: Its layers, and its batch.
      decoder: Sizes of the decoder, whose layers are as many as are measured; batches: its sequences; context:
        positions in its cache.
      dtypes: Of weights and activations.
    """

    mlp: tuple[tuple[int, int], ...] = ((4096, 14336), (8192, 28672))
    tokens: tuple[int, ...] = (1, 16, 256, 4096)
    patterns: tuple[str, ...] = ("16:32", "8:32", "16:32/1x128", "8:32/1x128")
    classifier: tuple[tuple[int, ...], int] = ((4096, 4096, 4096, 1024), 16384)
    decoder: Model = dataclasses.replace(models()["8b"], layers=4)
    batches: tuple[int, ...] = (1, 16)
    context: int = 512
    dtypes: tuple[str, ...] = ("bfloat16",)


TINY = Sizes(
    mlp=((256, 512),),
    tokens=(8,),
    patterns=("8:32",),
    classifier=((64, 64, 8), 16),
    decoder=Model(layers=1, hidden=128, intermediate=256, heads=8, kv_heads=4, vocabulary=0),
    batches=(2,),
    context=4,
    dtypes=("float32",),
)


@dataclasses.dataclass(frozen=True)
class Program:
    """One thing to measure, sparse or dense.

    Attributes:
      part: "mlp", "decoder" or "classifier".
      direction: "forward", "backward" (forward and backward) or "step".
      sizes: What tells it from others of its part.
      function: (x, weights) -> result.
      weights: One set of weights, a list.
      weight_specs, x_spec: How they are split over the axis "d"; a prefix of the pytree.
      x: The input.
    """

    part: str
    direction: str
    sizes: dict[str, Any]
    function: Callable[[Any, Any], Any]
    weights: Any
    weight_specs: list[Any]
    x: Any
    x_spec: P


def _mlp(x: jax.Array, weights: Any) -> jax.Array:
    up, down = weights
    if isinstance(up, nms.NMSparse):
        return nms.spmm(nms.spmm(x, up, activation="silu"), down)
    return jax.nn.silu(x @ up) @ down


def _mlp_gradients(x: jax.Array, weights: Any) -> Any:
    def loss(x: jax.Array, weights: Any) -> jax.Array:
        return jnp.mean(jnp.square(_mlp(x, weights).astype(jnp.float32)))

    dx, dw = nms.grad(loss, argnums=(0, 1))(x, weights)
    return dx, [_trained(w) for w in dw]


def _trained(w: Any) -> jax.Array:
    return w.values if isinstance(w, nms.NMSparse) else w


def _classify(x: jax.Array, weights: Any) -> jax.Array:
    for w in weights[:-1]:
        x = nms.spmm(x, w, activation="relu") if isinstance(w, nms.NMSparse) else jax.nn.relu(x @ w)
    return x @ weights[-1]


def _step(x: Any, weights: Any) -> list[jax.Array]:
    """One step of gradient descent on (inputs, labels): the new weights."""

    def loss(weights: Any) -> jax.Array:
        logits = _classify(x[0], weights).astype(jnp.float32)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), x[1][:, None], -1).mean()

    gradients = nms.grad(loss)(weights)
    return [
        (_trained(w) - 0.1 * _trained(g)).astype(_trained(w).dtype) for w, g in zip(weights, gradients, strict=True)
    ]


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _draw(key: jax.Array, shape: tuple[int, int], pattern: str, dtype: str) -> nms.NMSparse:
    return nms.prune((jax.random.normal(key, shape) / np.sqrt(shape[0])).astype(dtype), pattern)


def programs(sizes: Sizes, pattern: str, dtype: str, dense: bool) -> list[Program]:
    """All programs of a pattern, with its weights sparse or made dense."""
    keys = iter(jax.random.split(jax.random.key(0), 64))

    def weights(*shapes: tuple[int, int]) -> list[Any]:
        drawn = [_draw(next(keys), shape, pattern, dtype) for shape in shapes]
        return [w.todense() for w in drawn] if dense else drawn

    found = []
    for width, hidden in sizes.mlp:
        made = weights((width, hidden), (hidden, width))
        for tokens in sizes.tokens:
            x = jax.random.normal(next(keys), (tokens, width)).astype(dtype)
            specs = [P(None, "d"), P("d")]
            about = {"tokens": tokens, "widths": [width, hidden, width]}
            found += [
                Program("mlp", direction, about, function, made, specs, x, P())
                for direction, function in (("forward", _mlp), ("backward", _mlp_gradients))
            ]
    model = sizes.decoder
    drawn = [
        dict(zip(decoding.shapes(model), weights(*decoding.shapes(model).values()), strict=True))
        for _ in range(model.layers)
    ]
    for batch in sizes.batches:
        made = [layer | decoding.cache(next(keys), model, batch, sizes.context, dtype) for layer in drawn]
        h = jax.random.normal(next(keys), (batch, model.hidden)).astype(dtype)
        about = {"tokens": batch, **dataclasses.asdict(model), "context": sizes.context}
        specs = [decoding.place(model)] * model.layers
        found.append(Program("decoder", "step", about, decoding.step(model), made, specs, h, P()))
    layers, batch = sizes.classifier
    made = weights(*zip(layers, layers[1:], strict=False))
    x = jax.random.normal(next(keys), (batch, layers[0])).astype(dtype)
    labels = jax.random.randint(next(keys), (batch,), 0, layers[-1])
    about = {"tokens": batch, "widths": list(layers)}
    found.append(Program("classifier", "step", about, _step, made, [P()] * len(made), (x, labels), P("d")))
    return found


def _mesh(devices: int) -> Mesh:
    return jax.make_mesh((devices,), ("d",), devices=jax.devices()[:devices], axis_types=(AxisType.Auto,))


def _place(program: Program, mesh: Mesh) -> tuple[Any, Any]:
    x = jax.device_put(program.x, NamedSharding(mesh, program.x_spec))
    is_spec = lambda node: isinstance(node, P)  # noqa: E731
    places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), program.weight_specs, is_leaf=is_spec)
    return x, jax.device_put(program.weights, placement.shardings(program.weights, places))


def moved(compiled: Any) -> dict[str, dict[str, int]]:
    """Number and bytes of the collectives of a program, by kind."""
    found: dict[str, dict[str, int]] = {}
    for c in collectives(compiled):
        kind = found.setdefault(c.kind, {"number": 0, "bytes": 0})
        kind["number"] += 1
        kind["bytes"] += c.bytes
    return found


def check_no_weight_is_gathered(program: Program, compiled: Any) -> None:
    """Raises where an all-gather is of the shape of a weight's array; the dense products are held to the same."""
    shapes = {tuple(leaf.shape) for leaf in jax.tree.leaves(program.weights)}
    for c in collectives(compiled):
        for text in c.shapes if c.kind == "all-gather" else ():
            shape = tuple(int(d) for d in text.split("[")[1].rstrip("]").split(",") if d)
            if tuple(d for d in shape if d > 1) in {tuple(d for d in s if d > 1) for s in shapes}:
                raise RuntimeError(f"{program.part} {program.direction}: a weight is gathered: {c}")


def difference(got: Any, want: Any) -> float:
    """The largest difference over the root mean square, of the worst array."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        worst = max(worst, float(np.max(np.abs(a - b)) / max(np.sqrt(np.mean(np.square(b))), 1e-30)))
    return worst


def measure(program: Program, devices: int, reference: Any, tolerance: float) -> dict[str, Any]:
    """Checks and times a program on a number of devices."""
    mesh = _mesh(devices)
    x, weights = _place(program, mesh)
    compiled = jax.jit(program.function).lower(x, weights).compile()
    check_no_weight_is_gathered(program, compiled)
    error = difference(compiled(x, weights), reference)
    if not error <= tolerance:
        raise RuntimeError(f"{program.part} {program.direction} on {devices} devices differs by {error} from one")
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(program.weights))
    parallel = 1 if program.part == "classifier" else devices
    watch = timing.Stopwatch(program.function, x, weights, 1e6 * size / parallel / 4e12).measure()
    return {"time_us": watch.time_us, "spread": watch.spread, "rel_err": error, "collectives": moved(compiled)}


def _row(program: Program, pattern: str, dtype: str, devices: int, sparse: dict, dense: dict) -> dict[str, Any]:
    unit = nms.NMPattern.parse(pattern)
    return {
        "op": program.part,
        "direction": program.direction,
        "pattern": f"{unit.n}:{unit.m}",
        "block": f"{unit.block[0]}x{unit.block[1]}",
        "dtype": dtype,
        **program.sizes,
        "devices": devices,
        **sparse,
        "dense_us": dense["time_us"],
        "dense_spread": dense["spread"],
        "dense_collectives": dense["collectives"],
    }


def compare(row: dict[str, Any], one: dict[str, Any]) -> dict[str, float]:
    """How a row on several devices stands to the same on one device.

    Returns:
      efficiency: Time on one device over (devices x time); dense_efficiency: the same of the dense program.
      ratio_kept: (dense over sparse here) over (dense over sparse on one device).
    """
    n = row["devices"] / one["devices"]
    return {
        "efficiency": one["time_us"] / row["time_us"] / n,
        "dense_efficiency": one["dense_us"] / row["dense_us"] / n,
        "ratio_kept": (row["dense_us"] / row["time_us"]) / (one["dense_us"] / one["time_us"]),
    }


def run_all(sizes: Sizes, counts: list[int], write: Callable[[list[dict[str, Any]]], None]) -> list[dict[str, Any]]:
    """Measures everything; calls write with the rows so far after each."""
    rows: list[dict[str, Any]] = []
    for dtype in sizes.dtypes:
        for pattern in sizes.patterns:
            pairs = zip(programs(sizes, pattern, dtype, False), programs(sizes, pattern, dtype, True), strict=True)
            for program, dense in pairs:
                wants = [jax.jit(p.function)(p.x, p.weights) for p in (program, dense)]
                if program.direction == "forward" or program.part == "decoder":
                    error = difference(*wants)
                    if not error <= TOLERANCE[dtype]:
                        raise RuntimeError(f"{program.part}: sparse differs by {error} from dense")
                base: dict[str, Any] | None = None
                for devices in counts:
                    measured = [
                        measure(p, devices, want, TOLERANCE[dtype])
                        for p, want in zip((program, dense), wants, strict=True)
                    ]
                    row = _row(program, pattern, dtype, devices, *measured)
                    base = base or row
                    row |= compare(row, base)
                    rows.append(row)
                    write(rows)
                    print(
                        f"{row['op']} {row['direction']} {pattern} {dtype} {row['tokens']} tokens on {devices}: "
                        f"{row['time_us']:.1f} us, dense {row['dense_us']:.1f} "
                        f"({row['dense_us'] / row['time_us']:.2f}x), efficiency {row['efficiency']:.2f}, ratio kept "
                        f"{row['ratio_kept']:.2f}",
                        flush=True,
                    )
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.multi_device", description="Dense against N:M on several devices of one machine."
    )
    parser.add_argument("--devices", help="numbers of devices, the first is compared with: by default 1 and all")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to see that everything runs")
    parser.add_argument("--tokens", help="only these numbers of tokens: 1,16")
    parser.add_argument("--patterns", help="only these patterns: 16:32,8:32/1x128")
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--revision", default=run.revision())
    options = parser.parse_args(arguments)
    present = len(jax.devices())
    counts = sorted({1, present}) if options.devices is None else [int(n) for n in options.devices.split(",")]
    if max(counts) > present:
        parser.error(f"{max(counts)} devices were asked for, {present} are present")
    sizes = TINY if options.tiny else Sizes()
    if options.tokens:
        sizes = dataclasses.replace(sizes, tokens=tuple(int(t) for t in options.tokens.split(",")))
    if options.patterns:
        sizes = dataclasses.replace(sizes, patterns=tuple(options.patterns.split(",")))
    name = f"{datetime.date.today()}-{options.revision}-multi-device.json"
    out = options.out or run.RESULTS / run.device_name() / name
    out.parent.mkdir(parents=True, exist_ok=True)
    meta = run.metadata("multi-device", options.revision) | {"devices": counts}

    def write(rows: list[dict[str, Any]]) -> None:
        out.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n", encoding="utf-8")

    run_all(sizes, counts, write)
    print(f"wrote {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
