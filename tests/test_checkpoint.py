"""Self-describing files."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_nmsparse as nms
from jax_nmsparse import checkpoint, files


def _tree():
    dense = jax.random.normal(jax.random.key(0), (2, 40, 24))
    return {
        "layer": {
            "ew": nms.prune(dense, "2:4").astype(jnp.bfloat16),
            "vw": nms.prune(dense[0], "3:100/1x8"),
            "bias": jnp.arange(24.0),
        },
        "int8": nms.quantize(nms.prune(dense[1], "8:32"), jnp.int8),
        "float8": nms.quantize(nms.prune(dense[1], "8:32"), jnp.float8_e4m3fn),
        "step": jnp.int32(7),
    }


def test_round_trip_is_bit_identical_and_self_describing(tmp_path):
    tree = _tree()
    checkpoint.save(tmp_path / "w.safetensors", tree)
    back = checkpoint.load(tmp_path / "w.safetensors", like=tree)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    for want, got in zip(jax.tree.leaves(tree), jax.tree.leaves(back), strict=True):
        assert got.dtype == want.dtype
        assert np.asarray(got).tobytes() == np.asarray(want).tobytes()
    assert str(back["layer"]["vw"].pattern) == "3:100/1x8"
    back["layer"]["ew"].validate()


def test_another_pattern_on_restore_raises(tmp_path):
    tree = {"w": nms.prune(jnp.ones((32, 8)), "2:4")}
    checkpoint.save(tmp_path / "w.safetensors", tree)
    with pytest.raises(ValueError, match=r"'w' in .* is NMSparse\(32x8, 2:4, float32\), expected .*16:32"):
        checkpoint.load(tmp_path / "w.safetensors", like={"w": nms.prune(jnp.ones((32, 8)), "16:32")})
    with pytest.raises(ValueError, match=r"lacks \['b'\]"):
        checkpoint.load(tmp_path / "w.safetensors", like={**tree, "b": jnp.ones(3)})


def test_damaged_file_raises(tmp_path):
    path = tmp_path / "w.safetensors"
    checkpoint.save(path, _tree())
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        checkpoint.load(path)


def test_another_format_version_raises(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "FORMAT_VERSION", 99)
    checkpoint.save(tmp_path / "w.safetensors", _tree())
    monkeypatch.undo()
    with pytest.raises(ValueError, match="format version 99"):
        checkpoint.load(tmp_path / "w.safetensors")


@pytest.mark.parametrize(
    "bad",
    [
        {"a": "text"},
        {"a.b": jnp.ones(1)},
        {"": jnp.ones(1)},
        {(1,): jnp.ones(1)},
        {1: jnp.ones(1), "1": jnp.ones(1)},
        [jnp.ones(1)],
    ],
)
def test_bad_tree_leaves_nothing_behind(tmp_path, bad):
    with pytest.raises((TypeError, ValueError), match="save: "):
        checkpoint.save(tmp_path / "w.safetensors", bad)
    assert list(tmp_path.iterdir()) == []


def test_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    import safetensors.numpy

    path = tmp_path / "w.safetensors"
    checkpoint.save(path, {"a": jnp.ones(3)})

    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(safetensors.numpy, "save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        checkpoint.save(path, {"a": jnp.zeros(3)})
    assert [p.name for p in tmp_path.iterdir()] == ["w.safetensors"]
    np.testing.assert_array_equal(checkpoint.load(path)["a"], np.ones(3))
