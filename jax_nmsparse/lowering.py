"""Lowerings of the primitives: to the FFI targets of the native modules where dispatch chooses a kernel, to
`reference` everywhere else."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import mlir

from jax_nmsparse import dispatch, native, reference
from jax_nmsparse.dispatch import Call, Choice
from jax_nmsparse.primitives import nm_sddmm_p, nm_spmm_p, nm_spmm_t_p, split_extras

_ACTIVATION_CODES = {None: 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4}
_EXACT = (lax.Precision.HIGH, lax.Precision.HIGHEST)


def target_name(op: str, implementation: str) -> str:
    """The FFI target of an operation: "nms_cuda_spmm"."""
    return f"nms_{implementation}_{op}"


def _call(op: str, avals, params) -> Call:
    x, second = avals[0], avals[1]
    return Call(
        op=op,
        layout=params["layout"],
        batch=x.shape[0],
        tokens=x.shape[1],
        x_dtype=x.dtype,
        values_dtype=second.dtype,
        dtype=params["dtype"],
        precision=params["precision"],
    )


def _reference(op: str, choice: Choice):
    prefix = "dense_" if choice.implementation == "dense" else ""
    function = getattr(reference, prefix + op)

    def spmm(x, values, mask, *extras, activation, has_scales, has_bias, dtype, implementation, **params):
        scales, bias = split_extras(extras, has_scales, has_bias)
        accumulator = reference.accumulator_dtype(x.dtype, values.dtype)
        plain = activation is None and not extras
        acc = function(x, values, mask, dtype=dtype if plain else accumulator, **params)
        return acc if plain else reference.epilogue(acc, scales, bias, activation, dtype)

    def other(*operands, implementation, **params):
        return function(*operands, **params)

    return spmm if op == "spmm" else other


def _native(op: str, choice: Choice, call: Call, params):
    """The custom call as a function of the primitive's operands."""
    target = target_name(op, choice.implementation)
    attributes = {
        "window_units": np.int64(call.layout.window_units),
        "activation": np.int64(_ACTIVATION_CODES[params.get("activation")]),
        "precision": np.int64(_is_exact(call.precision)),
        "kernel": choice.kernel.name,
    }
    shape = {
        "spmm": (call.batch, call.tokens, call.layout.out_features),
        "spmm_t": (call.batch, call.tokens, call.layout.in_features),
        "sddmm": (call.batch, *call.layout.values_shape),
    }[op]
    result = jax.ShapeDtypeStruct(shape, call.dtype)
    has_workspace = choice.implementation == "cuda"
    workspace = jax.ShapeDtypeStruct((choice.kernel.workspace(call),), jnp.uint8)

    def run(*operands):
        if op == "spmm":
            *main, scales, bias = operands[:3] + split_extras(
                operands[3:], params["has_scales"], params["has_bias"]
            )
            absent = jnp.zeros((0,), jnp.float32)
            operands = (*main, absent if scales is None else scales, absent if bias is None else bias)
        results = (result, workspace) if has_workspace else (result,)
        return jax.ffi.ffi_call(target, results)(*operands, **attributes)[0]

    return run


def _is_exact(precision) -> bool:
    if isinstance(precision, tuple):
        return any(p in _EXACT for p in precision)
    return precision in _EXACT


def _lowering(op: str, platform: str | None):
    def rule(ctx, *operands, **params):
        call = _call(op, ctx.avals_in, params)
        choice = dispatch.choose(call, platform or "this platform", params["implementation"])
        if choice.kernel is None:
            return mlir.lower_fun(_reference(op, choice), multiple_results=False)(ctx, *operands, **params)
        return mlir.lower_fun(_native(op, choice, call, params), multiple_results=False)(ctx, *operands)

    return rule


for _op, _primitive in (("spmm", nm_spmm_p), ("spmm_t", nm_spmm_t_p), ("sddmm", nm_sddmm_p)):
    mlir.register_lowering(_primitive, _lowering(_op, None))
    for _platform in native.MODULES:
        mlir.register_lowering(_primitive, _lowering(_op, _platform), platform=_platform)
