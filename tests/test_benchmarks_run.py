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
    monkeypatch.setattr(timing, "_LONG", 4)
    monkeypatch.setattr(timing, "CACHE_BYTES", 20_000)


def test_suites_have_no_case_twice():
    for name in SUITES:
        cases = suite(name)
        assert len(set(cases)) == len(cases), name


@pytest.mark.parametrize("feature_major", [False, True])
def test_stopwatch_computes_every_pair(short, feature_major):
    """Every call is there, on inputs of its own or weights of its own, in the layout asked for."""
    x = jax.random.normal(jax.random.key(0), (8, 16))
    weights = [jax.random.normal(jax.random.key(i), (16, 24)) for i in range(3)]
    stopwatch = timing.Stopwatch(jnp.dot, x, weights, 1000.0, feature_major)
    program = stopwatch._programs.result()[1]
    inputs, flat = stopwatch._arguments
    state = jax.tree.map(
        lambda a, f: jax.device_put(jnp.zeros(a.shape, a.dtype), f),
        program.args_info[0][2],
        program.input_formats[0][2],
    )
    results = [leaf for (leaf,) in program(inputs, flat, state)]
    assert len(results) == 4
    assert len({np.asarray(r).tobytes() for r in results}) == 4
    for i, result in enumerate(results):
        (a,), (b,) = inputs[i % len(inputs)], flat[i % len(flat)]
        np.testing.assert_allclose(result, np.asarray(a) @ np.asarray(b), rtol=1e-5, atol=1e-5)
        assert result.format.layout.major_to_minor == ((1, 0) if feature_major else (0, 1))
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
