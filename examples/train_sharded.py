"""Trains a sparse transformer block on every device present: data parallel and tensor parallel, one process or many.

    python examples/train_sharded.py                                  # all devices of this machine
    python examples/train_sharded.py --host-devices 8 --mesh 2x4      # eight CPU devices
    for i in 0 1; do                                                  # two processes of four CPU devices each
        python examples/train_sharded.py --host-devices 4 --mesh 2x4 \\
            --coordinator 127.0.0.1:9876 --processes 2 --process $i &
    done

The task is the next token of sequences that a linear congruence makes. Weights live split over the mesh from their
first moment on: query, key, value and up by columns (heads), output and down by rows (whole windows), so a block takes
two all-reduces of activations forward and two backward; the batch is split over "data", where gradients are added up.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_nmsparse as nms
from jax_nmsparse import placement, sharded_checkpoint
from jax_nmsparse.collectives import collectives

PLACES = {
    "embedding": P(),
    "query": P(None, "tensor"),
    "key": P(None, "tensor"),
    "value": P(None, "tensor"),
    "output": P("tensor"),
    "up": P(None, "tensor"),
    "down": P("tensor"),
}
"""How each weight is split, as if it were dense."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the model and of the task.

    Attributes:
      pattern: Of every projection.
      width, hidden, heads: Of the block. width and hidden must give every device of "tensor" whole windows.
      vocabulary, batch, length: Of the task.
      steps, learning_rate, seed: Of the training.
    """

    pattern: str = "8:32"
    width: int = 128
    hidden: int = 512
    heads: int = 8
    vocabulary: int = 64
    batch: int = 16
    length: int = 16
    steps: int = 20
    learning_rate: float = 1e-2
    seed: int = 0


def make_mesh(text: str | None, devices: Sequence[Any]) -> Mesh:
    """A mesh ("data", "tensor"): "2x4", or by default the tensor axis as long as it can be, up to 8."""
    if text is None:
        tensor = math.gcd(len(devices), 8)
        data = len(devices) // tensor
    else:
        data, tensor = map(int, text.split("x"))
    return jax.make_mesh((data, tensor), ("data", "tensor"), devices=devices, axis_types=(AxisType.Auto,) * 2)


def init(config: Config, key: jax.Array) -> dict[str, Any]:
    """Parameters: the embedding and the sparse projections, pruned from a normal draw."""
    width, hidden = config.width, config.hidden
    keys = jax.random.split(key, len(PLACES))
    shapes = dict.fromkeys(PLACES, (width, width))
    shapes |= {"embedding": (config.vocabulary, width), "up": (width, hidden), "down": (hidden, width)}
    draws = {
        name: jax.random.normal(key, shapes[name]) / math.sqrt(shapes[name][0])
        for name, key in zip(PLACES, keys, strict=True)
    }
    return {name: draw if name == "embedding" else nms.prune(draw, config.pattern) for name, draw in draws.items()}


def _norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6)


def forward(params: dict[str, Any], tokens: jax.Array, config: Config) -> jax.Array:
    """Logits ``[batch, length, vocabulary]`` of one pre-norm block between an embedding and its transpose."""
    batch, length = tokens.shape
    x = params["embedding"][tokens] * math.sqrt(config.width)
    h = _norm(x)
    query, key, value = (
        (h @ params[name]).reshape(batch, length, config.heads, -1) for name in ("query", "key", "value")
    )
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(query.shape[-1])
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
    attended = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value)
    x = x + attended.reshape(batch, length, config.width) @ params["output"]
    x = x + nms.spmm(_norm(x), params["up"], activation="gelu_tanh") @ params["down"]
    return _norm(x) @ params["embedding"].T


def sequences(config: Config, step: int) -> np.ndarray:
    """The batch of a step, ``[batch, length + 1]``: x -> (5 x + 3) mod vocabulary from a random start."""
    start = np.random.default_rng([config.seed, step]).integers(0, config.vocabulary, config.batch)
    tokens = [start]
    for _ in range(config.length):
        tokens.append((5 * tokens[-1] + 3) % config.vocabulary)
    return np.stack(tokens, 1).astype(np.int32)


def _trained(params: Any) -> Any:
    """What the optimiser sees: values in place of weights, so that no mask is a parameter."""
    return {name: p.values if isinstance(p, nms.NMSparse) else p for name, p in params.items()}


def _with_trained(params: Any, trained: Any) -> Any:
    return {
        name: p.with_values(trained[name]) if isinstance(p, nms.NMSparse) else trained[name]
        for name, p in params.items()
    }


def make_step(config: Config, optimizer: optax.GradientTransformation):
    """(params, state, tokens) -> (params, state, loss)."""

    def loss(trained: Any, params: Any, tokens: jax.Array) -> jax.Array:
        logits = forward(_with_trained(params, trained), tokens[:, :-1], config)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def step(params: Any, state: Any, tokens: jax.Array):
        trained = _trained(params)
        value, gradients = jax.value_and_grad(loss)(trained, params, tokens)
        updates, state = optimizer.update(gradients, state, trained)
        return _with_trained(params, optax.apply_updates(trained, updates)), state, value

    return step


def train(config: Config, mesh: Mesh, checkpoint: pathlib.Path | None = None) -> dict[str, Any]:
    """Trains on a mesh.

    Returns:
      losses: Of every step.
      norms: Norm of every trained parameter at the end.
      collectives: Number and bytes of every kind in one step's program.
      seconds_per_step: The median, without compilation.
    """
    places = {name: NamedSharding(mesh, spec) for name, spec in PLACES.items()}
    make = functools.partial(init, config)
    shardings = placement.shardings(jax.eval_shape(make, jax.random.key(config.seed)), places)
    params = jax.jit(make, out_shardings=shardings)(jax.random.key(config.seed))
    optimizer = optax.adam(config.learning_rate)
    state = jax.jit(optimizer.init)(_trained(params))
    batches = NamedSharding(mesh, P("data"))
    shape = (config.batch, config.length + 1)

    def batch(step: int) -> jax.Array:
        tokens = sequences(config, step)
        return jax.make_array_from_callback(shape, batches, lambda index: tokens[index])

    # Parameters come back where they were, whatever the optimiser's state is split by.
    step = jax.jit(make_step(config, optimizer), out_shardings=(shardings, None, None), donate_argnums=(0, 1))
    compiled = step.lower(params, state, batch(0)).compile()
    losses, seconds = [], []
    for i in range(config.steps):
        tokens, start = batch(i), time.perf_counter()
        params, state, loss = compiled(params, state, tokens)
        losses.append(float(loss))
        seconds.append(time.perf_counter() - start)
    if checkpoint is not None:
        sharded_checkpoint.save(checkpoint, params)
    norms = jax.jit(lambda tree: jax.tree.map(jnp.linalg.norm, tree), out_shardings=NamedSharding(mesh, P()))(
        {name: values.ravel() for name, values in _trained(params).items()}
    )
    moved: dict[str, dict[str, int]] = {}
    for c in collectives(compiled):
        kind = moved.setdefault(c.kind, {"number": 0, "bytes": 0})
        kind["number"] += 1
        kind["bytes"] += c.bytes
    return {
        "mesh": dict(mesh.shape),
        "processes": jax.process_count(),
        "losses": losses,
        "norms": {name: float(norm) for name, norm in norms.items()},
        "collectives": moved,
        "seconds_per_step": float(np.median(seconds)),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", help="DATAxTENSOR, for example 2x4")
    parser.add_argument("--host-devices", type=int, help="number of CPU devices to make of this process")
    parser.add_argument("--coordinator", help="address and port of process 0")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--process", type=int, default=0)
    parser.add_argument("--checkpoint", type=pathlib.Path, help="directory to write the parameters to")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    for field in dataclasses.fields(Config):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    options = parser.parse_args(arguments)
    if options.host_devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", options.host_devices)
    if options.coordinator:
        jax.distributed.initialize(options.coordinator, options.processes, options.process)
    config = Config(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Config)})
    result = train(config, make_mesh(options.mesh, jax.devices()), options.checkpoint)
    if jax.process_index() == 0:
        for i, loss in enumerate(result["losses"]):
            print(f"step {i:3d}  loss {loss:.4f}")
        for kind, moved in result["collectives"].items():
            print(f"{moved['number']} x {kind}, {moved['bytes']} bytes in a step")
        print(f"{1e3 * result['seconds_per_step']:.2f} ms a step on {result['mesh']}")
        if options.out:
            options.out.write_text(json.dumps(result, indent=1), encoding="utf-8")
    if options.coordinator:
        multihost_utils.sync_global_devices("done")
        jax.distributed.shutdown()


if __name__ == "__main__":
    main()
