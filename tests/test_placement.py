"""Where weights lie on a mesh: shardings from one, padding, rules for models; checkpoints between meshes."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_nmsparse as nms
from jax_nmsparse import placement, sharded_checkpoint

P = PartitionSpec
NO_SPEC: Any = ("data",)
IN, OUT = 256, 64

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="fewer than 8 devices")


def _mesh(data, tensor):
    return jax.make_mesh((data, tensor), ("data", "tensor"), devices=jax.devices()[:8], axis_types=(AxisType.Auto,) * 2)


@pytest.fixture
def mesh():
    return _mesh(2, 4)


@pytest.mark.parametrize("pattern", ["8:32", "4:64", "2:4/1x8"])
def test_one_sharding_for_the_weight(rng, mesh, pattern):
    """Values, mask and scales go where the dense weight would: every device holds the part that it multiplies."""
    w = oracle.draw(rng, (2, IN, OUT), pattern)
    w = w._replace(scales=jnp.ones((2, OUT)))
    sharding = NamedSharding(mesh, P(None, "tensor", "data"))
    placed = jax.device_put(w, placement.shardings(w, sharding))
    dense = jax.device_put(oracle.dense(w), sharding)
    for part in dense.addressable_shards:
        local = nms.NMSparse(
            *(
                next(s.data for s in array.addressable_shards if s.device == part.device)
                for array in jax.tree.leaves(placed)[:2]
            ),
            shape=part.data.shape,
            pattern=pattern,
        )
        np.testing.assert_array_equal(oracle.dense(local), part.data)
    assert placed.scales.sharding.spec == P(None, "data")
    placed.validate()


def test_trees_and_jit(rng, mesh):
    """A prefix of shardings, as in device_put, and in_shardings of jit."""
    tree = {"w": oracle.draw(rng, (IN, OUT), "8:32"), "b": jnp.ones(OUT)}
    columns = NamedSharding(mesh, P(None, "tensor"))
    got = placement.shardings(tree, {"w": columns, "b": NamedSharding(mesh, P("tensor"))})
    assert (got["w"].mask.spec, got["b"].spec) == (P(None, "tensor"), P("tensor"))
    x = oracle.integers(rng, (4, IN))
    f = jax.jit(lambda x, tree: nms.spmm(x, tree["w"], bias=tree["b"]), in_shardings=(None, got))
    np.testing.assert_array_equal(f(x, tree), oracle.spmm(x, tree["w"], bias=tree["b"]))
    shapes = jax.eval_shape(lambda: nms.prune(jnp.ones((IN, OUT)), "2:4"))
    assert placement.shardings(shapes, columns).values.spec == P(None, "tensor", None, None, None)


def test_errors(rng, mesh):
    w = oracle.draw(rng, (IN, OUT), "4:64")
    with pytest.raises(
        ValueError, match="in_features is 256, expected a multiple of 512 .*8 parts of whole windows of 64"
    ):
        placement.shardings(w, NamedSharding(mesh, P(("data", "tensor"))))
    w = oracle.draw(rng, (IN, OUT), "2:4/1x32")
    with pytest.raises(ValueError, match="out_features is 64, expected a multiple of 128 .*column blocks of 32"):
        placement.shardings(w, NamedSharding(mesh, P(None, "tensor")))
    with pytest.raises(ValueError, match="has 3 entries, expected at most 2"):
        placement.shardings(w, NamedSharding(mesh, P(None, None, "data")))
    with pytest.raises(TypeError, match="the sharding is .*, expected a NamedSharding"):
        placement.shardings({"w": w}, {"w": P("data")})
    with pytest.raises(
        ValueError, match="rule for 'mlp' names the mesh axis 'model', expected one of 'data', 'tensor'"
    ):
        placement.sharding_rules(mesh, P("mlp"), {"mlp": "model"})


def test_padding_errors(mesh):
    dense = jnp.ones((40, 8))
    for call, error, message in (
        (
            lambda: placement.pad(dense, "2:4", mesh, P("model")),
            ValueError,
            "names the mesh axis 'model', expected one",
        ),
        (
            lambda: placement.pad(dense, "2:4", mesh, P(None, None, "data")),
            ValueError,
            "has 3 entries, expected at most 2",
        ),
        (lambda: placement.pad(dense, "2:4", None, P("data")), TypeError, "spec is given and mesh is None"),
        (lambda: placement.pad(dense, "2:4", mesh, NO_SPEC), TypeError, "spec is a tuple, expected a PartitionSpec"),
        (lambda: placement.pad(dense[0], "2:4"), ValueError, r"the shape is \(8,\), expected \(..., in_features"),
    ):
        with pytest.raises(error, match=message):
            call()


def test_padding_gives_every_device_whole_windows(rng, mesh):
    """A padded MLP computes what the ragged one does."""
    up, down = oracle.normal(rng, (100, 70)), oracle.normal(rng, (70, 50))
    x = oracle.normal(rng, (3, 100))
    up_spec, down_spec = P(None, "tensor"), P("tensor")
    assert placement.padded_shape((70, 50), "8:32", mesh, down_spec) == (128, 50)
    down_padded = placement.pad(down, "8:32", mesh, down_spec)
    up_padded = jnp.pad(placement.pad(up, "8:32"), [(0, 0), (0, down_padded.shape[0] - 70)])
    assert up_padded.shape == (128, 128)
    placed = [
        jax.device_put(w, placement.shardings(w, NamedSharding(mesh, spec)))
        for w, spec in ((nms.prune(up_padded, "8:32"), up_spec), (nms.prune(down_padded, "8:32"), down_spec))
    ]
    y = jax.nn.relu(np.pad(x, [(0, 0), (0, 28)]) @ placed[0]) @ placed[1]
    hidden = np.maximum(oracle.spmm(x, nms.prune(up, "8:32")), 0)
    oracle.assert_close(y, oracle.spmm(hidden, nms.prune(down, "8:32")), depth=100)


class _Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        normal, zeros = nn.initializers.lecun_normal(), nn.initializers.zeros_init()
        for features, names in ((2 * OUT, ("embed", "mlp")), (IN, ("mlp", "embed"))):
            x = nms.NMSparseDense(
                features,
                pattern="8:32",
                kernel_init=nn.with_logical_partitioning(normal, names),
                bias_init=nn.with_logical_partitioning(zeros, names[1:]),
            )(x)
        return x


def test_rules_for_linen(mesh):
    """Logical names of a kernel reach values, mask and bias; the shardings are those of Flax's own function."""
    model, x = _Mlp(), jnp.ones((4, IN))
    names = nn.get_partition_spec(jax.eval_shape(model.init, jax.random.key(0), x))
    rules = [("mlp", "tensor"), ("mlp", "data")]
    got = placement.sharding_rules(mesh, names, rules)
    layer = got["params"]["NMSparseDense_1"]
    assert layer["values"].spec == P("tensor", None, None, None, None)
    assert got["nm_mask"]["NMSparseDense_1"]["mask"].spec == P("tensor", None)
    assert got["params"]["NMSparseDense_0"]["bias"].spec == P("tensor")
    flax = nn.spmd.logical_to_mesh_sharding(names, mesh, rules[:1])
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: a.is_equivalent_to(b, 5), got, flax)))
    variables = nn.unbox(jax.jit(model.init, out_shardings=got)(jax.random.key(0), x))
    assert variables["params"]["NMSparseDense_1"]["values"].sharding == layer["values"]
    single = nn.unbox(model.init(jax.random.key(0), x))
    oracle.assert_close(jax.jit(model.apply)(variables, x), model.apply(single, x), depth=IN)


def test_rules_for_nnx(mesh):
    """Names on the variables of an NNX module, here around the arrays of a weight."""
    w = nms.prune(jax.random.normal(jax.random.key(0), (IN, OUT)), "8:32")

    class Layer(nnx.Module):
        def __init__(self):
            self.values = nnx.Param(w.values, out_sharding=("embed", "mlp", None, None, None), eager_sharding=False)
            self.mask = nnx.Variable(w.mask, out_sharding=("embed", "mlp"), eager_sharding=False)

    state = nnx.state(Layer())
    got = placement.sharding_rules(mesh, nnx.get_partition_spec(state), {"mlp": "tensor"})
    placed = jax.device_put(nnx.to_pure_dict(state), nnx.to_pure_dict(got))
    want = placement.shardings(w, NamedSharding(mesh, P(None, "tensor")))
    assert placed["values"].sharding == want.values
    assert placed["mask"].sharding == want.mask


def _state(rng):
    w = oracle.draw(rng, (2, IN, OUT), "8:32", jnp.bfloat16, fill=oracle.normal)
    return {"w": w, "q": nms.quantize(w, jnp.int8), "moments": (w.values * 2,), "step": jnp.int32(3)}


def _places(mesh):
    weight = NamedSharding(mesh, P(None, "data", "tensor"))
    return {"w": weight, "q": weight, "moments": weight, "step": NamedSharding(mesh, P())}


def test_saved_on_one_mesh_and_restored_on_another(rng, mesh, tmp_path):
    """2x4 to 8x1: values and mask together, bit for bit, each straight into its new sharding."""
    state = _state(rng)
    sharded_checkpoint.save(tmp_path / "step_3", jax.device_put(state, placement.shardings(state, _places(mesh))))
    other = _mesh(8, 1)
    like = placement.abstract(jax.eval_shape(lambda: state), _places(other))
    got = sharded_checkpoint.restore(tmp_path / "step_3", like)
    oracle.assert_same_bits(got, state)
    assert [a.sharding for a in jax.tree.leaves(got)] == [a.sharding for a in jax.tree.leaves(like)]
    got["w"].validate()
    dense_bytes = 2 * IN * OUT * 2
    assert max(s.data.nbytes for a in jax.tree.leaves(got) for s in a.addressable_shards) < dense_bytes / 8
    assert sharded_checkpoint.describe(tmp_path / "step_3")["weights"] == {
        "['w']": {"pattern": "8:32", "shape": [2, IN, OUT]},
        "['q']": {"pattern": "8:32", "shape": [2, IN, OUT]},
    }


def test_restoring_as_another_pattern_raises(rng, mesh, tmp_path):
    """A mask of 2:8 has the shape of one of 8:32."""
    w = oracle.draw(rng, (IN, OUT), "8:32")
    sharded_checkpoint.save(tmp_path / "w", {"w": w})
    replicated = NamedSharding(mesh, P())
    like = placement.abstract({"w": oracle.draw(rng, (IN, OUT), "2:8")}, replicated)
    with pytest.raises(ValueError, match=r"the weight \['w'\] in .* is 256x64 8:32, expected 256x64 2:8"):
        sharded_checkpoint.restore(tmp_path / "w", like)
    with pytest.raises(ValueError, match=r"the weight \['w'\] .* expected missing"):
        sharded_checkpoint.restore(tmp_path / "w", {"v": jnp.ones(3)})
