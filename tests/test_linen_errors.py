"""What `NMSparseDense` says where variables, module and input do not fit together."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import errors

from jax_nmsparse.linen import MASK_COLLECTION, NMSparseDense


class Model(nn.Module):
    """Puts the layer at the path encoder/wi."""

    arguments: tuple = ()
    features: int = 24
    pattern: str = "2:4"

    @nn.compact
    def __call__(self, x):
        class Encoder(nn.Module):
            @nn.compact
            def __call__(_, x):
                return NMSparseDense(self.features, pattern=self.pattern, name="wi", **dict(self.arguments))(x)

        return Encoder(name="encoder")(x)


@pytest.mark.parametrize(
    ("model", "in_features", "message"),
    [
        (Model(pattern="16:32"), 40, "have pattern 2:4, expected 16:32"),
        (Model(pattern="8:32"), 40, "have pattern 2:4, expected 8:32"),
        (Model(pattern="2:4/1x8"), 40, "have pattern 2:4, expected 2:4/1x8"),
        (Model(), 39, r"x has trailing size 39, expected 40 \(= in_features of w 40x24\)"),
        (Model(), 400, r"x has trailing size 400, expected 40 \(= in_features of w 40x24\)"),
        (Model(features=32), 40, r"features is 32, expected 24 \(= out_features of w 40x24\)"),
        (Model(arguments=(("values_dtype", "int8"),)), 40, "scales"),
    ],
    ids=str,
)
def test_errors_name_the_layer_also_under_jit(model, in_features, message):
    variables = Model().init(jax.random.key(0), jnp.ones((1, 40)))
    for apply in (model.apply, jax.jit(model.apply)):
        with pytest.raises((ValueError, errors.FlaxError), match=message) as error:
            apply(variables, jnp.ones((3, in_features)))
        assert "encoder/wi" in str(error.value)


def test_errors_of_broken_variables():
    model = Model()
    variables = model.init(jax.random.key(0), jnp.ones((1, 40)))
    x = jnp.ones((3, 40))
    with pytest.raises(ValueError, match="encoder/wi: the variables hold params/values but no nm_mask/mask; pass both"):
        model.apply({"params": variables["params"]}, x)
    with pytest.raises(errors.ScopeCollectionNotFound):
        model.apply({MASK_COLLECTION: variables[MASK_COLLECTION]}, x)
    dense = {"params": {"encoder": {"wi": nn.Dense(24).init(jax.random.key(0), x)["params"]}}}
    with pytest.raises(ValueError, match="encoder/wi: collection 'nm_mask' cannot be written.*variable_axes"):
        model.init(jax.random.key(0), x, mutable="params")
    with pytest.raises(ValueError, match=r"encoder/wi: params holds a dense 'kernel'.*from_dense"):
        model.apply(dense, x)


def test_errors_of_broken_arrays():
    layer: Any = NMSparseDense(24, pattern="2:4")
    x = jnp.ones((3, 40))
    variables = layer.init(jax.random.key(0), x)
    params, constants = variables["params"], variables[MASK_COLLECTION]
    bare = {"mask": constants["mask"]}
    assert layer.apply({"params": params, MASK_COLLECTION: bare}, x).shape == (3, 24)
    broken = [
        (params, {"mask": constants["mask"][:1]}, r"mask has shape \(1, 24\), expected \(2, 24\).*40x24.*pattern 2:4"),
        (
            {**params, "values": params["values"][:, :3]},
            bare,
            r"values has shape \(2, 3, 16, 1, 1\), expected \(2, 24,",
        ),
        (params, {**bare, "format": {"v9_2:4_1x1_40x24": 0}}, "format version 9, expected 1; upgrade"),
        (params, {**bare, "format": {"2:4": 0}}, "expected one name such as"),
    ]
    for params, constants, message in broken:
        with pytest.raises(ValueError, match=message):
            layer.apply({"params": params, MASK_COLLECTION: constants}, x)
    with pytest.raises(TypeError, match="mask has dtype float32, expected uint32"):
        half = jax.tree.map(lambda a: a.astype(jnp.float32), variables)
        layer.apply(half, x)
    with pytest.raises(ValueError, match="x has no axes"):
        layer.apply(variables, 1.0)
    with pytest.raises(ValueError, match="have pattern 2:4, expected 4:8"):
        layer.clone(pattern="4:8").bind(variables).weight()
    with pytest.raises(ValueError, match=r"to_weight: the variables hold \['params/bias', 'params/kernel'\]"):
        NMSparseDense.to_weight(nn.Dense(24).init(jax.random.key(0), x))
    with pytest.raises(TypeError, match="pattern is a float"):
        NMSparseDense(24, pattern=0.5).init(jax.random.key(0), x)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="pattern"):
        NMSparseDense(24)  # pyright: ignore[reportCallIssue]
    with pytest.raises(ValueError, match=r"bias has shape \(3,\), expected \(24,\)"):
        NMSparseDense.from_weight(NMSparseDense.to_weight(variables), jnp.ones(3))
