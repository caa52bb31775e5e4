"""The benchmark of several devices, in tiny sizes on CPU devices."""

import json

import jax
import pytest

from benchmarks import multi_device, timing

pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="fewer than 4 devices")


class _Watch:
    """Takes no time: what is tested is everything else, and `timing` is compiled for hundreds of calls."""

    def __init__(self, call, x, weight, estimate_us):
        assert estimate_us > 0
        self.result = jax.jit(call)(x, weight)

    def measure(self):
        jax.block_until_ready(self.result)
        return timing.Timing(2.0, 0.0)


def test_rows(tmp_path, capsys, monkeypatch):
    """Structure, equality with one device (the run stops otherwise), and collectives of every program."""
    monkeypatch.setattr(timing, "Stopwatch", _Watch)
    out = tmp_path / "rows.json"
    assert multi_device.main(["--tiny", "--devices=1,4", f"--out={out}"]) == 0
    assert "wrote" in capsys.readouterr().out
    result = json.loads(out.read_text(encoding="utf-8"))
    assert (result["meta"]["suite"], result["meta"]["devices"]) == ("multi-device", [1, 4])
    rows = {(r["op"], r["direction"], r["devices"]): r for r in result["rows"]}
    assert len(rows) == 2 * 4
    for (_, _, devices), row in rows.items():
        assert (row["time_us"], row["dense_us"], row["ratio_kept"], row["efficiency"]) == (2, 2, 1, 1 / devices)
        assert row["rel_err"] <= multi_device.TOLERANCE["float32"]
        if devices == 1:
            assert row["collectives"] == {}
    forward, backward = rows["mlp", "forward", 4], rows["mlp", "backward", 4]
    whole = 8 * 256 * 4
    assert forward["collectives"] == {"all-reduce": {"number": 1, "bytes": whole}}
    assert backward["collectives"]["all-reduce"]["bytes"] == 2 * whole
    step = rows["decoder", "step", 4]
    assert step["collectives"] == {"all-reduce": {"number": 2, "bytes": 2 * 2 * 128 * 4}}
    assert (step["layers"], step["kv_heads"], step["tokens"]) == (1, 4, 2)
    assert rows["classifier", "step", 4]["collectives"].keys() == {"all-reduce"}
    assert forward["dense_collectives"] == forward["collectives"]


def test_a_gathered_weight_stops_the_run():
    program = multi_device.programs(multi_device.TINY, "8:32", "float32", False)[0]
    values = "x".join(map(str, program.weights[0].values.shape)).replace("x", ",")
    text = f"%g = f32[{values}]{{4,3,2,1,0}} all-gather(%p), replica_groups=[1,4]<=[4], dimensions={{1}}"
    with pytest.raises(RuntimeError, match="mlp forward: a weight is gathered"):
        multi_device.check_no_weight_is_gathered(program, text)
    multi_device.check_no_weight_is_gathered(program, "%g = f32[8,256]{1,0} all-gather(%p), dimensions={0}")


def test_another_result_than_one_device_stops_the_run():
    program = multi_device.programs(multi_device.TINY, "8:32", "float32", False)[0]
    wrong = jax.jit(program.function)(program.x, program.weights) + 1
    with pytest.raises(RuntimeError, match="mlp forward on 2 devices differs"):
        multi_device.measure(program, 2, wrong, 1e-3)
