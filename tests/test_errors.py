"""Every error is raised while tracing and names the operand, what was expected, what arrived and the remedy."""

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jax_nmsparse as nms
from jax_nmsparse import native


@pytest.fixture
def w(rng) -> nms.NMSparse:
    return oracle.draw(rng, (1024, 4), "2:4")


def _x(*shape, dtype: Any = np.float32) -> Any:
    return np.ones(shape, dtype)


SPMM = [
    ({"x": _x(3, 1000)}, ValueError, r"x has trailing size 1000, expected 1024 \(= in_features of w 1024x4\)"),
    ({"x": _x(3, 4)}, ValueError, "expected 1024 .* it fits the other axis of w: use transpose=True"),
    (
        {"x": _x(3, 1024), "transpose": True},
        ValueError,
        r"trailing size 1024, expected 4 \(= out_features .*transpose=False",
    ),
    ({"x": np.float32(1)}, ValueError, "x has 0 axes, expected at least 1"),
    ({"x": _x(3, 1024, dtype=np.complex64)}, TypeError, "x has dtype complex64, supported are float32, bfloat16"),
    ({"x": "text"}, TypeError, "x is a str, expected an array"),
    ({"x": None}, TypeError, "x is a NoneType, expected an array"),
    ({"w": _x(1024, 4)}, TypeError, r"w is a ndarray, expected an NMSparse; prune\(dense, pattern\) makes one"),
    ({"bias": _x(5)}, ValueError, r"bias has shape \(5,\), expected \(4,\) \(= out_features of w 1024x4\)"),
    ({"bias": _x(1, 4)}, ValueError, r"bias has shape \(1, 4\)"),
    ({"bias": _x(4, dtype=np.int32)}, TypeError, "bias has dtype int32, expected float32"),
    ({"activation": "tanh"}, ValueError, "activation is 'tanh', expected None or one of relu, gelu, gelu_tanh, silu"),
    ({"x": _x(3, 4), "transpose": True, "bias": _x(4)}, ValueError, "bias and activation go with transpose=False"),
    ({"x": _x(3, 4), "transpose": True, "activation": "relu"}, ValueError, "go with transpose=False"),
    ({"precision": "exact"}, ValueError, "precision is 'exact', expected None, 'default', 'high'"),
    ({"precision": 3.5}, ValueError, "precision is 3.5"),
    ({"implementation": "gpu"}, ValueError, "implementation is 'gpu', expected None or one of cuda, cpu, xla, dense"),
    ({"preferred_element_type": jnp.int8}, TypeError, "preferred_element_type is int8, expected float32"),
    ({"preferred_element_type": jnp.int32}, TypeError, r"is int32, .* \(or int32 for int8 times int8\)"),
    ({"preferred_element_type": jnp.float8_e4m3fn}, TypeError, "is float8_e4m3fn"),
]


@pytest.mark.parametrize(("changes", "error", "message"), SPMM)
def test_spmm_while_tracing(w, changes, error, message):
    arguments = {"x": _x(3, 1024), "w": w, **changes}
    x, weight = arguments.pop("x"), arguments.pop("w")
    with pytest.raises(error, match=f"^spmm: .*{message}"):
        nms.spmm(x, weight, **arguments)
    if isinstance(x, (np.ndarray, np.generic)):
        with pytest.raises(error, match=f"^spmm: .*{message.replace('ndarray', '.*Tracer')}"):
            jax.eval_shape(lambda x, weight: nms.spmm(x, weight, **arguments), x, weight)


def test_sparse_operands_on_the_wrong_side(w):
    with pytest.raises(TypeError, match="spmm: x is an NMSparse, expected a dense array"):
        nms.spmm(w, w)
    with pytest.raises(TypeError, match="x is an NMSparse|right operand"):
        operator.matmul(w, w)


def test_batch_axes_must_match(rng):
    w = oracle.draw(rng, (2, 8, 4), "2:4")
    with pytest.raises(ValueError, match=r"x has leading sizes \(3,\), expected \(2,\) \(= batch axes of w 2x8x4\)"):
        nms.spmm(_x(3, 5, 8), w)
    with pytest.raises(ValueError, match="x has 1 axes, expected at least 2"):
        nms.spmm(_x(8), w)
    with pytest.raises(ValueError, match=r"bias has shape \(3, 4\), expected \(2, 4\)"):
        nms.spmm(_x(2, 5, 8), w, bias=_x(3, 4))
    with pytest.raises(ValueError, match="spmv: x has 1 axes and w 3, expected 1 and 2"):
        nms.spmv(_x(8), w)


def test_spmv(w):
    with pytest.raises(ValueError, match="spmv: x has 2 axes and w 2, expected 1 and 2; spmm takes any number"):
        nms.spmv(_x(1, 1024), w)
    with pytest.raises(TypeError, match="spmv: w is a ndarray"):
        nms.spmv(_x(1024), _x(1024, 4))


@pytest.mark.parametrize(
    ("x", "g", "error", "message"),
    [
        (_x(3, 1000), _x(3, 4), ValueError, r"x has trailing size 1000, expected 1024 \(= in_features"),
        (_x(3, 1024), _x(3, 5), ValueError, r"g has trailing size 5, expected 4 \(= out_features"),
        (_x(3, 1024), _x(2, 4), ValueError, r"x has leading sizes \(3,\) and g \(2,\), expected the same"),
        (_x(3, 1024), _x(3, 4, dtype=np.complex64), TypeError, "g has dtype complex64"),
        (_x(3, 1024), None, TypeError, "g is a NoneType"),
    ],
)
def test_sddmm(w, x, g, error, message):
    with pytest.raises(error, match=f"^sddmm: {message}"):
        nms.sddmm(x, g, w)


@pytest.mark.parametrize("dtype", [np.int32, np.bool_, np.uint8, np.int16])
def test_integers_beside_quantised_values(rng, dtype):
    w = oracle.draw(rng, (8, 4), "2:4", jnp.int8)
    with pytest.raises(
        TypeError, match=f"x has dtype {np.dtype(dtype).name} beside int8 values, expected float32.*int8"
    ):
        nms.spmm(_x(3, 8, dtype=dtype), w)
    with pytest.raises(TypeError, match="x has dtype int8 beside float8_e4m3fn values"):
        nms.spmm(_x(3, 8, dtype=np.int8), oracle.draw(rng, (8, 4), "2:4", jnp.float8_e4m3fn))


def test_named_implementations_that_cannot_run(w):
    with pytest.raises(
        NotImplementedError, match="spmm: implementation='cuda' .*implementation=None|.*compiled for cpu"
    ):
        nms.spmm(_x(3, 1024), w, implementation="cuda")
    if not native.MODULES["cpu"].loaded:
        with pytest.raises(NotImplementedError, match="the native module _cpu was not built"):
            nms.spmm(_x(3, 1024), w, implementation="cpu")
        return
    quantised = nms.quantize(w, jnp.float8_e4m3fn)
    for call in (lambda: nms.spmm(_x(3, 1024), quantised, implementation="cpu"),):
        with pytest.raises(NotImplementedError, match="float32 x float8_e4m3fn have no kernel .*'xla' runs everywhere"):
            call()


def test_grad_of_nothing_and_wrong_argnums(rng):
    integer = oracle.draw(rng, (8, 4), "2:4", jnp.int8)
    with pytest.raises(TypeError, match="grad: NMSparse.* has nothing to differentiate; integer values need scales"):
        nms.grad(lambda w: (jnp.ones(8) @ w).sum())(integer)
    with pytest.raises(ValueError, match="argnums 1 with 1 positional arguments"):
        nms.grad(lambda w: 0.0, argnums=1)(integer)
