"""Pruning and training helpers on meshes of explicit axis types: on each device's part, or an error with the remedy."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import PartitionSpec as P

import jax_nmsparse as nms
from jax_nmsparse import pruning, training
from jax_nmsparse.pruning import Statistics

DATA, TENSOR = 2, 4
IN, OUT, TOKENS = 32 * TENSOR, 64, 16
SPECS = [P("data"), P(None, "tensor"), P("tensor", "data"), P(("data", "tensor"))]

pytestmark = pytest.mark.skipif(jax.device_count() < DATA * TENSOR, reason="fewer than 8 devices")


@pytest.fixture(autouse=True)
def mesh():
    """As `jax.make_mesh` makes them: explicit."""
    mesh = jax.make_mesh((DATA, TENSOR), ("data", "tensor"), devices=jax.devices()[: DATA * TENSOR])
    with jax.set_mesh(mesh):
        yield mesh


def _keep(w, n=2, m=4):
    """Elements among the n largest of their group of m rows; no ties in random numbers."""
    groups = np.abs(w.astype(np.float64)).reshape(-1, m, w.shape[1])
    order = np.argsort(np.argsort(-groups, axis=1), axis=1)
    return (order < n).reshape(w.shape)


def _spec(array):
    spec = tuple(jax.typeof(array).sharding.spec)
    return spec + (None,) * (array.ndim - len(spec))


@pytest.mark.parametrize("spec", SPECS[:3])
@pytest.mark.parametrize("jit", [False, True])
def test_sr_ste_works_on_parts(rng, spec, jit):
    w, decay = oracle.normal(rng, (IN, OUT)), 0.125
    placed = jax.device_put(w, spec)

    def loss(w):
        return jnp.sum(training.sr_ste(w, "2:4", decay) ** 2)

    forward, backward = lambda w: training.sr_ste(w, "2:4", decay, progress=0.5), jax.grad(loss)
    if jit:
        forward, backward = jax.jit(forward), jax.jit(backward)
    got, gradient = forward(placed), backward(placed)
    np.testing.assert_array_equal(got, np.where(_keep(w, n=3), w, 0))
    oracle.assert_close(gradient, np.where(_keep(w), 2.0 * w, decay * w))
    want = (*spec, None)[:2]
    assert _spec(got) == _spec(gradient) == tuple(want)


@pytest.mark.parametrize("spec", SPECS[:3])
def test_optimiser_and_metrics_work_on_parts(rng, spec):
    w, before = oracle.normal(rng, (IN, OUT)), oracle.normal(rng, (IN, OUT))
    params = {"kernel": jax.device_put(w, spec)}
    decay = training.sr_ste_decay("2:4", 0.5)
    updates: Any = decay.update({"kernel": jnp.zeros_like(params["kernel"])}, decay.init(params), params)[0]
    oracle.assert_close(updates["kernel"], np.where(_keep(w), 0, 0.5 * w))
    masked = training.masked_forward(params, "2:4")
    np.testing.assert_array_equal(masked["kernel"], np.where(_keep(w), w, 0))
    found = training.mask_statistics(params, "2:4", {"kernel": jax.device_put(before, spec)})["kernel"]
    share = np.abs(w)[_keep(w)].sum(dtype=np.float64) / np.abs(w).sum(dtype=np.float64)
    np.testing.assert_allclose(found["kept_magnitude"], share, rtol=1e-5)
    np.testing.assert_allclose(found["flip_rate"], np.mean(_keep(w) != _keep(before)), rtol=1e-6)


def test_parts_that_cut_windows_are_refused(rng):
    w = jax.device_put(oracle.normal(rng, (IN, OUT)), SPECS[3])
    with pytest.raises(ValueError, match="sr_ste: in_features is 128, expected a multiple of 256 .*placement.pad"):
        training.sr_ste(w, "2:4")


@pytest.mark.parametrize("spec", [P("data"), P(None, "tensor"), P("data", "tensor"), P(("data", "tensor"))])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("gram", [False, True])
def test_statistics_add_up_over_devices(rng, spec, masked, gram):
    x = oracle.normal(rng, (TOKENS, 32))
    where = rng.random(TOKENS) < 0.5 if masked else None
    found = Statistics.from_inputs(jax.device_put(x, spec), where=where, gram=gram)
    counted = x.astype(np.float64)[slice(None) if where is None else where]
    assert int(found.tokens) == len(counted)
    oracle.assert_close(found.squares, np.square(counted).sum(0), depth=TOKENS)
    if gram:
        oracle.assert_close(found.gram, counted.T @ counted, depth=TOKENS)
    else:
        assert found.gram is None
    again = found.update(jax.device_put(x, spec), where=where)
    assert int(again.tokens) == 2 * len(counted)


def test_statistics_of_split_sequences(rng):
    x = oracle.normal(rng, (DATA, 8, 32))
    found = jax.jit(Statistics.from_inputs)(jax.device_put(x, P("data", "tensor")))
    rows = x.reshape(-1, 32).astype(np.float64)
    assert int(found.tokens) == len(rows)
    oracle.assert_close(found.gram, rows.T @ rows, depth=TOKENS)


def test_calibration_and_methods(rng):
    """A data-parallel batch; wanda on parts of the weight, the others where it is whole."""
    net, x = nn.Dense(OUT, use_bias=False), oracle.normal(rng, (TOKENS, IN))
    w = oracle.normal(rng, (IN, OUT))
    variables = {"params": {"kernel": jax.device_put(w, P())}}
    ((_, inputs),) = pruning.calibrate(net.apply, variables, [jax.device_put(x, P("data"))]).items()
    for spec in SPECS[:3]:
        placed = jax.device_put(w, spec)
        np.testing.assert_array_equal(
            nms.prune(placed, "2:4", method="wanda", inputs=inputs).todense(),
            np.where(_keep(w * np.linalg.norm(x, axis=0)[:, None]), w, 0),
        )
        for name, call in (
            ("sparsegpt: dense", lambda placed=placed: nms.prune(placed, "2:4", method="sparsegpt", inputs=inputs)),
            ("find_permutation: scores", lambda placed=placed: pruning.find_permutation(jnp.abs(placed), "2:4")),
            ("transposable_mask: scores", lambda placed=placed: pruning.transposable_mask(jnp.abs(placed), "2:4")),
        ):
            with pytest.raises(ValueError, match=rf"{name} of shape \(128, 64\) is split .*jax\.sharding\.reshard"):
                call()
        whole = jax.sharding.reshard(placed, P())
        pruned = nms.prune(whole, "2:4", method="sparsegpt", inputs=inputs).validate()
        error = np.linalg.norm(x @ (np.asarray(pruned.todense()) - w))
        wanda = np.linalg.norm(x @ np.where(_keep(w * np.linalg.norm(x, axis=0)[:, None]), 0, w))
        assert error < wanda


_FOLDS = [
    ((128, 8, 16), 1, (None, "tensor"), True),
    ((128, 8, 16), 1, ("data", "tensor"), True),
    ((128, 8, 16), 1, (None, None, "tensor"), False),
    ((8, 16, 128), 2, ("tensor",), True),
    ((8, 16, 128), 2, (None, None, "tensor"), True),
    ((8, 16, 128), 2, (None, "tensor"), False),
    ((1, 128, 8), 2, (None, "tensor"), True),
]


@pytest.mark.parametrize(("shape", "contracted", "spec", "folds"), _FOLDS)
def test_kernels_of_several_axes(rng, shape, contracted, spec, folds):
    """Axes that become one may be split along the first; others are refused before the model is changed."""
    kernel = rng.standard_normal(shape).astype(np.float32)
    rules = {".*kernel": nms.Rule("8:32", contracted=contracted)}
    params = {"attention": {"kernel": jax.device_put(kernel, P(*spec))}}
    if not folds:
        with pytest.raises(ValueError, match=r"sparsify: attention/kernel: the kernel .* along the first of them only"):
            nms.sparsify(params, rules)
        np.testing.assert_array_equal(params["attention"]["kernel"], kernel)
        return
    got, _ = nms.sparsify(params, rules)
    want, _ = nms.sparsify({"attention": {"kernel": kernel}}, rules)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    jax.tree.map(np.testing.assert_array_equal, nms.densify(got), nms.densify(want))


def test_contracted_axes_split_along_another_than_the_first(rng):
    layer = nms.NMSparseDenseGeneral(features=32, axis=(-2, -1), pattern="8:32")
    x = rng.standard_normal((TOKENS, 8, 16)).astype(np.float32)
    variables = layer.init(jax.random.key(0), x)
    with pytest.raises(ValueError, match=r"x of shape .* along the first of them only"):
        layer.apply(variables, jax.device_put(x, P(None, None, "tensor")))
