"""``python -m jax_nmsparse``: what is written, what is said, and the exit codes."""

import subprocess
import sys
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
import safetensors
import safetensors.numpy
from flax import nnx

import jax_nmsparse as nms
from jax_nmsparse import checkpoint, cli
from jax_nmsparse import files as files_module
from jax_nmsparse.commands import bench
from jax_nmsparse.nnx import NMSparseLinear


@pytest.fixture
def model(tmp_path, rng):
    """A file as Hugging Face writes it: PyTorch's [out, in], bfloat16, integers, metadata of its own."""
    tensors = {
        "model.embed_tokens.weight": oracle.normal(rng, (50, 32)),
        "model.layers.0.up.weight": oracle.normal(rng, (64, 32)),
        "model.layers.0.down.weight": oracle.normal(rng, (32, 64), ml_dtypes.bfloat16),
        "model.norm.weight": oracle.normal(rng, (32,)),
        "positions": np.arange(2**40, 2**40 + 3),
    }
    path = tmp_path / "in.safetensors"
    safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})
    return path, tensors


def run(*arguments) -> int:
    return cli.main([str(argument) for argument in arguments])


def files(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_prune_writes_the_weights_of_pytorch_matrices(model, tmp_path, capsys):
    path, tensors = model
    out = tmp_path / "out.safetensors"
    assert run("prune", path, out, "--pattern", "2:4") == 0
    captured = capsys.readouterr()
    assert "total" in captured.out and "rule 'embed|wte|wpe'" in captured.out
    assert "prune" not in captured.err and "3/3" in captured.err
    tree = checkpoint.load(out)["model"]
    for name in ("up", "down"):
        w = tree["layers"]["0"][name]["weight"].validate()
        assert w.dtype == tensors[f"model.layers.0.{name}.weight"].dtype
        oracle.assert_same_bits(w, nms.prune(tensors[f"model.layers.0.{name}.weight"].T, "2:4"))
    with safetensors.safe_open(out, framework="numpy") as file:
        assert file.metadata()["format"] == "pt"
        for name in ("model.embed_tokens.weight", "model.norm.weight", "positions"):
            np.testing.assert_array_equal(file.get_tensor(name), tensors[name])
            assert file.get_tensor(name).dtype == tensors[name].dtype
    assert files(tmp_path) == ["in.safetensors", "out.safetensors"]


def test_prune_by_rules_again_and_quantised(model, tmp_path, capsys):
    """What is sparse already passes through a second run unchanged."""
    path, tensors = model
    first, second = tmp_path / "1.safetensors", tmp_path / "2.safetensors"
    assert (
        run("prune", path, first, "--pattern=8:32/1x8", "--include=up", "--include=embed", "--exclude=", "--quiet") == 0
    )
    assert capsys.readouterr() == ("", "")
    tree = checkpoint.load(first)["model"]
    embedding = tree["embed_tokens"]["weight"]
    oracle.assert_same_bits(embedding, nms.prune(tensors["model.embed_tokens.weight"].T, "8:32/1x8"))
    assert run("prune", first, second, "--pattern", "2:4", "--include", "down", "--dtype", "int8", "--quiet") == 0
    again = checkpoint.load(second)["model"]
    oracle.assert_same_bits(again["embed_tokens"]["weight"], embedding)
    down = nms.prune(tensors["model.layers.0.down.weight"].T, "2:4")
    oracle.assert_same_bits(again["layers"]["0"]["down"]["weight"], nms.quantize(down, jnp.int8))


@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
def test_prune_with_statistics(model, tmp_path, rng, method):
    path, tensors = model
    x = oracle.normal(rng, (64, 32))
    inputs = nms.pruning.Statistics.from_inputs(jnp.asarray(x))
    statistics = {"tokens": inputs.tokens, "squares": inputs.squares, "gram": inputs.gram}
    checkpoint.save(tmp_path / "statistics.safetensors", {"model/layers/0/up": statistics})
    out = tmp_path / "out.safetensors"
    options = ("--method", method, "--statistics", tmp_path / "statistics.safetensors", "--quiet")
    assert run("prune", path, out, "--pattern", "2:4", "--include", "up", *options) == 0
    want = nms.prune(tensors["model.layers.0.up.weight"].T, "2:4", method=method, inputs=inputs)
    oracle.assert_same_bits(checkpoint.load(out)["model"]["layers"]["0"]["up"]["weight"], want)


def test_layout_of_the_axes(tmp_path, rng):
    """jaxpruner NByM: square matrices, whose axes only the name or the user tells."""
    square = oracle.normal(rng, (32, 32))
    path = tmp_path / "in.safetensors"
    safetensors.numpy.save_file({"a.kernel": square, "b.weight": square}, path)
    for layout, transposed in (("auto", ("b",)), ("in-out", ()), ("out-in", ("a", "b"))):
        out = tmp_path / f"{layout}.safetensors"
        assert run("prune", path, out, "--pattern", "2:4", "--layout", layout, "--quiet") == 0
        tree = checkpoint.load(out)
        for name, leaf in (("a", "kernel"), ("b", "weight")):
            oracle.assert_same_bits(tree[name][leaf], nms.prune(square.T if name in transposed else square, "2:4"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("{dir}/none.safetensors", "{out}", "--pattern=2:4"), "there is no file"),
        (("{dir}/broken.safetensors", "{out}", "--pattern=2:4"), "not a whole safetensors file"),
        (("{in}", "{out}", "--pattern=4:2"), "n is 4 with m = 2"),
        (("{in}", "{out}", "--pattern=2:4", "--include=nothing"), "the rule 'nothing' matches no layer"),
        (("{in}", "{out}", "--pattern=2:4", "--include=("), "is no regular expression"),
        (("{in}", "{out}", "--pattern=2:4", "--method=wanda"), "needs statistics of what model.layers.0.down reads"),
        (("{in}", "{in}", "--pattern=2:4"), "exists already; --force replaces it"),
        (("{in}", "{dir}/no/out", "--pattern=2:4"), "there is no directory"),
        (
            ("{in}", "{out}", "--pattern=2:4", "--include=up", "--exclude=up"),
            "'up' is given to --include and to --exclude",
        ),
        (
            ("{dir}/norms.safetensors", "{out}", "--pattern=2:4"),
            "holds no matrix to prune: none of two axes and a float",
        ),
        (("{in}", "{dir}", "--pattern=2:4", "--force"), "is a directory, expected the name of a file"),
        (("{in}", ".", "--pattern=2:4"), ". is a directory, expected the name of a file"),
        (("{in}", "/dev/null", "--pattern=2:4", "--force"), "/dev/null is no regular file"),
        (("{in}", "{out}", "--pattern=2:4", "--dtype=float64"), "asks for float64, which needs 64-bit types; set JAX"),
        (
            ("{in}", "{out}", "--pattern=2:4", "--statistics={in}"),
            "expected LAYER.tokens, LAYER.squares and LAYER.gram",
        ),
    ],
)
def test_errors_are_said_and_nothing_is_written(model, tmp_path, capsys, arguments, message):
    path, _ = model
    (tmp_path / "broken.safetensors").write_bytes(path.read_bytes()[:-9])
    safetensors.numpy.save_file({"norm.weight": np.ones(8, np.float32)}, tmp_path / "norms.safetensors")
    before = files(tmp_path), path.read_bytes()
    names = {"dir": tmp_path, "in": path, "out": tmp_path / "out.safetensors"}
    assert run("prune", *(argument.format(**names) for argument in arguments), "--quiet") == 1
    assert message in capsys.readouterr().err
    assert (files(tmp_path), path.read_bytes()) == before


def test_an_output_that_cannot_be_is_refused_before_any_work(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("jax_nmsparse.commands.prune.Reader", None)
    assert run("prune", model[0], tmp_path, "--pattern", "2:4", "--force") == 1
    assert "is a directory" in capsys.readouterr().err
    taken: list[str] = []
    with pytest.raises(IsADirectoryError, match="save: .* is a directory"):
        files_module.write(tmp_path, ((name, taken.append(name)) for name in "a"))
    assert not taken


def test_float64_is_written_as_such(model, tmp_path, x64, capsys):
    out = tmp_path / "out.safetensors"
    assert run("prune", model[0], out, "--pattern=2:4", "--include=up", "--dtype=float64", "--quiet") == 0
    w = checkpoint.load(out)["model"]["layers"]["0"]["up"]["weight"]
    oracle.assert_same_bits(w, nms.prune(model[1]["model.layers.0.up.weight"].T, "2:4").astype(jnp.float64))


def test_nothing_is_half_written(model, tmp_path, monkeypatch, capsys):
    """Failures in the middle: of the disk, and by interruption; an old output survives."""
    path, _ = model
    out = tmp_path / "out.safetensors"
    out.write_text("old")

    errors = iter((OSError("disk full"), KeyboardInterrupt()))

    def fail(tensors, name, **options):
        name.write_bytes(b"half")
        raise next(errors)

    monkeypatch.setattr(safetensors.numpy, "save_file", fail)
    for code in (1, 130):
        assert run("prune", path, out, "--pattern", "2:4", "--force", "--quiet") == code
        assert files(tmp_path) == ["in.safetensors", "out.safetensors"] and out.read_text() == "old"
    assert "disk full" in capsys.readouterr().err


def test_force_replaces_also_the_input(model):
    path, _ = model
    assert run("prune", path, path, "--pattern", "2:4", "--force", "--quiet") == 0
    assert str(checkpoint.load(path)["model"]["layers"]["0"]["up"]["weight"].pattern) == "2:4"


def test_inspect(model, tmp_path, capsys):
    path, _ = model
    out = tmp_path / "out.safetensors"
    assert run("prune", path, out, "--pattern", "2:4", "--quiet") == 0
    assert run("inspect", out, "--check") == 0
    text = capsys.readouterr().out
    assert "2 N:M sparse weights" in text and "bfloat16" in text and "norm" not in text
    assert run("inspect", out, "--all") == 0
    assert "model.norm.weight" in capsys.readouterr().out
    assert run("inspect", tmp_path / "none") == 1
    assert "there is no file" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_inspect_of_the_variables_of_layers(tmp_path, capsys, kind):
    path = tmp_path / "model.safetensors"
    layer: Any = NMSparseLinear(64, 32, pattern="4:8", rngs=nnx.Rngs(0))
    if kind == "nnx":
        checkpoint.save(path, {"mlp": nnx.to_pure_dict(nnx.state(layer))})
    else:
        variables = nms.NMSparseDense.from_weight(layer.weight, layer.bias[...])
        checkpoint.save(path, {c: {"mlp": tree} for c, tree in variables.items()})
    assert run("inspect", path) == 0
    (line,) = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("mlp")]
    assert line == ["mlp", "64x32", "4:8", "float32", "4.4", "kB", "53", "%"]


def test_inspect_finds_damage(tmp_path, capsys):
    path = tmp_path / "w.safetensors"
    w = nms.prune(jnp.ones((32, 8)), "2:4")
    checkpoint.save(path, {"w": w._replace(mask=w.mask | 8)})
    assert run("inspect", path) == 0
    assert run("inspect", path, "--check") == 1
    assert "the weight 'w' is damaged: validate: " in capsys.readouterr().err
    for metadata, message in (
        ("{", "damaged description"),
        ('{"format_version": 9, "weights": {}, "dtypes": {}}', "9"),
    ):
        safetensors.numpy.save_file({"a": np.ones(1)}, path, metadata={"jax_nmsparse": metadata})
        assert run("inspect", path) == 1
        assert message in capsys.readouterr().err


def test_bench_compares_and_times(capsys, monkeypatch):
    for name, small in (("_CACHE_BYTES", 1000), ("_BANDWIDTH_BYTES", 4000), ("_CPU_WIDTH", 16)):
        monkeypatch.setattr(bench, name, small)
    assert run("bench", "--shape", "64x32", "--tokens", "3", "--pattern", "2:4", "--dtype", "bfloat16") == 0
    row = capsys.readouterr().out.splitlines()[-1].split()
    assert row[:3] == ["64x32", "2:4", "3"] and float(row[4]) > 0
    monkeypatch.setattr(bench, "spmm", lambda x, w, **_: 2 * nms.spmm(x, w))
    assert run("bench", "--shape", "64x32", "--tokens", "3", "--pattern", "2:4") == 1
    assert "differs from the dense one" in capsys.readouterr().err
    assert run("bench", "--shape", "64x32", "--implementation", "cuda") == 1
    for wrong in (("--shape", "64"), ("--tokens", "0"), ("--pattern", "4:2"), ("--dtype", "int8")):
        with pytest.raises(SystemExit) as exit_code:
            run("bench", *wrong)
        assert exit_code.value.code == 2


def test_extras_that_are_missing_are_named(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert run("prune", model[0], tmp_path / "out", "--pattern", "2:4") == 1
    assert "pip install 'jax_nmsparse[cli]'" in capsys.readouterr().err


def test_the_module_runs():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "jax_nmsparse", "info"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "native modules" in done.stdout, done.stderr
