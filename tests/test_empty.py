"""Sizes of zero: no tokens and no layers are fine, a weight without rows or columns is refused by name."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_nmsparse as nms
from jax_nmsparse import pruning
from jax_nmsparse.nnx import NMSparseLinear
from jax_nmsparse.pruning import Statistics

PATTERN = nms.NMPattern(2, 4)


@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (0, 0)])
def test_weights_without_rows_or_columns_are_refused(shape):
    w, inputs = jnp.ones(shape), Statistics.from_inputs(jnp.ones((4, shape[0])))
    calls = {
        "prune": lambda: nms.prune(w, PATTERN),
        "fromdense": lambda: nms.NMSparse.fromdense(w, PATTERN),
        "wanda_scores": lambda: pruning.wanda_scores(w, inputs),
        "sparsegpt": lambda: pruning.sparsegpt(w, PATTERN, inputs),
        "find_permutation": lambda: pruning.find_permutation(w, PATTERN),
        "transposable_mask": lambda: pruning.transposable_mask(w, PATTERN),
        "sparsify: kernel": lambda: nms.sparsify({"kernel": w}, "2:4"),
    }
    for name, call in calls.items():
        with pytest.raises(
            ValueError, match=rf"{name}: .*has shape \({shape[0]}, {shape[1]}\), expected .*at least one"
        ):
            call()
    layers = {
        "NMSparseDense": lambda: nms.NMSparseDense(shape[1], pattern="2:4").init(
            jax.random.key(0), jnp.ones((3, shape[0]))
        ),
        "NMSparseLinear": lambda: NMSparseLinear(
            *shape, pattern="2:4", kernel_init=nnx.initializers.ones, rngs=nnx.Rngs(0)
        ),
    }
    for call in layers.values():
        with pytest.raises(
            ValueError, match=f"in_features {shape[0]} and out_features {shape[1]} has no weight|at least"
        ):
            call()


@pytest.mark.parametrize("shape", [(0, 8), (0, 5, 8), (5, 0, 8)])
def test_no_tokens(shape):
    """Nothing is known of the inputs: all of them score 0, and the first of every group stay."""
    for where in (None, np.ones(shape[:-1], bool)):
        inputs = Statistics.from_inputs(jnp.ones(shape), where=where)
        assert int(inputs.tokens) == 0
        np.testing.assert_array_equal(inputs.gram, np.zeros((8, 8)))
    w = jnp.arange(1.0, 33.0).reshape(8, 4)
    first = np.where(np.arange(8)[:, None] % 4 < 2, w, 0)
    np.testing.assert_array_equal(nms.prune(w, PATTERN, method="wanda", inputs=inputs).todense(), first)
    # H is the identity, so SparseGPT is magnitude pruning.
    got = nms.prune(w, PATTERN, method="sparsegpt", inputs=inputs).todense()
    np.testing.assert_array_equal(got, nms.prune(w, PATTERN).todense())


def test_calibration_without_tokens():
    net = nn.Dense(4)
    variables = net.init(jax.random.key(0), jnp.ones((1, 8)))
    (found,) = pruning.calibrate(net.apply, variables, [jnp.ones((0, 8)), jnp.ones((3, 8))]).values()
    assert int(found.tokens) == 3
    np.testing.assert_array_equal(found.squares, np.full(8, 3.0))


def test_no_layers():
    stacked, inputs = jnp.ones((0, 8, 4)), Statistics.from_inputs(jnp.ones((3, 8)))
    assert pruning.wanda_scores(stacked, inputs).shape == (0, 8, 4)
    assert pruning.transposable_mask(stacked, "2:4").shape == (0, 8, 4)
    assert nms.prune(stacked, "2:4", method="sparsegpt", inputs=inputs).shape == (0, 8, 4)
    variables, report = nms.sparsify({"kernel": stacked}, {"kernel": nms.Rule("2:4", stacked=1)})
    assert nms.densify(variables)["params"]["kernel"].shape == (0, 8, 4)
    assert report.layers[0].weight_error == 0
