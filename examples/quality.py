"""What N:M pruning costs a pretrained sentence encoder, by pattern and by method, without any retraining.

    python examples/quality.py                     # prints a table, writes build/quality/quality.{json,png}

Every projection of MiniLM is pruned by magnitude, by Wanda and by SparseGPT. Wanda and SparseGPT are calibrated on half
of the sentences of english.py, on activations of the dense model; the embeddings of the other half are compared with
those of the dense model. The numbers depend on the weights alone, not on which kernel multiplies by them, so the pruned
weights run in the dense encoder, which compiles once.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import pathlib
import subprocess
import sys
import time
from typing import Any

import english
import jax
import jax.numpy as jnp
import minilm
import numpy as np
import quality_report as report
import rich.console
import rich.progress
import sparse_minilm

import jax_nmsparse as nms

PATTERNS = "2:4,4:8,8:16,16:32,8:32,16:32/1x4,16:32/1x32,16:32/1x64,16:32/4x4"
METHODS = ("magnitude", "wanda", "sparsegpt")
NEIGHBOURS = 10
_BATCH = 32


def calibrate(model: minilm.Model, sentences: list[str]) -> dict[str, nms.pruning.Statistics]:
    """Statistics of what every projection of the dense encoder reads; padding does not count."""
    encoder = minilm.Encoder(model.config)
    return nms.pruning.calibrate(
        lambda variables, batch: encoder.apply(variables, *batch),
        {"params": model.params},
        minilm.batches(model.tokenizer, sentences, math.gcd(len(sentences), _BATCH)),
        where=lambda batch: batch[1] > 0,
    )


def prune_all(
    params: dict[str, Any], pattern: nms.NMPattern, method: str, statistics: dict[str, nms.pruning.Statistics]
) -> dict[str, Any]:
    """Parameters of the dense encoder with every kernel of a projection pruned."""
    return {
        name: {**layer, "kernel": _prune(layer["kernel"], pattern, method, statistics[name])}
        if minilm.is_projection(name)
        else layer
        for name, layer in params.items()
    }


def _prune(kernel: jax.Array, pattern: nms.NMPattern, method: str, inputs: nms.pruning.Statistics) -> jax.Array:
    w = nms.prune(kernel, pattern, method=method, inputs=None if method == "magnitude" else inputs)
    return w.todense()


@jax.jit
def output_error(kernel: jax.Array, pruned: jax.Array, gram: jax.Array) -> jax.Array:
    """``||x (W - W')||^2 / ||x W||^2`` from ``x^T x``."""

    def squared(w):
        return jnp.sum(w * jnp.matmul(gram, w, precision="highest"))

    return squared(kernel - pruned) / squared(kernel)


def neighbours(embeddings: np.ndarray, count: int) -> np.ndarray:
    """bool ``[sentences, sentences]``: which other sentences are among the nearest of each."""
    cosine = embeddings @ embeddings.T
    np.fill_diagonal(cosine, -np.inf)
    near = np.zeros(cosine.shape, bool)
    np.put_along_axis(near, np.argsort(-cosine, axis=1)[:, :count], True, axis=1)
    return near


def measure(
    model: minilm.Model,
    patterns: list[nms.NMPattern],
    sentences: list[str],
    console: rich.console.Console | None = None,
) -> dict[str, Any]:
    """Prunes by every pattern and method, and compares embeddings.

    Args:
      model: The dense model.
      patterns: Of all projections.
      sentences: Those of even index calibrate, those of odd index are measured.
      console: Where the progress bar goes.

    Returns:
      ``{"meta": ..., "rows": [...]}`` with one row for every pattern and method: ``cosine_mean`` and ``cosine_min``
      with the dense embedding, ``nearest`` (share of sentences with the same nearest other sentence), ``neighbours``
      (share of the ten nearest that are the same), ``output_error`` (mean over the projections, on held-out sentences,
      of the squared error of the product relative to its square) and ``prune_seconds`` (all projections).
    """
    calibration, held_out = sentences[::2], sentences[1::2]
    encode = jax.jit(minilm.Encoder(model.config).apply)
    batches = minilm.batches(model.tokenizer, held_out, _BATCH)

    def embed(params):
        return np.concatenate([np.asarray(encode({"params": params}, *batch)) for batch in batches])[: len(held_out)]

    rows = []
    with rich.progress.Progress(console=console, transient=True) as progress:
        work = progress.add_task("calibrating", total=2 + len(patterns) * len(METHODS))
        statistics = calibrate(model, calibration)
        progress.advance(work)
        unseen = calibrate(model, held_out)
        dense = embed(model.params)
        near = neighbours(dense, NEIGHBOURS)
        progress.advance(work)
        for pattern in patterns:
            for method in METHODS:
                progress.update(work, description=f"{pattern} by {method}")
                start = time.perf_counter()
                params = jax.block_until_ready(prune_all(model.params, pattern, method, statistics))
                seconds = time.perf_counter() - start
                pruned = embed(params)
                errors = [
                    float(output_error(model.params[name]["kernel"], params[name]["kernel"], inputs.gram))
                    for name, inputs in unseen.items()
                ]
                rows.append(
                    {
                        "pattern": str(pattern),
                        "method": method,
                        **sparse_minilm.agreement(dense, pruned),
                        "neighbours": float((near & neighbours(pruned, NEIGHBOURS)).sum() / near.sum()),
                        "output_error": float(np.mean(errors)),
                        "prune_seconds": seconds,
                    }
                )
                progress.advance(work)
    return {
        "meta": {
            "suite": "quality",
            "model": model.name,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "revision": _revision(),
            "device": sparse_minilm._device_name(),
            "versions": {"jax": jax.__version__, "python": sys.version.split()[0]},
            "calibration": {
                "sentences": len(calibration),
                "tokens": int(next(iter(statistics.values())).tokens),
            },
            "held_out": {"sentences": len(held_out), "tokens": int(next(iter(unseen.values())).tokens)},
        },
        "rows": rows,
    }


def _revision() -> str:
    command = ["git", "-C", str(pathlib.Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", metavar="PATH", help="folder of a MiniLM or BERT model (default: the package's)")
    parser.add_argument("--patterns", type=sparse_minilm._pattern_list, default=PATTERNS, help="separated by commas")
    parser.add_argument("--sentences", type=int, default=420, metavar="N", help="half of them calibrate (420)")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("build/quality"), metavar="DIR")
    options = parser.parse_args(arguments)
    console = rich.console.Console()
    try:
        sentences = english.sentences(options.sentences)
        results = measure(minilm.load(options.model), options.patterns, sentences, console)
    except (OSError, ValueError) as error:
        print(f"quality: {error}", file=sys.stderr)
        return 1
    report.show(results, console)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "quality.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    report.plot(results, options.output / "quality.png")
    console.print(f"written: {options.output}/quality.json, {options.output}/quality.png", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
