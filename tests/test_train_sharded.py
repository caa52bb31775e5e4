"""The training example: two processes of four devices each, tensor and data parallel, equal one device."""

import json
import math
import os
import pathlib
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jax_nmsparse as nms
from jax_nmsparse import placement, sharded_checkpoint

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
sys.path.append(str(EXAMPLES))

import train_sharded  # noqa: E402  # pyright: ignore[reportMissingImports]

CONFIG = train_sharded.Config()


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _start(directory: pathlib.Path, process: int, port: int) -> subprocess.Popen:
    arguments = ["--host-devices=4", "--mesh=2x4", f"--coordinator=127.0.0.1:{port}", "--processes=2"]
    arguments += [f"--process={process}", f"--out={directory / 'result.json'}", f"--checkpoint={directory / 'params'}"]
    environment = {**os.environ, "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    return subprocess.Popen(
        [sys.executable, str(EXAMPLES / "train_sharded.py"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )


@pytest.mark.skipif(jax.default_backend() != "cpu" or jax.device_count() < 8, reason="for eight CPU devices")
def test_two_processes_equal_one_device(tmp_path):
    port = _free_port()
    processes = [_start(tmp_path, i, port) for i in range(2)]
    try:
        one = train_sharded.train(CONFIG, train_sharded.make_mesh("1x1", jax.devices()[:1]))
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    two = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert (two["processes"], two["mesh"]) == (2, {"data": 2, "tensor": 4})

    # Rounding grows from step to step where Adam divides small gradients by their size.
    assert len(two["losses"]) == 20
    np.testing.assert_allclose(two["losses"], one["losses"], rtol=2e-3)
    np.testing.assert_allclose(list(two["norms"].values()), list(one["norms"].values()), rtol=1e-3)
    assert two["losses"][0] > 0.9 * math.log(CONFIG.vocabulary)
    assert two["losses"][-1] < 0.3

    # Per block two all-reduces forward and two backward, and one for the gradients; nothing is gathered.
    assert one["collectives"] == {}
    assert two["collectives"].keys() == {"all-reduce"}
    assert two["collectives"]["all-reduce"]["number"] <= 6

    # What two processes saved, one restores on a mesh of another shape.
    mesh = train_sharded.make_mesh("8x1", jax.devices()[:8])
    shapes = jax.eval_shape(lambda: train_sharded.init(CONFIG, jax.random.key(0)))
    places = {name: NamedSharding(mesh, PartitionSpec()) for name in shapes}
    places["up"] = NamedSharding(mesh, PartitionSpec(None, "data"))
    params = sharded_checkpoint.restore(tmp_path / "params", placement.abstract(shapes, places))
    for name, leaf in params.items():
        values = leaf
        if isinstance(leaf, nms.NMSparse):
            values = leaf.validate().values
        assert np.linalg.norm(np.asarray(values).ravel()) == pytest.approx(two["norms"][name], rel=1e-5)


def test_the_command_line(tmp_path, capsys):
    """On whatever devices there are."""
    out = tmp_path / "result.json"
    train_sharded.main(["--steps=1", "--width=256", "--hidden=256", f"--out={out}"])
    assert "step   0  loss" in capsys.readouterr().out
    assert len(json.loads(out.read_text(encoding="utf-8"))["losses"]) == 1
