"""The three primitives, closed under differentiation.

T(x, values, g) = sum over the kept units of x * value * g is linear in each of its three arguments. Its three partial
derivatives are the primitives:

    nm_spmm_p     y  = x W                          (derivative with respect to g)
    nm_spmm_t_p   dx = g Wᵀ                         (derivative with respect to x)
    nm_sddmm_p    dv = (xᵀ g) at the kept units     (derivative with respect to values)

so the JVP and the transpose of each are the other two, and derivatives of every order exist, forward and reverse.
nm_spmm_p may carry an epilogue, act((x W) * scales + bias); its derivative is that of the composition.

Operands are canonical (see `reference`): one batch axis, the mask with its word axis. Static parameters:

    layout           pattern and dense size
    dtype            of the result
    precision        as in `jax.lax.dot_general`
    implementation   None, "cuda", "cpu", "xla" or "dense"
    activation       of the epilogue, nm_spmm_p alone, with the flags has_scales and has_bias for its extra operands

Every primitive is defined by the same blocks in the same order: bind, abstract evaluation, JVP, transpose, batching.
Lowerings are registered in `lowering`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import ad, batching, xla
from jax.sharding import PartitionSpec

from jax_nmsparse import reference
from jax_nmsparse.compat import unify_varying
from jax_nmsparse.layout import Layout

nm_spmm_p = core.Primitive("nm_spmm")
nm_spmm_t_p = core.Primitive("nm_spmm_t")
nm_sddmm_p = core.Primitive("nm_sddmm")


# Shared pieces.


def _common_dtype(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both operands in their promoted dtype; quantised values (one byte) stay beside a float operand."""
    if a.dtype == b.dtype or b.dtype.itemsize == 1:
        return a, b
    dtype = jnp.promote_types(a.dtype, b.dtype)
    return a.astype(dtype), b.astype(dtype)


def _spec(aval) -> tuple[Any, ...]:
    spec = tuple(aval.sharding.spec)
    return spec + (None,) * (aval.ndim - len(spec))


def _result_aval(op: str, shape, dtype, operands, spec: tuple[Any, ...], contracted: tuple[Any, ...]):
    """An abstract value that varies and is sharded as the operands say (mesh axes of explicit type)."""
    summed = sorted({repr(axis) for axis in contracted if axis is not None})
    if summed:
        raise ValueError(
            f"{op}: an axis that is summed over is sharded over the explicit mesh axes {', '.join(summed)}; "
            "reshard it, or write the sum with jax.shard_map and jax.lax.psum"
        )
    # An operand that was not placed has an empty mesh; any other says which mesh it is.
    placed = next((a for a in operands if not a.sharding.mesh.empty), operands[0])
    sharding = placed.sharding.update(spec=PartitionSpec(*spec))
    return operands[0].update(shape=shape, dtype=jnp.dtype(dtype), weak_type=False, sharding=sharding)


def _either(a, b):
    return a if a is not None else b


def _fold_tokens(x: jax.Array) -> jax.Array:
    """[examples, batch, tokens, features] -> [batch, examples * tokens, features]."""
    examples, batch, tokens, features = x.shape
    return jnp.moveaxis(x, 0, 1).reshape(batch, examples * tokens, features)


def _unfold_tokens(y: jax.Array, examples: int, tokens: int) -> jax.Array:
    return jnp.moveaxis(y.reshape(y.shape[0], examples, tokens, y.shape[-1]), 1, 0)


def _fold_batch(operand: jax.Array, dim, examples: int) -> jax.Array:
    """Moves the mapped axis, broadcasting where there is none, into the batch axis."""
    whole = (examples, *operand.shape)
    operand = jnp.broadcast_to(operand, whole) if dim is None else jnp.moveaxis(operand, dim, 0)
    return operand.reshape(operand.shape[0] * operand.shape[1], *operand.shape[2:])


def _unfold_batch(result: jax.Array, examples: int, batch: int) -> jax.Array:
    return result.reshape(examples, batch, *result.shape[1:])


def _examples(operands, dims) -> int:
    return next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)


def _batch_weight(bind, operands, dims, params):
    """Batching where the weight is mapped (experts, ensembles): one call with a longer batch axis."""
    examples = _examples(operands, dims)
    batch = operands[0].shape[0] if dims[0] is None else np.delete(operands[0].shape, dims[0])[0]
    folded = [_fold_batch(x, d, examples) for x, d in zip(operands, dims, strict=True)]
    return _unfold_batch(bind(*folded, **params), examples, int(batch)), 0


def _sum_tangents(terms, aval):
    terms = [t for t in terms if t is not None]
    return sum(terms[1:], terms[0]) if terms else ad.Zero(aval)


def _is_zero(tangent) -> bool:
    return type(tangent) is ad.Zero


# spmm: y = act((x W) * scales + bias).


def spmm(x, values, mask, scales=None, bias=None, *, layout: Layout, dtype, precision, implementation, activation=None):
    x, values = _common_dtype(x, values)
    extras = [e for e in (scales, bias) if e is not None]
    return nm_spmm_p.bind(
        *unify_varying(x, values, mask, *extras),
        layout=layout,
        dtype=jnp.dtype(dtype),
        precision=precision,
        implementation=implementation,
        activation=activation,
        has_scales=scales is not None,
        has_bias=bias is not None,
    )


def _spmm_bind(x, values, mask, *extras, has_scales, has_bias, **params):
    scales, bias = split_extras(extras, has_scales, has_bias)
    return spmm(x, values, mask, scales, bias, **params)


def split_extras(extras, has_scales: bool, has_bias: bool):
    """The optional operands of nm_spmm_p as (scales, bias)."""
    extras = list(extras)
    scales = extras.pop(0) if has_scales else None
    bias = extras.pop(0) if has_bias else None
    return scales, bias


def _spmm_abstract(x, values, mask, *extras, layout, dtype, **_):
    xs, vs = _spec(x), _spec(values)
    shape = (x.shape[0], x.shape[1], layout.out_features)
    return _result_aval("spmm", shape, dtype, (x, values), (_either(xs[0], vs[0]), xs[1], vs[2]), (xs[2], vs[1]))


def _spmm_unfused(x, values, mask, scales, bias, *, layout, dtype, precision, implementation, activation):
    acc = spmm(
        x,
        values,
        mask,
        layout=layout,
        dtype=reference.accumulator_dtype(x.dtype, values.dtype),
        precision=precision,
        implementation=implementation,
    )
    return reference.epilogue(acc, scales, bias, activation, dtype)


def _spmm_jvp(primals, tangents, *, activation, has_scales, has_bias, **params):
    x, values, mask, *extras = primals
    dx, dvalues, _, *dextras = tangents
    y = _spmm_bind(*primals, activation=activation, has_scales=has_scales, has_bias=has_bias, **params)
    if activation is None and not extras:
        terms = [
            None if _is_zero(dx) else spmm(dx, values, mask, **params),
            None if _is_zero(dvalues) else spmm(x, dvalues, mask, **params),
        ]
        return y, _sum_tangents(terms, jax.typeof(y).to_tangent_aval())
    active = [i for i, t in enumerate(tangents) if not _is_zero(t)]

    def unfused(*moving):
        operands = list(primals)
        for i, operand in zip(active, moving, strict=True):
            operands[i] = operand
        x, values, mask, *extras = operands
        scales, bias = split_extras(extras, has_scales, has_bias)
        return _spmm_unfused(x, values, mask, scales, bias, activation=activation, **params)

    if not active:
        return y, ad.Zero(jax.typeof(y).to_tangent_aval())
    _, dy = jax.jvp(unfused, [primals[i] for i in active], [tangents[i] for i in active])
    return y, dy


def _spmm_transpose(ct, x, values, mask, *extras, layout, dtype, precision, implementation, **_):
    static = {"layout": layout, "precision": precision, "implementation": implementation}
    nothing = [None] * (3 + len(extras))
    if _is_zero(ct):
        return nothing
    if ad.is_undefined_primal(x):
        return [spmm_t(ct, values, mask, dtype=x.aval.dtype, **static), *nothing[1:]]
    return [None, sddmm(x, ct, mask, dtype=values.aval.dtype, **static), *nothing[2:]]


def _spmm_batch(operands, dims, **params):
    x, *rest = operands
    if all(d is None for d in dims[1:]):
        x = jnp.moveaxis(x, dims[0], 0)
        return _unfold_tokens(_spmm_bind(_fold_tokens(x), *rest, **params), x.shape[0], x.shape[2]), 0
    return _batch_weight(_spmm_bind, operands, dims, params)


# spmm_t: dx = g Wᵀ.


def spmm_t(g, values, mask, *, layout: Layout, dtype, precision, implementation):
    g, values = _common_dtype(g, values)
    return nm_spmm_t_p.bind(
        *unify_varying(g, values, mask),
        layout=layout,
        dtype=jnp.dtype(dtype),
        precision=precision,
        implementation=implementation,
    )


def _spmm_t_abstract(g, values, mask, *, layout, dtype, **_):
    gs, vs = _spec(g), _spec(values)
    shape = (g.shape[0], g.shape[1], layout.in_features)
    return _result_aval("spmm_t", shape, dtype, (g, values), (_either(gs[0], vs[0]), gs[1], vs[1]), (gs[2], vs[2]))


def _spmm_t_jvp(primals, tangents, **params):
    g, values, mask = primals
    dg, dvalues, _ = tangents
    dx = spmm_t(*primals, **params)
    terms = [
        None if _is_zero(dg) else spmm_t(dg, values, mask, **params),
        None if _is_zero(dvalues) else spmm_t(g, dvalues, mask, **params),
    ]
    return dx, _sum_tangents(terms, jax.typeof(dx).to_tangent_aval())


def _spmm_t_transpose(ct, g, values, mask, *, layout, dtype, precision, implementation):
    static = {"layout": layout, "precision": precision, "implementation": implementation}
    if _is_zero(ct):
        return [None, None, None]
    if ad.is_undefined_primal(g):
        return [spmm(ct, values, mask, dtype=g.aval.dtype, **static), None, None]
    return [None, sddmm(ct, g, mask, dtype=values.aval.dtype, **static), None]


def _spmm_t_batch(operands, dims, **params):
    g, *rest = operands
    if all(d is None for d in dims[1:]):
        g = jnp.moveaxis(g, dims[0], 0)
        return _unfold_tokens(spmm_t(_fold_tokens(g), *rest, **params), g.shape[0], g.shape[2]), 0
    return _batch_weight(spmm_t, operands, dims, params)


# sddmm: dv = (xᵀ g) at the kept units.


def sddmm(x, g, mask, *, layout: Layout, dtype, precision, implementation):
    x, g = _common_dtype(x, g)
    return nm_sddmm_p.bind(
        *unify_varying(x, g, mask),
        layout=layout,
        dtype=jnp.dtype(dtype),
        precision=precision,
        implementation=implementation,
    )


def _sddmm_abstract(x, g, mask, *, layout, dtype, **_):
    xs, gs, ms = _spec(x), _spec(g), _spec(mask)
    shape = (x.shape[0], *layout.values_shape)
    spec = (_either(xs[0], ms[0]), _either(xs[2], ms[1]), _either(gs[2], ms[2]), None, None, None)
    return _result_aval("sddmm", shape, dtype, (x, g, mask), spec, (xs[1], gs[1]))


def _sddmm_jvp(primals, tangents, **params):
    x, g, mask = primals
    dx, dg, _ = tangents
    dv = sddmm(*primals, **params)
    terms = [
        None if _is_zero(dx) else sddmm(dx, g, mask, **params),
        None if _is_zero(dg) else sddmm(x, dg, mask, **params),
    ]
    return dv, _sum_tangents(terms, jax.typeof(dv).to_tangent_aval())


def _sddmm_transpose(ct, x, g, mask, *, layout, dtype, precision, implementation):
    static = {"layout": layout, "precision": precision, "implementation": implementation}
    if _is_zero(ct):
        return [None, None, None]
    if ad.is_undefined_primal(x):
        return [spmm_t(g, ct, mask, dtype=x.aval.dtype, **static), None, None]
    return [None, spmm(x, ct, mask, dtype=g.aval.dtype, **static), None]


def _sddmm_batch(operands, dims, **params):
    # Every example has values of its own here, so the mapped axis is a batch axis whatever is mapped.
    return _batch_weight(sddmm, operands, dims, params)


_RULES = {
    nm_spmm_p: (_spmm_abstract, _spmm_jvp, _spmm_transpose, _spmm_batch),
    nm_spmm_t_p: (_spmm_t_abstract, _spmm_t_jvp, _spmm_t_transpose, _spmm_t_batch),
    nm_sddmm_p: (_sddmm_abstract, _sddmm_jvp, _sddmm_transpose, _sddmm_batch),
}


def _register(primitive, abstract, jvp, transpose, batch) -> None:
    primitive.def_impl(lambda *operands, **params: xla.apply_primitive(primitive, *operands, **params))
    primitive.def_abstract_eval(abstract)
    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = transpose
    batching.primitive_batchers[primitive] = batch


for _primitive, _rules in _RULES.items():
    _register(_primitive, *_rules)
