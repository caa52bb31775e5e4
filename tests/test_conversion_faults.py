"""`sparsify` where something is wrong: all or nothing, odd names, errors of odd numbers, and tracing."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from flax import nnx

import jax_nmsparse as nms
from jax_nmsparse.nnx import NMSparseLinear
from jax_nmsparse.pruning import Statistics


def _statistics(gram=None, tokens: Any = 64, features=32):
    gram = np.eye(features, dtype=np.float32) if gram is None else gram
    return Statistics(jnp.asarray(tokens), jnp.ones(features), jnp.asarray(gram))


def _indefinite():
    gram = np.eye(32, dtype=np.float32)
    gram[0, 1] = gram[1, 0] = 9
    return _statistics(gram)


def _failing(kind):
    """Rules and options that the second of two layers cannot follow, and the message."""
    good, indefinite = _statistics(), _indefinite()
    return {
        "indefinite": (
            "2:4",
            {"method": "sparsegpt", "statistics": {"0": good, "1": indefinite}},
            "1/kernel: .*definite",
        ),
        "nan": ({"kernel": nms.Rule("2:4", dtype="int8")}, {}, "1/kernel: the kernel holds NaN or Inf"),
        "mask": ("2:4", {"masks": {"1": np.ones((32, 8), bool)}}, "1/kernel: fromdense: 64 groups hold more than 2"),
        "statistics": (
            "2:4",
            {"method": "wanda", "statistics": {"0": good, "1": _statistics(features=16)}},
            r"1/kernel: prune: inputs have squares of shape \(16,\), expected \(32,\)",
        ),
        "tuple": ("2:4", {}, "pair/0: a layer lies in a tuple, which cannot be changed in place"),
    }[kind]


@pytest.mark.parametrize("kind", ["indefinite", "nan", "mask", "statistics", "tuple"])
@pytest.mark.parametrize("donate", [False, True])
def test_all_or_nothing(kind, donate):
    rules, options, message = _failing(kind)
    if kind == "tuple":
        make = lambda: nnx.Linear(32, 8, rngs=nnx.Rngs(0))  # noqa: E731
        model: Any = nnx.Dict(first=make(), pair=nnx.data((make(),)))
        layers = [model.first, model.pair[0]]
    else:
        model = nnx.List(nnx.Linear(32, 8, rngs=nnx.Rngs(i)) for i in range(2))
        layers = list(model)
    if kind == "nan":
        layers[1].kernel[...] = layers[1].kernel[...].at[0, 0].set(jnp.nan)
    before = [np.array(layer.kernel[...]) for layer in layers]
    with pytest.raises((ValueError, TypeError), match=message):
        nms.sparsify(model, rules, donate=donate, **options)
    now = [model.first, model.pair[0]] if kind == "tuple" else list(model)
    assert [a is b for a, b in zip(now, layers, strict=True)] == [True, True]
    for layer, kernel in zip(now, before, strict=True):
        np.testing.assert_array_equal(layer.kernel[...], kernel)


def test_a_tree_that_fails_keeps_its_kernels():
    params = {name: {"kernel": jax.random.normal(jax.random.key(i), (32, 8))} for i, name in enumerate("ab")}
    options: Any = {"statistics": {"a": _statistics(), "b": _indefinite()}}
    with pytest.raises(ValueError, match="b/kernel: prune: x\\^T x of the inputs is not positive definite in float32"):
        nms.sparsify(params, "2:4", method="sparsegpt", donate=True, **options)
    assert not any(layer["kernel"].is_deleted() for layer in params.values())


# Errors of the report.


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e30, 8e37])
def test_errors_do_not_depend_on_the_scale(rng, scale):
    kernel = oracle.normal(rng, (32, 8)) * np.float32(scale)
    x = oracle.normal(rng, (64, 32))
    gram = (x.T @ x) * np.float32(min(scale, 1e30))
    statistics: Any = {"": _statistics(gram)}
    variables, report = nms.sparsify({"kernel": kernel}, "2:4", statistics=statistics)
    errors: Any = (report.layers[0].weight_error, report.layers[0].output_error)
    wide = kernel.astype(np.float64)
    delta = wide - np.asarray(nms.densify(variables)["params"]["kernel"], np.float64)
    np.testing.assert_allclose(errors[0], np.linalg.norm(delta) / np.linalg.norm(wide), rtol=1e-5)
    energy = [np.sum(k * (gram.astype(np.float64) @ k)) for k in (delta, wide)]
    np.testing.assert_allclose(errors[1], np.sqrt(energy[0] / energy[1]), rtol=1e-4)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_errors_of_what_is_not_finite_are_nan(rng, value):
    kernel = oracle.normal(rng, (32, 8))
    kernel[3, 5] = value
    report: Any = nms.sparsify({"kernel": kernel}, "2:4")[1]
    assert np.isnan(report.layers[0].weight_error) and "nan" in str(report)


def test_errors_of_zeros():
    statistics: Any = {"": _statistics(np.zeros((32, 32), np.float32))}
    report: Any = nms.sparsify({"kernel": np.zeros((32, 8), np.float32)}, "2:4", statistics=statistics)[1]
    assert (report.layers[0].weight_error, report.layers[0].output_error) == (0, 0)


# Names.


def test_names_with_slashes_and_integers(rng):
    kernels = {key: oracle.normal(rng, (32, 8)) for key in ("a/b", 0, 7)}
    params = {"net/x": {key: {"kernel": kernel, "bias": np.zeros(8)} for key, kernel in kernels.items()}}
    ones = lambda rng, shape, dtype: np.ones(shape, dtype)  # noqa: E731
    mask = np.array(oracle.draw(rng, (32, 8), "2:4", fill=ones).keep())
    variables, report = nms.sparsify(params, "2:4", masks={"net/x/7": mask})
    assert [layer.path for layer in report.layers] == ["net/x/0", "net/x/7", "net/x/a/b"]
    dense = nms.densify(variables)["params"]["net/x"]
    assert list(dense) == [0, 7, "a/b"]
    for key in ("a/b", 0):
        np.testing.assert_array_equal(dense[key]["kernel"], nms.prune(kernels[key], "2:4").todense())
    np.testing.assert_array_equal(dense[7]["kernel"], np.where(mask, kernels[7], 0))


def test_two_layers_of_one_path_are_refused(rng):
    kernel = oracle.normal(rng, (32, 8))
    params = {"a/b": {"kernel": kernel}, "a": {"b": {"kernel": kernel}}, 1: {"bias": kernel}}
    with pytest.raises(ValueError, match="two layers have the path a/b/kernel, so no rule, mask or statistics"):
        nms.sparsify(params, "2:4")


# Tracing.


def test_tree_under_jit_and_eval_shape(rng):
    params = {"up": {"kernel": oracle.normal(rng, (32, 8)), "bias": np.zeros(8, np.float32)}}
    rules = {"up": nms.Rule("2:4", dtype="int8")}
    want, report = nms.sparsify(params, rules)
    oracle.assert_same_bits(jax.jit(lambda tree: nms.sparsify(tree, rules, donate=True)[0])(params), want)
    shapes = jax.eval_shape(lambda tree: nms.sparsify(tree, rules)[0], params)
    assert jax.tree.map(lambda s: (s.shape, s.dtype), shapes) == jax.tree.map(lambda a: (a.shape, a.dtype), want)
    seen: list[Any] = []
    jax.eval_shape(lambda tree: seen.append(nms.sparsify(tree, rules)[1]), params)
    assert seen[0].layers[0].weight_error is None and report.layers[0].weight_error
    assert str(seen[0]).splitlines()[-1].startswith("total")


def test_masks_and_methods_under_jit(rng):
    params = {"kernel": oracle.normal(rng, (32, 8))}
    mask = np.array(nms.prune(oracle.normal(rng, (32, 8)), "2:4").keep())
    options: Any = [{"masks": {"kernel": mask}}, {"method": "sparsegpt", "statistics": {"": _statistics()}}]
    for chosen in options:
        run = lambda tree, chosen=chosen: nms.sparsify(tree, "2:4", **chosen)[0]  # noqa: E731
        got, want = jax.jit(run)(params), run(params)
        oracle.assert_close(nms.densify(got)["params"]["kernel"], nms.densify(want)["params"]["kernel"], depth=32)
    with pytest.raises(ValueError, match="kernel: fromdense: 64 groups hold more than 2"):
        jax.eval_shape(lambda tree: nms.sparsify(tree, "2:4", masks={"kernel": np.ones((32, 8), bool)})[0], params)
    with pytest.raises(TypeError, match="kernel: fromdense: the dense weight is traced"):
        jax.eval_shape(lambda tree, mask: nms.sparsify(tree, "2:4", masks={"kernel": mask})[0], params, mask)


def test_module_under_jit_and_eval_shape():
    def make():
        return nms.sparsify(nnx.List([nnx.Linear(32, 8, rngs=nnx.Rngs(0))]), "2:4")[0]

    abstract: Any = nnx.eval_shape(make)
    assert isinstance(abstract[0], NMSparseLinear) and abstract[0].values.shape == make()[0].values.shape
    model: Any = nnx.List([nnx.Linear(32, 8, rngs=nnx.Rngs(0))])

    @nnx.jit
    def convert(model):
        nms.sparsify(model, "2:4", donate=True)

    convert(model)
    oracle.assert_same_bits(model[0].weight, make()[0].weight)


def test_shapes_alone_are_refused_with_the_remedy():
    with pytest.raises(TypeError, match=r"a/kernel is a ShapeDtypeStruct, expected an array; .*jax\.eval_shape"):
        nms.sparsify({"a": {"kernel": jax.ShapeDtypeStruct((32, 8), jnp.float32)}}, "2:4")
    abstract: Any = nnx.eval_shape(lambda: nnx.List([nnx.Linear(32, 8, rngs=nnx.Rngs(0))]))
    with pytest.raises(TypeError, match=r"0/kernel is a ShapeDtypeStruct, expected an array; .*nnx\.eval_shape"):
        nms.sparsify(abstract, "2:4")


# Leaves and rules that do not go together.


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "bfloat16", "float16"])
def test_kernels_of_every_dtype(rng, dtype):
    kernel = np.asarray(oracle.integers(rng, (32, 8))).astype(jnp.dtype(dtype))
    variables, report = nms.sparsify({"kernel": kernel}, "2:4")
    wide = kernel.astype(np.float64)
    delta = wide - np.asarray(nms.densify(variables)["params"]["kernel"]).astype(np.float64)
    errors: Any = report.layers[0].weight_error
    np.testing.assert_allclose(errors, np.linalg.norm(delta) / np.linalg.norm(wide), rtol=1e-5)


def test_masks_as_lists(rng):
    kernel, mask = oracle.normal(rng, (4, 1)), [[True], [False], [False], [True]]
    variables, _ = nms.sparsify({"kernel": kernel}, "2:4", masks={"kernel": mask})
    np.testing.assert_array_equal(nms.densify(variables)["params"]["kernel"], np.where(mask, kernel, 0))


@pytest.mark.parametrize(
    ("leaf", "rule", "error", "message"),
    [
        (
            np.ones((8, 8), np.int8),
            nms.Rule("2:4", dtype="int8"),
            TypeError,
            "dtype int8, expected a float dtype where",
        ),
        (np.ones((8, 8)), nms.Rule("2:4", contracted=2), ValueError, "expected more axes than the 2 contracted and 0"),
        (np.ones(8), "2:4", ValueError, r"has shape \(8,\), of which the parameters alone do not say"),
        ([[1.0]], "2:4", TypeError, "a/kernel is a list, expected an array$"),
        (nnx.Param(jnp.ones((8, 8))), "2:4", TypeError, "is a Param, expected an array; give sparsify the nnx.Module"),
    ],
)
def test_what_does_not_go_together(leaf, rule, error, message):
    with pytest.raises(error, match=message):
        nms.sparsify({"a": {"kernel": leaf}}, {"kernel": rule})


def test_densify_names_the_layer_that_is_damaged(rng):
    variables, _ = nms.sparsify({"net": {0: {"kernel": oracle.normal(rng, (32, 8))}}}, "2:4")
    variables["params"]["net"][0]["values"] = variables["params"]["net"][0]["values"][:, :4]
    with pytest.raises(ValueError, match="densify: net/0: NMSparse: values has shape"):
        nms.densify(variables)


# Rules.


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"stacked": -1}, ValueError, "stacked is -1, expected a number of axes, at least 0"),
        ({"stacked": 1.5}, TypeError, "stacked is 1.5, expected a number of axes"),
        ({"stacked": True}, ValueError, "stacked is True, expected"),
        ({"contracted": 0}, ValueError, "contracted is 0, expected a number of axes, at least 1"),
        ({"contracted": "1"}, TypeError, "contracted is '1', expected a number of axes"),
        ({"damping": -0.1}, ValueError, "damping is -0.1, expected a finite number of at least 0"),
        ({"damping": np.nan}, ValueError, "damping is nan, expected"),
        ({"damping": "high"}, TypeError, "damping is 'high', expected a number"),
        ({"dtype": "floaty"}, TypeError, "dtype is 'floaty', expected one of float32"),
        ({"method": "obd"}, ValueError, "Rule: method is 'obd', expected one of magnitude"),
        ({"pattern": 24}, TypeError, "Rule: pattern is a int, expected an NMPattern or a string"),
    ],
)
def test_rule_checks_its_fields(fields, error, message):
    with pytest.raises(error, match=f"{message}"):
        nms.Rule(**{"pattern": "2:4", **fields})


def test_float64_without_64_bit_types_is_refused():
    with pytest.raises(ValueError, match="the rule of kernel asks for float64, .*; set JAX_ENABLE_X64=1"):
        nms.sparsify({"kernel": np.ones((32, 8), np.float32)}, {"kernel": nms.Rule("2:4", dtype="float64")})


def test_float64_is_kept(x64, rng):
    kernel = oracle.normal(rng, (32, 8))
    variables, report = nms.sparsify({"kernel": kernel}, {"kernel": nms.Rule("2:4", dtype="float64")})
    assert variables["params"]["values"].dtype == jnp.float64 and report.layers[0].dtype == "float64"
