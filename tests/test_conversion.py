"""`sparsify` and `densify` of whole models, linen and NNX."""

import functools
import gc
import io
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from flax import nnx

import jax_nmsparse as nms
from jax_nmsparse import tables
from jax_nmsparse.conversion import LayerReport, Report, kernels
from jax_nmsparse.linen import MASK_COLLECTION
from jax_nmsparse.nnx import NMSparseEmbed, NMSparseLinear, NMSparseLinearGeneral


class Net(nn.Module):
    """Tied embedding, one attention projection pair, an MLP; dense, or sparse by patterns."""

    sparse: bool = False

    @nn.compact
    def __call__(self, ids):
        def general(features, axis, name):
            if self.sparse:
                return nms.NMSparseDenseGeneral(features, axis=axis, pattern="2:4/1x4", name=name)
            return nn.DenseGeneral(features, axis=axis, name=name)

        def dense(features, name):
            if self.sparse:
                return nms.NMSparseDense(features, pattern="8:32", name=name)
            return nn.Dense(features, name=name)

        embed: Any = nms.NMSparseEmbed(50, 32, pattern="4:8") if self.sparse else nn.Embed(50, 32)
        x = embed(ids)
        x = x + general(32, (-2, -1), "out")(general((4, 8), -1, "query")(x))
        x = x + nn.LayerNorm(name="norm")(dense(32, "down")(nn.relu(dense(64, "up")(x))))
        return embed.attend(x)


RULES = {
    "query/kernel": nms.Rule("2:4/1x4", contracted=1),
    "out/kernel": nms.Rule("2:4/1x4", contracted=2),
    "kernel": "8:32",
    "embedding": "4:8",
}
IDS = np.array([[1, 2, 3, 49], [7, 0, 5, 9]])


def rename(variables):
    """Autonamed embedding: nn.Embed_0 and NMSparseEmbed_0."""
    return {
        c: {("NMSparseEmbed_0" if k == "Embed_0" else k): v for k, v in tree.items()} for c, tree in variables.items()
    }


@pytest.fixture(scope="module")
def trained():
    return jax.jit(Net().init)(jax.random.key(0), IDS)


def test_linen_model_and_back(trained):
    """The converted variables run in the sparse model, and densified in the dense one, with the same logits."""
    variables, report = nms.sparsify(trained, RULES)
    got = jax.jit(Net(sparse=True).apply)(rename(variables), IDS)
    dense = nms.densify(variables)
    assert jax.tree.map(jnp.shape, dense) == jax.tree.map(jnp.shape, trained)
    oracle.assert_close(got, jax.jit(Net().apply)(dense, IDS), depth=200)
    up = nms.NMSparseDense.from_dense(trained["params"]["up"], "8:32")
    oracle.assert_same_bits({c: variables[c]["up"] for c in up}, up)
    kernel = np.asarray(dense["params"]["query"]["kernel"]).reshape(32, 32)
    assert ((kernel.reshape(8, 4, 8, 4) != 0).any(-1).sum(1) == 2).all()
    table = np.asarray(dense["params"]["Embed_0"]["embedding"])
    assert ((table.reshape(50, 4, 8) != 0).sum(-1) == 4).all()
    assert [layer.path for layer in report.layers] == ["Embed_0", "down", "out", "query", "up"]
    for layer, leaf in zip(report.layers, ("embedding", *["kernel"] * 4), strict=True):
        before = np.asarray(trained["params"][layer.path][leaf], np.float64)
        after = np.asarray(dense["params"][layer.path][leaf], np.float64)
        assert layer.weight_error is not None
        np.testing.assert_allclose(
            layer.weight_error, np.linalg.norm(before - after) / np.linalg.norm(before), rtol=1e-5
        )
        assert layer.bytes_before == before.size * 4
    sparse_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(variables))
    dense_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(trained))
    formats = 4 * len(report.layers)
    assert report.bytes_before - report.bytes_after == dense_bytes - sparse_bytes + formats


def test_rules_take_the_first_that_is_found_and_leave_the_rest_dense(trained):
    params = trained["params"]
    variables, report = nms.sparsify(
        params, {"query|out": None, "up": nms.Rule("2:4", dtype="bfloat16"), "down": nms.Rule("1:4", dtype=jnp.int8)}
    )
    assert {layer.path: (layer.pattern, layer.dtype, layer.note) for layer in report.layers} == {
        "Embed_0": ("dense", "float32", "no rule"),
        "query": ("dense", "float32", "rule 'query|out'"),
        "out": ("dense", "float32", "rule 'query|out'"),
        "up": ("2:4", "bfloat16", ""),
        "down": ("1:4", "int8", ""),
    }
    assert set(variables[MASK_COLLECTION]) == {"up", "down"}
    assert variables["params"]["query"]["kernel"] is params["query"]["kernel"]
    assert set(params["up"]) == {"kernel", "bias"}, "the caller's tree is unchanged"
    layer: Any = nms.NMSparseDense(32, pattern="1:4", values_dtype=jnp.int8)
    down = {c: variables[c]["down"] for c in variables}
    assert layer.apply(down, jnp.ones(64)).shape == (32,)


def test_stacked_layers():
    """Parameters of nn.scan: the leading axis is one of layers."""
    kernel, bias = jax.random.normal(jax.random.key(0), (3, 32, 16)), jnp.zeros((3, 16))
    variables, report = nms.sparsify({"mlp": {"kernel": kernel, "bias": bias}}, {"mlp": nms.Rule("2:4", stacked=1)})
    w = nms.NMSparseDense.to_weight({c: variables[c]["mlp"] for c in variables})
    oracle.assert_same_bits(w, nms.prune(kernel, "2:4"))
    assert report.layers[0].shape == (3, 32, 16)
    np.testing.assert_array_equal(nms.densify(variables)["params"]["mlp"]["kernel"], w.todense())


@pytest.mark.parametrize(
    ("rules", "options", "message"),
    [
        ({"query": "2:4"}, {}, r"query/kernel has shape \(32, 4, 8\).*Rule\(pattern, contracted=.*'query': None"),
        (
            {"out/kernel": nms.Rule("2:4", contracted=1)},
            {},
            r"out/kernel .* its bias \(32,\), which does not fit 1 contr",
        ),
        ({"nothing": "2:4"}, {}, "the rule 'nothing' matches no layer.*the layers are Embed_0/embedding, down/kernel"),
        ({"up": "2:4", "up/kernel": "1:4"}, {}, "the rule 'up/kernel' matches no layer that no rule before it matches"),
        ({"(": "2:4"}, {}, "'\\(' is no regular expression"),
        ({"up": "2:4"}, {"method": "random"}, "method is 'random', expected one of magnitude, wanda, sparsegpt"),
        ({"up": "2:4"}, {"method": "wanda"}, "method 'wanda' needs statistics of what up reads"),
        (
            {"up": "2:4"},
            {"masks": {"up": np.ones((3, 3), bool)}},
            r"the mask of up/kernel has shape \(3, 3\), expected",
        ),
        (
            {"up": "2:4"},
            {"masks": {"up": np.ones((32, 64), bool)}},
            "up/kernel: fromdense: 512 groups hold more than 2",
        ),
        ({"up": "2:4"}, {"masks": [1]}, "masks is a list, expected a mapping"),
        ({"up": "2:4"}, {"statistics": {"up": 1.0}}, "statistics of up is a float, expected Statistics"),
        ({"up": "4:2"}, {}, "n is 4 with m = 2"),
        (["2:4"], {}, "rules is a list, expected a mapping"),
    ],
)
def test_what_cannot_be_done_is_said_first(trained, rules, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        nms.sparsify(trained, rules, **options)


def test_refuses_other_models_layers_and_dtypes():
    with pytest.raises(TypeError, match="the model is a list, expected an nnx.Module"):
        nms.sparsify([1], "2:4")
    with pytest.raises(TypeError, match="the model is a int"):
        nms.densify(3)
    odd = {"kernel": jnp.ones((8, 8)), "scale": jnp.ones(8)}
    with pytest.raises(ValueError, match="odd/kernel cannot become sparse: it lies beside scale"):
        nms.sparsify({"odd": odd}, "2:4")
    with pytest.raises(TypeError, match="has dtype int32, supported are float32"):
        nms.sparsify({"kernel": jnp.ones((8, 8), jnp.int32)}, "2:4")
    with pytest.raises(TypeError, match="dtype is int32, expected one of float32"):
        nms.Rule("2:4", dtype="int32")


def test_boolean_masks_of_other_libraries(rng):
    """jaxpruner#4, #8: masks nested like the parameters, with None where nothing is pruned, give the same logits."""
    net = nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(8)])
    x = oracle.normal(rng, (5, 64))
    trained = net.init(jax.random.key(0), x)
    ones = lambda rng, shape, dtype: np.ones(shape, dtype)  # noqa: E731
    first = np.array(oracle.draw(rng, (64, 32), "2:4", fill=ones).keep())
    first[:, 3] = False
    second = np.array(oracle.draw(rng, (32, 8), "2:4", fill=ones).keep()).astype(np.uint8)
    masks = {"layers_0": {"kernel": first, "bias": None}, "layers_2": {"kernel": second, "bias": None}}
    variables, report = nms.sparsify(trained, "2:4", masks=masks)
    assert [layer.method for layer in report.layers] == ["mask", "mask"]
    masked = jax.tree.map(lambda leaf: leaf, trained)
    for name, mask in (("layers_0", first), ("layers_2", second)):
        masked["params"][name]["kernel"] *= mask
    jax.tree.map(np.testing.assert_array_equal, nms.densify(variables), masked)


def test_statistics_choose_and_measure(rng):
    """SparseGPT by calibration: the error of the output is what the report says, and less than that of magnitude."""
    net = nn.Sequential([nn.Dense(16), nn.relu, nn.Dense(8)])
    x = oracle.normal(rng, (128, 32)) @ oracle.normal(rng, (32, 32))
    trained: Any = net.init(jax.random.key(0), x)
    statistics = nms.pruning.calibrate(net.apply, trained, [x])
    errors = {}
    for method in ("magnitude", "wanda", "sparsegpt"):
        variables, report = nms.sparsify(trained, {"layers_0": "2:4"}, method=method, statistics=statistics)
        dense, kernel = (
            np.asarray(v["params"]["layers_0"]["kernel"], np.float64) for v in (nms.densify(variables), trained)
        )
        want = np.linalg.norm(x @ (dense - kernel)) / np.linalg.norm(x.astype(np.float64) @ kernel)
        errors[method] = report.layers[0].output_error
        np.testing.assert_allclose(errors[method], want, rtol=1e-3)
        want = nms.prune(
            trained["params"]["layers_0"]["kernel"],
            "2:4",
            method=method,
            inputs=None if method == "magnitude" else statistics["layers_0"],
        )
        oracle.assert_same_bits(variables["params"]["layers_0"]["values"], want.values)
    assert errors["sparsegpt"] < errors["wanda"] < errors["magnitude"]


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_conversion_keeps_no_dense_copy_alive(monkeypatch, kind):
    """pytorch#115008, sparsegpt#1: at most one layer is in memory twice, and afterwards no kernel is left."""
    layers, seen = 4, []
    run = kernels.Job.run

    def counted(self, **options):
        done = run(self, **options)
        gc.collect()
        seen.append(sum(a.shape == (64, 96) for a in jax.live_arrays()))
        return done

    monkeypatch.setattr(kernels.Job, "run", counted)
    if kind == "nnx":
        model: Any = nnx.List(nnx.Linear(64, 96, rngs=nnx.Rngs(i)) for i in range(layers))
        nms.sparsify(model, "2:4")
    else:
        model = {f"l{i}": {"kernel": jax.random.normal(jax.random.key(i), (64, 96))} for i in range(layers)}
        nms.sparsify(model, "2:4", donate=True)
        assert all(layer["kernel"].is_deleted() for layer in model.values())
    # NNX: the layer in hand still holds its kernel, since only its replacement lets go.
    first = layers if kind == "nnx" else layers - 1
    assert seen == list(range(first, first - layers, -1))
    gc.collect()
    assert not [a for a in jax.live_arrays() if a.shape == (64, 96)]


def test_donation_spares_an_array_that_lies_in_two_places():
    kernel = jax.random.normal(jax.random.key(0), (16, 8))
    variables, _ = nms.sparsify({"a": {"kernel": kernel}, "b": {"kernel": kernel}}, "2:4", donate=True)
    a, b = (nms.NMSparseDense.to_weight({c: variables[c][name] for c in variables}) for name in "ab")
    oracle.assert_same_bits(a, b)
    assert not kernel.is_deleted()


def test_statistics_of_axes_in_any_order(rng):
    """Flax contracts axes in ascending order, whatever the order they are given in."""
    net = nn.DenseGeneral(5, axis=(-1, 1))
    x = oracle.normal(rng, (2, 3, 4, 6))
    (statistics,) = nms.pruning.calibrate(net.apply, net.init(jax.random.key(0), x), [x], gram=False).values()
    oracle.assert_close(statistics.squares, np.square(x.astype(np.float64)).sum((0, 2)).ravel(), depth=8)


# NNX.


class Model(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(4, 32, decode=False, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(32, 32, rngs=rngs) for _ in range(2)])
        self.again = self.layers[0]
        self.embed = nnx.Embed(50, 32, rngs=rngs)

    def __call__(self, ids):
        x = self.attention(self.embed(ids))
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return self.embed.attend(self.again(x))


def test_nnx_model_and_back(rng):
    model: Any = Model(nnx.Rngs(0))
    kernel = model.layers[1].kernel[...]
    same, report = nms.sparsify(model, {"attention/out": None, "kernel": "2:4", "embedding": "4:8/1x2"})
    assert same is model and model.again is model.layers[0]
    assert [(layer.path, layer.pattern) for layer in report.layers] == [
        ("attention/query", "2:4"),
        ("attention/key", "2:4"),
        ("attention/value", "2:4"),
        ("attention/out", "dense"),
        ("layers/0", "2:4"),
        ("layers/1", "2:4"),
        ("embed", "4:8/1x2"),
    ]
    assert type(model.attention.query) is NMSparseLinearGeneral and type(model.embed) is NMSparseEmbed
    oracle.assert_same_bits(model.layers[1].weight, nms.prune(kernel, "2:4"))
    sparse = nnx.jit(lambda model, ids: model(ids))(model, IDS)
    assert nms.densify(model) is model
    assert type(model.layers[0]) is nnx.Linear and model.again is model.layers[0]
    oracle.assert_close(sparse, nnx.jit(lambda model, ids: model(ids))(model, IDS), depth=200)


def test_nnx_keeps_dtypes_and_stacked_layers():
    keys = jax.random.split(jax.random.key(0), 3)
    make = nnx.vmap(lambda key: nnx.Linear(32, 16, dtype=jnp.bfloat16, precision="highest", rngs=nnx.Rngs(key)))
    model: Any = nnx.Dict(stack=make(keys), other=nnx.data([nnx.Linear(32, 8, use_bias=False, rngs=nnx.Rngs(0))]))
    kernel = model.stack.kernel[...]
    model, _ = nms.sparsify(
        model, {"stack": nms.Rule("2:4", dtype="bfloat16"), "kernel": nms.Rule("1:4", dtype="int8")}
    )
    assert model.stack.weight.shape == (3, 32, 16)
    oracle.assert_same_bits(model.stack.weight, nms.prune(kernel, "2:4").astype(jnp.bfloat16))
    assert (model.stack.dtype, model.stack.precision) == (jnp.bfloat16, "highest")
    assert isinstance(model.other[0], NMSparseLinear) and model.other[0].values_dtype == jnp.int8


def test_nnx_single_layer_subclasses_and_tuples():
    layer, report = nms.sparsify(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), "2:4")
    assert isinstance(layer, NMSparseLinear) and report.layers[0].path == ""
    assert isinstance(nms.densify(layer), nnx.Linear)

    class Own(nnx.Linear):
        pass

    model: Any = nnx.Dict(own=Own(8, 8, rngs=nnx.Rngs(0)), plain=nnx.Linear(8, 8, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="own/kernel cannot become sparse: its class is Own"):
        nms.sparsify(model, "2:4")
    assert type(model.plain) is nnx.Linear, "nothing was changed"
    nms.sparsify(model, {"own": None, "kernel": "2:4"})
    setattr(model.plain, "activation", "relu")  # noqa: B010
    with pytest.raises(ValueError, match="plain has activation='relu', which no dense layer"):
        nms.densify(model)
    tied: Any = nnx.Dict(a=nnx.Linear(8, 8, rngs=nnx.Rngs(0)), b=nnx.Linear(8, 8, rngs=nnx.Rngs(0)))
    tied.b.kernel = tied.a.kernel
    with pytest.raises(ValueError, match="b/kernel cannot become sparse: its kernel is that of a too"):
        nms.sparsify(tied, "2:4")
    model = nnx.Dict(pair=nnx.data((nnx.Linear(8, 8, rngs=nnx.Rngs(0)),)))
    with pytest.raises(TypeError, match="a layer lies in a tuple"):
        nms.sparsify(model, "2:4")


# Reports.


def test_report_as_text_and_drawn(trained, capsys):
    _, report = nms.sparsify(trained, {"up": "2:4", "down": nms.Rule("2:4", dtype="int8")}, progress=True)
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1].startswith("sparsify 5/5: up")
    text = str(report)
    assert len({line.index("dense") for line in text.splitlines() if "dense" in line}) == 1, "columns are aligned"
    assert text.splitlines()[-1].split()[0] == "total" and "int8" in text
    rich_console = pytest.importorskip("rich.console")
    stream = io.StringIO()
    rich_console.Console(width=200, file=stream).print(report)
    drawn = stream.getvalue()
    assert all(layer.path in drawn for layer in report.layers) and "total" in drawn


def test_report_shows_errors_of_outputs_where_known():
    layer = LayerReport("a", (4, 4), "2:4", "wanda", "float32", 64, 34, 0.5, 0.25)
    assert "output error" in str(Report((layer,)))
    assert "output error" not in str(Report((LayerReport("a", (4, 4), "dense", "", "float32", 64, 64),)))


def test_tables_without_rich(monkeypatch, capsys):
    monkeypatch.setattr(tables, "_rich", lambda: None)
    tables.show(tables.Table(("a", "#b"), [("x", "1")], "title"))
    assert capsys.readouterr().out.splitlines() == ["title", "a  b", "x  1"]
    assert list(tables.track("ab", "doing", 2)) == ["a", "b"]
    assert capsys.readouterr().err.splitlines() == ["doing 1/2: a", "doing 2/2: b"]


@pytest.mark.parametrize("width", [50, 200])
def test_tables_fit_the_terminal_or_are_plain(monkeypatch, width):
    """Drawn where there is room; otherwise plain text, in which no column is cut off."""
    rich_console = pytest.importorskip("rich.console")
    stream = io.StringIO()
    stream.isatty = lambda: True
    monkeypatch.setattr("sys.stdout", stream)
    monkeypatch.setattr(rich_console, "Console", functools.partial(rich_console.Console, width=width))
    layer = LayerReport("a/long/path/of/a/layer", (4096, 14336), "16:32/1x128", "magnitude", "bfloat16", 10**9, 10**8)
    tables.show(Report((layer,)))
    text = stream.getvalue()
    assert "100.0 MB" in text and "magnitude" in text
    assert ("─" in text) == (width == 200)
