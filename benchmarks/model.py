"""A whole 8B decoder, sparse beside dense in one run: ``python -m benchmarks.model [--out FILE] [--tiny]``.

Llama 3.1 8B's shapes with random bfloat16 weights, drawn on the device: decoding one token of 1 and of 16 sequences on
a context of 512 tokens, and reading a prompt of 4096 tokens. The decoder is examples/decoder.py with unrolled layers,
as generate.py runs it, the head and the attention included.

A decode program scans over `STEPS` tokens, each the argmax of the logits before, with a donated cache. The time of a
step is the difference between three calls of it and one, over twice its steps: dispatching and waiting drop out. All
programs are compiled ahead, on threads, from shapes alone. Weights are drawn when they are needed, and one model is
alive at a time.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import json
import math
import pathlib
import re
import statistics
import sys
import time
import zlib
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

import jax_nmsparse as nms
from benchmarks import run, timing
from jax_nmsparse import native
from jax_nmsparse.explanation import DEVICES
from jax_nmsparse.nnx import NMSparseLinear

sys.path.append(str(pathlib.Path(__file__).parents[1] / "examples"))

import decoder_weights
from decoder import Cache, Config, Decoder, Layer, RopeScaling, linear

LLAMA_8B = Config(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    rope_theta=500000.0,
    rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192),
)
TINY = Config(512, 128, 256, 2, 4, 2, 32)
DTYPE = jnp.bfloat16
STEPS = 16
_REPEATS = 5


@dataclasses.dataclass(frozen=True)
class Case:
    """One row to measure.

    Attributes:
      phase: "decode" or "prefill".
      pattern: Of the projections of the layers.
      head: Whether the head has the pattern too; otherwise it is dense.
      batch: Sequences.
      context: Tokens in the cache before the first step, for prefill those of the prompt.
      scan: Whether the layers are scanned; the dense model beside it is always unrolled.
    """

    phase: str
    pattern: str
    head: bool
    batch: int
    context: int
    scan: bool = False

    @property
    def tokens(self) -> int:
        """Tokens that every projection sees at once."""
        return self.batch if self.phase == "decode" else self.batch * self.context

    @property
    def model(self) -> Model:
        return Model(self.pattern, self.head, self.scan)


CASES = (
    *(Case("decode", pattern, False, batch, 512) for pattern in ("16:32", "8:32", "2:4") for batch in (1, 16)),
    Case("decode", "8:32/1x128", False, 16, 512),
    *(Case("decode", pattern, True, 1, 512) for pattern in ("16:32", "8:32")),
    Case("decode", "8:32", False, 1, 512, scan=True),
    Case("prefill", "8:32/1x128", False, 1, 4096),
)
TINY_CASES = (
    Case("decode", "16:32", False, 2, 24),
    Case("decode", "8:32", True, 2, 24, scan=True),
    Case("prefill", "8:32/1x64", False, 1, 32),
)


class Model(NamedTuple):
    """What makes one set of parameters."""

    pattern: str | None = None
    head: bool = False
    scan: bool = False

    def draw(self, config: Config) -> Decoder:
        return Decoder(config, Drawn(self.pattern, self.head), self.scan)


class Drawn:
    """A `decoder.Source` of random parameters, sparse where there is a pattern."""

    def __init__(self, pattern: str | None, head: bool) -> None:
        self._pattern = None if pattern is None else nms.NMPattern.parse(pattern)
        self._head = head

    def projection(self, path: str, in_features: int, out_features: int) -> nnx.Module:
        key, shape = jax.random.key(zlib.crc32(path.encode())), (in_features, out_features)
        if self._pattern is None or (path == "head" and not self._head):
            return linear(_normal(key, shape, 1 / math.sqrt(in_features)))
        w = run.random_weight(key, shape, self._pattern, jnp.dtype(DTYPE).name)
        return NMSparseLinear.from_weight(w, dtype=DTYPE, param_dtype=DTYPE, implementation=implementation())

    def array(self, path: str, *shape: int) -> jax.Array:
        return _normal(jax.random.key(0), shape, 1.0) if path == "embedding" else jnp.ones(shape, DTYPE)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key: jax.Array, shape: tuple[int, ...], scale: float) -> jax.Array:
    return jax.random.normal(key, shape, DTYPE) * jnp.asarray(scale, DTYPE)


def implementation() -> str:
    """That of the sparse products: the native kernels, which never fall back, wherever they are built."""
    name = "cuda" if jax.default_backend() == "gpu" else jax.default_backend()
    return name if name in native.MODULES and native.MODULES[name].loaded else "xla"


# Programs: each takes (decoder, tokens, cache) and returns what the next call takes as tokens and cache.


def _decode(decoder: Decoder, token: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
    context = cache.position

    def step(carry, _):
        logits, cache = decoder.decode(*carry)
        return (jnp.argmax(logits, axis=-1).astype(jnp.int32), cache), None

    (token, cache), _ = lax.scan(step, (token, cache), None, length=STEPS)
    return token, dataclasses.replace(cache, position=context)


def _prefill(decoder: Decoder, tokens: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
    logits, cache = decoder.prefill(tokens, cache)
    # The next prompt depends on the result, so that nothing is left out.
    return (tokens + jnp.argmax(logits).astype(jnp.int32)) % decoder.config.vocab_size, cache


def _inputs(config: Config, case: Case, decoder: Decoder) -> tuple[jax.Array, Cache]:
    key = jax.random.key(1)
    if case.phase == "prefill":
        tokens = jax.random.randint(key, (case.batch, case.context), 0, config.vocab_size, jnp.int32)
        return tokens, decoder.empty_cache(case.batch, case.context)
    # Room for the steps, in whole tiles.
    cache = decoder.empty_cache(case.batch, 64 * -(-(case.context + STEPS) // 64))
    fill = functools.partial(jax.tree.map, lambda buffer: _normal(key, buffer.shape, 1.0))
    token = jax.random.randint(key, (case.batch,), 0, config.vocab_size, jnp.int32)
    return token, Cache(fill(cache.keys), fill(cache.values), jnp.asarray(case.context, jnp.int32), None)


def _first_layer(decoder: Decoder) -> Any:
    layers = decoder.layers
    return jax.tree.map(lambda leaf: leaf[0], layers) if isinstance(layers, Layer) else layers[0]


def _error(decoder: Decoder, x: jax.Array) -> jax.Array:
    """The largest ||y - reference|| / ||reference|| of the sparse projections of a layer, in float32."""
    errors = []
    for name in decoder.config.projections():
        layer = getattr(_first_layer(decoder), name)
        inputs = jnp.resize(x, (*x.shape[:-1], layer.in_features)).astype(DTYPE)
        exact = functools.partial(jnp.dot, precision="highest")
        want = exact(inputs.astype(jnp.float32), layer.weight.todense().astype(jnp.float32))
        errors.append(jnp.linalg.norm(layer(inputs).astype(jnp.float32) - want) / jnp.linalg.norm(want))
    return jnp.stack(errors).max()


class Program:
    """One phase of one model, compiled on a thread from its construction on."""

    def __init__(self, config: Config, case: Case, model: Model, dump: pathlib.Path | None = None) -> None:
        self.case, self._config, self._dump = case, config, dump
        decoder = jax.eval_shape(lambda: model.draw(config))
        inputs = jax.eval_shape(lambda decoder: _inputs(config, case, decoder), decoder)
        function = _decode if case.phase == "decode" else _prefill
        self._compiled = timing.compile_later(function, decoder, *inputs, donate_argnums=(1, 2))
        self._error: Future | None = None
        if model.pattern is not None:
            x = jax.ShapeDtypeStruct((case.tokens, config.intermediate_size), jnp.float32)
            self._error = timing.compile_later(_error, decoder, x)

    def wait(self) -> None:
        """Until everything is compiled: XLA tries out kernels on the device while it compiles."""
        self._compiled.result()
        if self._error is not None:
            self._error.result()

    def error(self, decoder: Decoder) -> float:
        if self._error is None:
            return 0.0
        shape = (self.case.tokens, self._config.intermediate_size)
        return float(self._error.result()(decoder, jax.random.normal(jax.random.key(2), shape)))

    def measure(self, decoder: Decoder) -> timing.Timing:
        """Time of one step, or of one prompt."""
        compiled = self._compiled.result()
        if self._dump is not None:
            model = "-".join(map(str, self.case.model)) if self._error else "dense"
            name = re.sub(r"\W", "-", f"{self.case.phase}-{self.case.batch}-{model}")
            (self._dump / f"{name}.txt").write_text(compiled.as_text())
        state = _inputs(self._config, self.case, decoder)
        steps = STEPS if self.case.phase == "decode" else 1

        def once(calls: int) -> float:
            nonlocal state
            jax.block_until_ready(state)
            start = time.perf_counter()
            for _ in range(calls):
                state = compiled(decoder, *state)
            jax.block_until_ready(state)
            return 1e6 * (time.perf_counter() - start)

        once(3)
        times = [(once(3) - once(1)) / (2 * steps) for _ in range(_REPEATS)]
        median = statistics.median(times)
        quartiles = statistics.quantiles(times, n=4)
        return timing.Timing(round(median, 2), round((quartiles[2] - quartiles[0]) / max(median, 1e-9), 4))


def _kept(module: Any) -> int:
    """Elements of a projection that are multiplied."""
    return (module.weight.values if isinstance(module, NMSparseLinear) else module.kernel[...]).size


def floor_us(config: Config, case: Case, decoder: Decoder) -> float | None:
    """Bytes over bandwidth, or FLOPs over rate, of a step; None where the device's ceilings are not known."""
    ceilings = DEVICES.get(jax.devices()[0].device_kind)
    if ceilings is None:
        return None
    size = jnp.dtype(DTYPE).itemsize
    embedding = config.vocab_size * config.hidden_size * size
    cached = 2 * case.batch * case.context * config.num_key_value_heads * config.head_dim * config.num_hidden_layers
    moved = decoder_weights.nbytes(decoder) - embedding + cached * size
    pairs = case.batch * case.context if case.phase == "decode" else case.batch * case.context**2 / 2
    attention = 4 * pairs * config.num_attention_heads * config.head_dim * config.num_hidden_layers
    layers = [decoder.layers] if isinstance(decoder.layers, Layer) else decoder.layers
    kept = sum(_kept(getattr(layer, name)) for layer in layers for name in config.projections())
    # Only the last token of a prompt goes through the head.
    flops = 2 * case.tokens * kept + 2 * case.batch * _kept(decoder.head) + attention
    return 1e6 * max(moved / ceilings.bandwidth, flops / ceilings.flops[jnp.dtype(DTYPE).name])


def row(config: Config, case: Case, decoder: Decoder, sparse: timing.Timing, dense: tuple, error: float) -> dict:
    """One row of the schema that all suites share, and what is said of whole models."""
    dense_time, dense_bytes = dense
    shape = (case.tokens, config.hidden_size)
    choice = nms.explain(
        jax.ShapeDtypeStruct(shape, DTYPE), _first_layer(decoder).gate_up.weight, implementation=implementation()
    ).choice
    pattern = nms.NMPattern.parse(case.pattern)
    floor = floor_us(config, case, decoder)
    return {
        "op": "model",
        "phase": case.phase,
        "pattern": f"{pattern.n}:{pattern.m}",
        "block": "x".join(map(str, pattern.block)),
        "dtype": jnp.dtype(DTYPE).name,
        "precision": "default",
        "tokens": case.tokens,
        "batch": case.batch,
        "context": case.context,
        "head": "sparse" if case.head else "dense",
        "layers": "scanned" if case.scan else "unrolled",
        "in_features": config.hidden_size,
        "out_features": config.intermediate_size,
        "implementation": choice.implementation,
        "kernel": choice.name,
        "time_us": sparse.time_us,
        "spread": sparse.spread,
        "dense_us": dense_time.time_us,
        "dense_spread": dense_time.spread,
        "tokens_per_s": round(1e6 * case.tokens / sparse.time_us, 1),
        "dense_tokens_per_s": round(1e6 * case.tokens / dense_time.time_us, 1),
        "bytes": decoder_weights.nbytes(decoder),
        "dense_bytes": dense_bytes,
        "floor_us": None if floor is None else round(floor, 3),
        "rel_err": float(f"{error:.3g}"),
        "peers": {},
    }


def measure(config: Config, wanted: list[Case], dump: pathlib.Path | None = None) -> list[dict]:
    """The rows of the cases; dense products of the same phase, batch and context are timed once, first."""
    dense_cases = {(c.phase, c.batch, c.context): c for c in wanted}
    dense = {key: Program(config, case, Model(), dump) for key, case in dense_cases.items()}
    sparse = {case: Program(config, case, case.model, dump) for case in wanted}
    decoder = Model().draw(config)
    for program in (*dense.values(), *sparse.values()):
        program.wait()
    dense_times = {key: (program.measure(decoder), decoder_weights.nbytes(decoder)) for key, program in dense.items()}
    for (phase, batch, context), (result, size) in dense_times.items():
        print(f"dense {phase} batch {batch} context {context}: {result.time_us:.0f} us, {size / 1e9:.2f} GB")
    rows = {}
    for model in dict.fromkeys(case.model for case in wanted):
        del decoder
        decoder = model.draw(config)
        for case in (case for case in wanted if case.model == model):
            error = sparse[case].error(decoder)
            if not error < 2e-2:
                raise AssertionError(f"{case}: relative error {error}")
            result = sparse[case].measure(decoder)
            rows[case] = row(config, case, decoder, result, dense_times[case.phase, case.batch, case.context], error)
            floor = rows[case]["floor_us"]
            if floor is not None and result.time_us < 0.8 * floor:
                raise AssertionError(f"{case}: {result.time_us} us, less than the floor of {floor} us")
            ratio = rows[case]["dense_us"] / result.time_us
            print(f"{case}: {result.time_us:.0f} us ({ratio:.2f}x), floor {floor}", flush=True)
    return [rows[case] for case in wanted]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.model", description="Times a whole decoder.")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file (default: under results/<device>)")
    parser.add_argument("--tiny", action="store_true", help="a decoder of two small layers, for any machine")
    parser.add_argument("--match", default="", help="only cases whose description matches this regular expression")
    parser.add_argument("--dump", type=pathlib.Path, help="a folder for the optimised HLO of every program")
    parser.add_argument("--revision", default=run.revision())
    options = parser.parse_args(arguments)
    if options.dump is not None:
        options.dump.mkdir(parents=True, exist_ok=True)
    config = TINY if options.tiny else LLAMA_8B
    meta = run.metadata("model", options.revision)
    meta |= {
        "seed": "crc32 of the path of each projection",
        "timing": f"one jitted scan of {STEPS} tokens with a donated cache, difference of three calls and one, median "
        f"of {_REPEATS}; a prompt is one call",
        "config": dataclasses.asdict(config),
    }
    rows = measure(
        config, [c for c in (TINY_CASES if options.tiny else CASES) if re.search(options.match, str(c))], options.dump
    )
    name = f"{datetime.date.today()}-{options.revision}-{'tiny' if options.tiny else 'model'}.json"
    out = options.out or run.RESULTS / run.device_name() / name
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")
    print(f"wrote {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
