"""Lowerings of the primitives: to the FFI targets of the native modules where dispatch chooses a kernel, to
`reference` everywhere else.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from jax_nmsparse import dispatch, native, reference, sharding
from jax_nmsparse.dispatch import Choice
from jax_nmsparse.kernels import FLOAT32, Call, Kernel
from jax_nmsparse.layout import Layout
from jax_nmsparse.meshes import Axes, add_parts
from jax_nmsparse.primitives import nm_sddmm_p, nm_spmm_p, nm_spmm_t_p, split_extras

_ACTIVATION_CODES = {None: 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4}


def target_name(op: str, implementation: str) -> str:
    """The FFI target of an operation: "nms_cuda_spmm"."""
    return f"nms_{implementation}_{op}"


EXPAND_TARGET, COMPRESS_TARGET = target_name("expand", "cuda"), target_name("compress", "cuda")
"""Those of the kernels around XLA's products."""


@functools.cache
def _sources() -> str:
    """A digest of this package's text and tables, which decide what a lowering makes of a call."""
    digest = hashlib.sha256()
    for path in sorted(p for suffix in ("*.py", "*.json") for p in pathlib.Path(__file__).parent.glob(suffix)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _call(op: str, avals, params) -> Call:
    x, second, mask = avals[:3]
    lead = mask.ndim - 3
    return Call(
        op=op,
        layout=params["layout"],
        batch=math.prod(x.shape[:lead]),
        tokens=math.prod(x.shape[lead:-1]),
        x_dtype=x.dtype,
        values_dtype=second.dtype,
        dtype=params["dtype"],
        precision=params["precision"],
    )


def _canonical(op: str, layout: Layout, run):
    """A function of operands with one batch axis and one axis of tokens, for operands with any number of them.

    Axes are merged only here, where an operand is one device's part: a merged axis cannot be sharded by its minor part.
    """

    def whole(x, second, mask, *rest):
        lead, batch, tokens = mask.ndim - 3, math.prod(mask.shape[:-3]), math.prod(x.shape[mask.ndim - 3 : -1])
        second_shape = (tokens, second.shape[-1]) if op == "sddmm" else second.shape[lead:]
        y = run(
            x.reshape(batch, tokens, x.shape[-1]),
            second.reshape(batch, *second_shape),
            mask.reshape(batch, *mask.shape[lead:]),
            *(None if e is None else e.reshape(batch, e.shape[-1]) for e in rest),
        )
        if op == "sddmm":
            return y.reshape(*mask.shape[:lead], *layout.values_shape)
        return y.reshape(*x.shape[:-1], y.shape[-1])

    return whole


def _pattern(layout: Layout) -> np.ndarray:
    return np.asarray((layout.window_units, layout.pattern.q, layout.bk, layout.bn), np.int64)


def _expand(values, mask, layout: Layout, dtype) -> jax.Array:
    """`reference.Expand` by a native kernel."""
    shape = (values.shape[0], layout.in_features, layout.out_features)
    call = jax.ffi.ffi_call(EXPAND_TARGET, jax.ShapeDtypeStruct(shape, dtype))
    return call(values.ravel(), mask, pattern=_pattern(layout))


def _compress(dense, mask, layout: Layout) -> jax.Array:
    """`reference.Compress` by a native kernel."""
    shape = (dense.shape[0], *layout.values_shape)
    call = jax.ffi.ffi_call(COMPRESS_TARGET, jax.ShapeDtypeStruct((math.prod(shape),), dense.dtype))
    return call(dense, mask, pattern=_pattern(layout)).reshape(shape)


def _plain(op: str, choice: Choice, params):
    """The function of x (or g), values and mask, or of x, g and mask, where XLA multiplies."""
    static = {name: params[name] for name in ("layout", "dtype", "precision")}
    if choice.kernel is None:
        return functools.partial(getattr(reference, f"dense_{op}" if choice.name == "dense" else op), **static)
    if op == "sddmm":
        return functools.partial(reference.sddmm, **static, compress=_compress)
    return functools.partial({"spmm": reference.dense_spmm, "spmm_t": reference.spmm_t}[op], **static, expand=_expand)


def _native(op: str, kernel: Kernel, call: Call, activation: str | None):
    """The custom call as a function of a primitive's operands; scales and bias may be None.

    Native code takes and gives values as one axis: XLA may order axes of size one as it likes, and on a CPU has copied
    a half-precision weight into another such order at each call.
    """
    layout = call.layout
    target = target_name(op, kernel.implementation)
    attributes = {
        "pattern": _pattern(layout),
        "activation": np.int64(_ACTIVATION_CODES[activation]),
        "precision": np.int64(FLOAT32.index(call.float32)),
        "kernel": kernel.name,
    }
    shape = {
        "spmm": (call.batch, call.tokens, layout.out_features),
        "spmm_t": (call.batch, call.tokens, layout.in_features),
        "sddmm": (call.batch * math.prod(layout.values_shape),),
    }[op]
    results = [jax.ShapeDtypeStruct(shape, call.dtype)]
    if kernel.implementation == "cuda":
        results.append(jax.ShapeDtypeStruct((kernel.workspace(call),), jnp.uint8))

    def run(*operands):
        operands = [jnp.zeros((0,), jnp.float32) if o is None else o for o in operands]
        if op != "sddmm":
            operands[1] = operands[1].ravel()
        layouts = {}
        if kernel.feature_major:
            # x, g, y and dx are [batch, tokens, features] with tokens innermost in memory; the rest as it is.
            orders = [tuple(range(o.ndim)) for o in operands]
            activations = 2 if op == "sddmm" else 1
            layouts["input_layouts"] = [(0, 2, 1)] * activations + orders[activations:]
            dv = tuple(range(len(shape)))
            layouts["output_layouts"] = [dv if op == "sddmm" else (0, 2, 1), (0,)]
        return jax.ffi.ffi_call(target, results, **layouts)(*operands, **attributes)[0]

    return run


def _spmm(choice: Choice, call: Call, params, axes: Axes, scatter: int | None):
    """spmm with its epilogue, which a native kernel fuses unless parts have to be added up first."""
    activation, extras, kernel = params["activation"], (params["has_scales"], params["has_bias"]), choice.multiplies
    accumulator = reference.accumulator_dtype(call.x_dtype, call.values_dtype)
    plain = activation is None and not any(extras)
    if kernel is not None and not axes:
        fused = _canonical("spmm", call.layout, _native("spmm", kernel, call, activation))
        return lambda x, values, mask, *rest: fused(x, values, mask, *split_extras(rest, *extras))
    exact = dataclasses.replace(call, dtype=call.dtype if plain and not axes else accumulator)

    if kernel is None:
        run = _plain("spmm", choice, {**params, "dtype": exact.dtype})
    else:
        native_run = _native("spmm", kernel, exact, None)
        run = lambda *operands: native_run(*operands, None, None)  # noqa: E731
    run = _canonical("spmm", call.layout, run)

    def separate(x, values, mask, *rest):
        acc = run(x, values, mask)
        acc = add_parts(acc, axes, scatter)
        if plain:
            return acc.astype(call.dtype)
        return reference.epilogue(acc, *split_extras(rest, *extras), activation, call.dtype)

    return separate


def _function(op: str, platform: str, params, operands, layout: Layout, axes: Axes, scatter: int | None):
    """What computes the operation on one device, for operands of these shapes; sums parts over mesh axes."""
    params = {**params, "layout": layout}
    call = _call(op, operands, params)
    choice = dispatch.choose(call, platform, params["implementation"])
    if op == "spmm":
        return _spmm(choice, call, params, axes, scatter)
    accumulator = reference.accumulator_dtype(call.x_dtype, call.values_dtype)
    exact = dataclasses.replace(call, dtype=accumulator if axes else call.dtype)
    if choice.multiplies is None:
        run = _plain(op, choice, {**params, "dtype": exact.dtype})
    else:
        run = _native(op, choice.multiplies, exact, None)
    run = _canonical(op, layout, run)
    return (lambda *operands: add_parts(run(*operands), axes, scatter).astype(call.dtype)) if axes else run


def _lowering(op: str, platform: str):
    def rule(ctx, *operands, **params):
        def local(layout, operands, axes, scatter):
            return _function(op, platform, params, operands, layout, axes, scatter)

        if sharding.needs_partitioning(ctx):
            meaning = repr((_sources(), op, platform, sorted(params.items()), dispatch.circumstances()))
            function = sharding.partitioned(op, params["layout"], ctx.avals_in, local, meaning)
        else:
            function = local(params["layout"], ctx.avals_in, (), None)
        return mlir.lower_fun(function, multiple_results=False)(ctx, *operands)

    return rule


for _op, _primitive in (("spmm", nm_spmm_p), ("spmm_t", nm_spmm_t_p), ("sddmm", nm_sddmm_p)):
    sharding.allow(_primitive)
    mlir.register_lowering(_primitive, _lowering(_op, "this platform"))
    for _platform in native.MODULES:
        mlir.register_lowering(_primitive, _lowering(_op, _platform), platform=_platform)
