"""The benchmark suites' machinery, on small cases: what is measured is computed right and written down whole."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import run, tables, timing
from benchmarks.shapes import SUITES, VW64, Case, suite

CASES = [
    Case("spmm", "2:4", (1, 1), "float32", 3, (64, 40)),
    Case("spmm", "8:32", VW64, "int8", 2, (64, 128)),
    Case("spmm", "8:32", VW64, "int8 x int8", 32, (64, 128)),
    Case("spmm_t", "16:32", (1, 1), "bfloat16", 3, (64, 40)),
    Case("sddmm", "16:32", (1, 1), "float32", 3, (64, 40), "highest"),
]


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(timing, "SHORT", 2)
    monkeypatch.setattr(timing, "LONG", 4)


def test_suites_have_no_case_twice():
    for name in SUITES:
        cases = suite(name)
        assert len(set(cases)) == len(cases), name


@pytest.mark.parametrize("feature_major", [False, True])
def test_stopwatch_computes_every_call(short, feature_major):
    """As many as it divides by, each whole, in the layout asked for, and in the memory of the run before."""
    x = jax.random.normal(jax.random.key(0), (8, 16))
    weight = jax.random.normal(jax.random.key(1), (16, 24))
    stopwatch = timing.Stopwatch(jnp.dot, x, weight, 1000.0, feature_major)
    for program, calls in zip(stopwatch._programs.result(), (2, 4), strict=True):
        arguments = stopwatch._arguments(program)
        assert [len(a) for a in arguments] == [4, 4, 4]
        assert (program.as_text() or "").count("input_output_alias") == 1
        results = [leaf for (leaf,) in program(*arguments)]
        for i, result in enumerate(results):
            assert result.format.layout.major_to_minor == ((1, 0) if feature_major else (0, 1))
            want = np.asarray(x) @ np.asarray(weight) if i < calls else np.zeros((8, 24))
            np.testing.assert_allclose(result, want, rtol=1e-5, atol=1e-5)
    timed = stopwatch.measure()
    assert np.isfinite([timed.time_us, timed.spread]).all()


def test_rows(short, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(run, "suite", lambda name: CASES)
    out = tmp_path / "rows.json"
    assert run.main(["--suite=cpu", f"--out={out}", "--peers"]) == 0
    assert "5/5" in capsys.readouterr().out
    result = json.loads(out.read_text(encoding="utf-8"))
    assert result["meta"]["suite"] == "cpu"
    assert [(r["op"], r["pattern"], r["dtype"], r["tokens"]) for r in result["rows"]] == [
        (c.op, c.pattern, c.dtype, c.tokens) for c in CASES
    ]
    for row in result["rows"]:
        assert row["rel_err"] < 1e-2
        assert row["kernel"] in {*row["kernels"], "dense"}
        assert {"implementation", "time_us", "spread", "dense_us", "dense_spread", "floor_us", "peers"} <= row.keys()
    # A row of the tables needs times above zero, which so short programs do not promise.
    for row in result["rows"]:
        row.update(time_us=2.0, dense_us=3.0)
    result["rows"][0]["isolated_us"] = 6.0
    assert tables.summary(result).count("| 1.50 | 1.50 to 1.50 | 0.50 |") == 1
    assert tables.summary(result).count("| 1.50 | 1.50 to 1.50 |  |") == 4
    assert "| 1.50 |" in tables.full(result)


def test_a_wrong_product_stops_the_run(short, monkeypatch):
    one = run.Run(CASES[0])
    monkeypatch.setattr(run, "_error", lambda case, call: lambda inputs, w: jnp.float32(0.5))
    wrong = run.Run(CASES[0])
    assert one.row(peers=False, record=False)["rel_err"] < 1e-5
    with pytest.raises(AssertionError, match="relative errors"):
        wrong.row(peers=False, record=False)
