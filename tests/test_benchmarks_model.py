"""The benchmark of a whole decoder, on one of two small layers; times are not looked at."""

import json
import math
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.append(str(pathlib.Path(__file__).parents[1]))

from benchmarks import model, tables
from jax_nmsparse import explanation

HIDDEN, FFN, VOCAB = model.TINY.hidden_size, model.TINY.intermediate_size, model.TINY.vocab_size
PROJECTIONS = {"qkv": (HIDDEN, 256), "out": (HIDDEN, HIDDEN), "gate_up": (HIDDEN, 2 * FFN), "down": (FFN, HIDDEN)}


def _elements(density: float) -> float:
    return 2 * density * sum(rows * columns for rows, columns in PROJECTIONS.values())


def test_rows(tmp_path, capsys):
    """Two cases through the command: one JSON of the common schema, and its table."""
    out = tmp_path / "model.json"
    assert model.main(["--tiny", "--match", "True|prefill", "--out", str(out), "--dump", str(tmp_path / "hlo")]) == 0
    assert "wrote" in capsys.readouterr().out
    run = json.loads(out.read_text())
    decode, prefill = run["rows"]
    assert run["meta"]["suite"] == "model"
    assert (decode["phase"], decode["pattern"], decode["block"], decode["head"]) == ("decode", "8:32", "1x1", "sparse")
    assert (prefill["phase"], prefill["pattern"], prefill["block"]) == ("prefill", "8:32", "1x64")
    assert (decode["tokens"], decode["context"], prefill["tokens"]) == (2, 24, 32)
    for row in run["rows"]:
        assert row["op"] == "model"
        # bfloat16 results of projections beside float32 ones.
        assert 0 < row["rel_err"] < 5e-3
        assert math.isclose(row["tokens_per_s"], 1e6 * row["tokens"] / row["time_us"], rel_tol=1e-3)
        # Embedding, head and norms; bfloat16.
        assert row["dense_bytes"] == 2 * (_elements(1) + 2 * VOCAB * HIDDEN + 5 * HIDDEN)
    # A quarter of the values, and a bit of every element where the pattern is element-wise.
    sparse = (0.25 + 1 / 16) * (_elements(1) + VOCAB * HIDDEN) + VOCAB * HIDDEN + 5 * HIDDEN
    # Every sparse projection has a variable of four bytes whose name is its format.
    assert decode["bytes"] == 2 * sparse + 4 * 9
    assert len(list((tmp_path / "hlo").iterdir())) == 4
    table = tables.models(run).splitlines()
    assert table[2].startswith("| decode, batch 2 | 8:32 | sparse | scanned |")
    assert table[3].startswith("| prefill, 32 tokens | 8:32/1x64 | dense | unrolled |")


@pytest.fixture
def ceilings(monkeypatch):
    """A device of 1 GB/s and 1 TFLOP/s, or of 1 TB/s and 1 GFLOP/s."""

    def put(bandwidth, rate):
        monkeypatch.setitem(
            explanation.DEVICES, jax.devices()[0].device_kind, explanation.Ceilings(bandwidth, {"bfloat16": rate})
        )

    return put


@pytest.fixture(scope="module")
def decoder():
    return model.Model("16:32").draw(model.TINY)


def test_floor(ceilings, decoder):
    decode, prefill = model.TINY_CASES[0], model.TINY_CASES[2]
    assert model.floor_us(model.TINY, decode, decoder) is None
    ceilings(1e9, 1e12)
    weights = (0.5 + 1 / 16) * _elements(1) + VOCAB * HIDDEN + 5 * HIDDEN
    # Keys and values of two sequences of 24 tokens, two heads of 32, two layers.
    cached = 2 * 2 * 24 * 2 * 32 * 2
    assert model.floor_us(model.TINY, decode, decoder) == pytest.approx(1e6 * (2 * (weights + cached) + 4 * 8) / 1e9)
    ceilings(1e12, 1e9)
    # Scores and their sums for half of 32 x 32 pairs, four heads of 32, two layers; the head sees one token.
    attention = 4 * 32 * 32 / 2 * 4 * 32 * 2
    flops = 2 * 32 * _elements(0.5) + attention + 2 * VOCAB * HIDDEN
    assert model.floor_us(model.TINY, prefill, decoder) == pytest.approx(1e6 * flops / 1e9)


def test_weights_of_layers_differ(decoder):
    first, second = (np.asarray(layer.down.weight.values, np.float32) for layer in decoder.layers)
    assert (first != second).mean() > 0.5
    assert {leaf.dtype for leaf in jax.tree.leaves(decoder)} == {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.uint32)}
    decoder.layers[0].down.weight.validate()
