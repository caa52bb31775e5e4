"""Trains a small classifier of handwritten digits with N:M sparse weights from scratch, beside a dense one.

    python -m pip install 'jax_nmsparse[test]'          # scikit-learn has the digits
    python examples/train_digits.py [--out FILE]

All layers train with SR-STE while a cubic schedule takes units away; then the dense parameters convert to
`NMSparseDense`, whose accuracy is what the table shows. Several networks train at once (`jax.vmap` over seeds), since
one accuracy on 450 test digits is uncertain by about a per cent.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import sys
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import sklearn.datasets
import sklearn.model_selection

import jax_nmsparse as nms
from jax_nmsparse.linen import MASK_COLLECTION, NMSparseDense

PATTERNS = "2:4,8:32,8:32/1x4"
HIDDEN = (256, 256)
CLASSES = 10
_BATCH = 64
_DECAY = 2e-3
_LEARNING_RATE = 5e-3


def digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Images float32 ``[count, 64]`` in [0, 1] and labels: (train images, train labels, test images, test labels)."""
    data: Any = sklearn.datasets.load_digits()
    images, labels = (data.data / 16).astype(np.float32), data.target.astype(np.int32)
    split: Any = sklearn.model_selection.train_test_split(
        images, labels, test_size=0.25, random_state=0, stratify=labels
    )
    train_images, test_images, train_labels, test_labels = split
    return train_images, train_labels, test_images, test_labels


class Classifier(nn.Module):
    """An MLP; its layers are `nn.Dense`, or `NMSparseDense` with a pattern."""

    pattern: nms.NMPattern | None = None
    hidden: tuple[int, ...] = HIDDEN

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for i, features in enumerate((*self.hidden, CLASSES)):
            x = nn.relu(x) if i else x
            if self.pattern is None:
                x = nn.Dense(features, name=f"layer_{i}")(x)
            else:
                x = NMSparseDense(features, pattern=self.pattern, name=f"layer_{i}")(x)
        return x


def train(
    model: Any,
    images: np.ndarray,
    labels: np.ndarray,
    pattern: nms.NMPattern | None,
    key: jax.Array,
    epochs: int,
) -> tuple[Any, jax.Array]:
    """Trains the dense parameters of one classifier; runs under jit and vmap over key.

    Args:
      model: A dense `Classifier`.
      images: float32 ``[count, 64]``.
      labels: int32 ``[count]``.
      pattern: None, or that which the kernels shall have at the end.
      key: Of initial values and the order of the images.
      epochs: Passes over the images.

    Returns:
      The parameters, and the mean over the layers of the flip rate of the masks in every epoch: float32 ``[epochs]``.
    """
    rules = {} if pattern is None else {"kernel": pattern}
    steps = len(images) // _BATCH
    progress = nms.training.cubic_schedule(0, epochs * steps // 2)
    optimiser = optax.chain(
        nms.training.sr_ste_decay(rules, _DECAY, progress=progress),
        optax.adam(optax.cosine_decay_schedule(_LEARNING_RATE, epochs * steps)),
    )

    def loss(params, step, rows):
        masked = nms.training.masked_forward(params, rules, progress=progress(step))
        logits = model.apply({"params": masked}, jnp.asarray(images)[rows])
        return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.asarray(labels)[rows]).mean()

    def update(state, rows):
        params, optimiser_state, step = state
        updates, optimiser_state = optimiser.update(jax.grad(loss)(params, step, rows), optimiser_state, params)
        return (optax.apply_updates(params, updates), optimiser_state, step + 1), None

    def epoch(state, key):
        order = jax.random.permutation(key, len(images))[: steps * _BATCH].reshape(steps, _BATCH)
        before = state[0]
        state, _ = jax.lax.scan(update, state, order)
        statistics = nms.training.mask_statistics(state[0], rules, before)
        return state, jnp.mean(jnp.array([s["flip_rate"] for s in statistics.values()] or [0.0]))

    start, order = jax.random.split(key)
    params = model.init(start, jnp.asarray(images[:1]))["params"]
    state = (params, optimiser.init(params), jnp.zeros((), jnp.int32))
    (params, _, _), flips = jax.lax.scan(epoch, state, jax.random.split(order, epochs))
    return params, flips


def convert(params: Any, pattern: nms.NMPattern) -> dict[str, Any]:
    """Variables of ``Classifier(pattern)`` from trained dense parameters."""
    layers = {name: NMSparseDense.from_dense(layer, pattern) for name, layer in params.items()}
    return {c: {name: layer[c] for name, layer in layers.items()} for c in ("params", MASK_COLLECTION)}


def accuracy(model: Any, variables: Any, images: np.ndarray, labels: np.ndarray) -> float:
    """The share of right answers."""
    return float((jnp.argmax(model.apply(variables, jnp.asarray(images)), axis=-1) == labels).mean())


def run(
    patterns: list[nms.NMPattern], seeds: int, epochs: int, hidden: tuple[int, ...] = HIDDEN
) -> dict[str, dict[str, Any]]:
    """Trains dense and sparse classifiers.

    Returns:
      Name ("dense" or the pattern) -> ``accuracy``, one for every seed, as the converted network reaches on the test
      digits; and ``flip_rate``, for every epoch, mean over the seeds.
    """
    train_images, train_labels, images, labels = digits()
    results = {}
    for pattern in (None, *patterns):
        keys = jax.random.split(jax.random.key(0), seeds)
        trained, flips = jax.jit(
            jax.vmap(lambda key, p=pattern: train(Classifier(None, hidden), train_images, train_labels, p, key, epochs))
        )(keys)
        reached = []
        for i in range(seeds):
            params = jax.tree.map(lambda leaf, i=i: leaf[i], trained)
            variables = {"params": params} if pattern is None else convert(params, pattern)
            reached.append(accuracy(Classifier(pattern, hidden), variables, images, labels))
        name = "dense" if pattern is None else str(pattern)
        results[name] = {"accuracy": reached, "flip_rate": np.asarray(flips).mean(0).tolist()}
    return results


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--patterns", default=PATTERNS, help=f"separated by commas ({PATTERNS})")
    parser.add_argument("--seeds", type=int, default=5, help="networks of each kind (5)")
    parser.add_argument("--epochs", type=int, default=40, help="passes over the training digits (40)")
    parser.add_argument("--out", type=pathlib.Path, help="write accuracies and flip rates as JSON")
    options = parser.parse_args(arguments)
    try:
        patterns = [nms.NMPattern.parse(text) for text in options.patterns.split(",")]
    except ValueError as error:
        parser.error(str(error))
    results = run(patterns, options.seeds, options.epochs)
    dense = np.mean(results["dense"]["accuracy"])
    print(f"{'weights':10s} {'accuracy':>9s} {'range':>16s} {'to dense':>9s}   flip rate: first, middle, last epoch")
    for name, result in results.items():
        low, mean, high = np.min(result["accuracy"]), np.mean(result["accuracy"]), np.max(result["accuracy"])
        flips = result["flip_rate"]
        some = ", ".join(f"{flips[i]:.4f}" for i in (0, len(flips) // 2, -1)) if name != "dense" else ""
        print(f"{name:10s} {mean:9.2%} {low:8.2%}-{high:.2%} {mean - dense:+9.2%}   {some}")
    if options.out:
        meta = {
            "suite": "digits",
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "versions": {"jax": jax.__version__, "python": sys.version.split()[0]},
            "network": f"MLP of {'-'.join(map(str, (64, *HIDDEN, CLASSES)))}",
            "epochs": options.epochs,
        }
        rows = [{"name": name, **result} for name, result in results.items()]
        options.out.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
