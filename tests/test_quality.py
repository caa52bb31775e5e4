"""The comparison of pruning methods on MiniLM: the program on a small random encoder, and what is recorded."""

import importlib.util
import json
import pathlib
import sys
from typing import Any

import jax
import numpy as np
import pytest

import jax_nmsparse as nms

sys.path.append(str(pathlib.Path(__file__).parents[1] / "examples"))

import english  # pyright: ignore[reportMissingImports]
import minilm  # pyright: ignore[reportMissingImports]
import quality  # pyright: ignore[reportMissingImports]
from test_examples import folder, model  # noqa: F401  (fixtures: a small random encoder)

ROOT = pathlib.Path(__file__).parents[1]


def test_calibration_sees_what_the_projections_read(model):  # noqa: F811
    """All 12 projections; padding does not count; query, key and value read the same."""
    sentences = english.sentences(40)
    statistics = quality.calibrate(model, sentences)
    assert set(statistics) == {name for name in model.params if minilm.is_projection(name)}
    tokens = sum(len(encoded.ids) for encoded in model.tokenizer.encode_batch(sentences))
    assert {int(s.tokens) for s in statistics.values()} == {tokens}
    for part in ("key", "value"):
        np.testing.assert_array_equal(statistics["layer_1_query"].gram, statistics[f"layer_1_{part}"].gram)


def test_pruned_weights_in_the_dense_encoder_are_the_sparse_encoder(model):  # noqa: F811
    pattern = nms.NMPattern(2, 4)
    statistics = quality.calibrate(model, english.sentences(40))
    params = quality.prune_all(model.params, pattern, "magnitude", statistics)
    ((tokens, mask),) = minilm.batches(model.tokenizer, english.sentences(8), 8)
    dense = jax.jit(minilm.Encoder(model.config).apply)({"params": params}, tokens, mask)
    sparse = jax.jit(minilm.Encoder(model.config, pattern).apply)(minilm.sparsify(model.params, pattern), tokens, mask)
    np.testing.assert_allclose(dense, sparse, atol=2e-6)


def test_neighbours_and_output_error():
    near = quality.neighbours(np.array([[1.0, 0, 0], [0.8, 0.6, 0], [0, 0, 1]]), 1)
    np.testing.assert_array_equal(near, [[0, 1, 0], [1, 0, 0], [1, 0, 0]])
    rng = np.random.default_rng(0)
    x, w, v = rng.normal(size=(20, 6)), rng.normal(size=(6, 4)), rng.normal(size=(6, 4))
    want = np.square(x @ (w - v)).sum() / np.square(x @ w).sum()
    assert float(quality.output_error(w, v, x.T @ x)) == pytest.approx(want, rel=1e-5)


def test_whole_program(folder, tmp_path, capsys):  # noqa: F811
    arguments = ["--model", str(folder), "--patterns", "2:4", "--sentences", "48", "--output", str(tmp_path)]
    assert quality.main(arguments) == 0
    printed = capsys.readouterr().out
    for text in ("magnitude", "wanda", "sparsegpt", "10 nearest", "output"):
        assert text in printed
    assert "…" not in printed, "the table fits into 80 columns"
    results = json.loads((tmp_path / "quality.json").read_text())
    error = {row["method"]: row["output_error"] for row in results["rows"]}
    assert 0 < error["sparsegpt"] < error["wanda"] < error["magnitude"] < 1
    assert (tmp_path / "quality.png").read_bytes().startswith(b"\x89PNG")
    assert quality.main(["--model", "nowhere", "--sentences", "8"]) == 1
    assert "config.json" in capsys.readouterr().err


def test_recorded_order_of_the_methods():
    """On MiniLM, on average over the patterns: SparseGPT not worse than Wanda, Wanda not worse than magnitude."""
    (path,) = (ROOT / "benchmarks" / "results" / "quality").glob("*-quality.json")
    run = json.loads(path.read_text())
    assert run["meta"]["suite"] == "quality"
    assert len({row["pattern"] for row in run["rows"]}) == 9
    for field in ("cosine_mean", "nearest", "neighbours"):
        mean = {m: np.mean([row[field] for row in run["rows"] if row["method"] == m]) for m in quality.METHODS}
        assert mean["sparsegpt"] >= mean["wanda"] >= mean["magnitude"], (field, mean)


@pytest.mark.parametrize(("table", "page"), [("quality", "quality.md"), ("digits", "training.md")])
def test_pages_hold_the_recorded_tables(table, page):
    spec: Any = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks" / "tables.py")
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    rendered = tables.render(table, "quality")
    assert rendered.count("\n| ") > 4
    assert rendered in (ROOT / "docs" / page).read_text(encoding="utf-8"), "run make tables"
