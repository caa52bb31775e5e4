"""Plans for meshes that are not here: the arithmetic, and the model of times against every recorded run."""

import collections
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import recorded

import jax_nmsparse as nms
from jax_nmsparse import planning
from jax_nmsparse.__main__ import main
from jax_nmsparse.explanation import DEVICES, cost

RESULTS = pathlib.Path(__file__).parents[1] / "benchmarks" / "results" / "nvidia-h200"
H200 = DEVICES["NVIDIA H200"]


def _rows():
    """Recorded products that a kernel of ours ran, with the floor that the cost model gives them now."""
    rows = []
    for path in sorted(RESULTS.glob("*.json")):
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
            if (
                row.get("op") not in ("spmm", "spmm_t", "sddmm")
                or row["implementation"] != "cuda"
                or not row["time_us"]
            ):
                continue
            pattern = nms.NMPattern.parse(f"{row['pattern']}/{row['block']}")
            shape = row["tokens"], row["in_features"], row["out_features"]
            call = recorded.call(row["op"], pattern, row["dtype"], row["precision"], *shape)
            key = (path.name, row["op"], pattern, row["dtype"], row["precision"], row["tokens"], row["kernel"])
            rows.append((key, row, cost(call, H200).floor_us))
    return rows


def test_floors_are_those_of_the_recorded_runs():
    """The plan's cost model is the one that the benchmarks wrote down."""
    pairs = [(floor, row["floor_us"]) for _, row, floor in _rows() if row["floor_us"]]
    assert len(pairs) > 500
    got, want = np.array(pairs).T
    np.testing.assert_allclose(got, want, rtol=0.1)
    assert np.mean(np.abs(got / want - 1) < 0.01) > 0.99


def test_times_of_shapes_that_the_fit_has_not_seen():
    """Every recorded row is predicted from the other shapes of its kernel, pattern and tokens.

    Within 25 % for nearly all rows where the kernel reaches 0.7 of its floor or more, which is what the floor alone
    could promise, and for most of the others, where latency and efficiency decide.
    """
    groups = collections.defaultdict(list)
    for key, row, floor in _rows():
        groups[key].append((floor, row["time_us"]))
    near, far = [], []
    for group in groups.values():
        for i, (floor, time) in enumerate(group):
            others = group[:i] + group[i + 1 :]
            if len(others) < 3:
                continue
            latency, slope = planning.fit(*zip(*others, strict=True))
            (near if floor / time >= 0.7 else far).append(abs(latency + slope * floor - time) / time)
    assert len(near) >= 20
    assert np.mean(np.array(near) < 0.25) > 0.9
    assert np.mean(np.array(far) < 0.25) > 0.75


def test_fit():
    latency, slope = planning.fit([1, 2, 5], [5, 7, 13])
    assert (latency, slope) == (pytest.approx(3), pytest.approx(2))
    assert planning.fit([4], [10]) == (0, pytest.approx(2.5))
    latency, slope = planning.fit([1, 2], [1, 3])  # a negative latency would be nonsense
    assert latency == 0
    assert 1 < slope < 1.5


def test_projections_cost_what_explain_says():
    plan = planning.plan("8b", pattern="16:32", tokens=3)
    assert len(plan.layer) == 7
    for part in plan.layer:
        layout = part.call.layout
        dense = jax.ShapeDtypeStruct((layout.in_features, layout.out_features), jnp.bfloat16)
        w = jax.eval_shape(lambda d: nms.prune(d, "16:32"), dense)
        x = jax.ShapeDtypeStruct((3, layout.in_features), jnp.bfloat16)
        told = nms.explain(x, w, device="NVIDIA H200")
        assert (part.bytes, part.floor_us) == (told.bytes, told.floor_us)
        assert (part.dense_bytes, part.dense_floor_us) == (told.dense_bytes, told.dense_floor_us)
    assert plan.sums == (0, 0)
    assert plan.layer_floor_us == pytest.approx(sum(p.floor_us for p in plan.layer))


def test_a_mesh_splits_memory_and_adds_sums():
    """70b on 8x8 by hand: 8:32 keeps a quarter in bfloat16, and a bit for every element."""
    plan = planning.plan("70b", mesh=(8, 8), pattern="8:32", tokens=4, context=1000)
    elements = 2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672
    assert plan.dense_weight_bytes == 80 * elements * 2 // 8
    assert plan.weight_bytes == 80 * elements * (2 / 4 + 1 / 8) / 8
    assert plan.other_bytes == (2 * 128256 // 8 + 161) * 8192 * 2
    assert plan.cache_bytes == 80 * 4 * 1000 * 2 * 128 * 2  # one of the eight key heads
    assert plan.sums == (2, 4 * 8192 * 2)
    assert plan.sum_us == pytest.approx(1e6 * 2 * (4 * 8192 * 2) * 2 * 7 / 8 / 450e9)
    assert {p.name: (p.call.layout.in_features, p.call.layout.out_features) for p in plan.layer}["down"] == (3584, 8192)
    whole = planning.plan("70b", pattern="8:32", tokens=4)
    assert 7.5 < whole.layer_floor_us / (plan.layer_floor_us - plan.sum_us) < 8


def test_more_devices_than_key_heads():
    plan = planning.plan("8b", mesh=(1, 16), pattern="16:32")
    shapes = {p.name: p.call.layout.out_features for p in plan.layer}
    assert (shapes["key"], shapes["query"]) == (128, 256)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "9b"}, "model is '9b', expected one of 7b, 8b, 13b, 70b"),
        ({"model": "8b", "device": "abacus"}, "device is 'abacus', expected one of NVIDIA H200"),
        ({"model": "13b", "mesh": (1, 16)}, "40 heads cannot be split over 16 devices"),
        ({"model": "8b", "mesh": (1, 0)}, "expected at least 1"),
        (
            {"model": "8b", "mesh": (1, 8), "pattern": "16:32/1x256"},
            "plan: key: out_features is 1024, expected a multi",
        ),
    ],
)
def test_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        planning.plan(**arguments)


def test_command_line(capsys):
    assert main(["plan", "--model", "70b", "--mesh", "8x8", "--pattern", "16:32"]) == 0
    out = capsys.readouterr().out
    assert "mesh 8 data x 8 tensor of NVIDIA H200" in out
    assert "2 all-reduces" in out
    assert "ew_spmv" in out
    with pytest.raises(SystemExit):
        main(["plan", "--model", "70b", "--mesh", "8by8"])
    assert "expected DATAxTENSOR such as 8x8" in capsys.readouterr().err
