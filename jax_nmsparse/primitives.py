"""The three primitives, closed under differentiation.

T(x, values, g) = sum over the kept units of x * value * g is linear in each of its three arguments. Its three partial
derivatives are the primitives:

    nm_spmm_p     y  = x W                          (derivative with respect to g)
    nm_spmm_t_p   dx = g Wᵀ                         (derivative with respect to x)
    nm_sddmm_p    dv = (xᵀ g) at the kept units     (derivative with respect to values)

so the JVP and the transpose of each are the other two, and derivatives of every order exist, forward and reverse.
nm_spmm_p may carry an epilogue, act((x W) * scales + bias); its derivative is that of the composition.

Operands have the batch axes of the weight in front and any axes of tokens, the mask with its word axis:

    x, dx   [*batch, *tokens, in_features]        values  [*batch, windows, out_blocks, q, bk, bn]
    g, y    [*batch, *tokens, out_features]       mask    [*batch, windows, out_blocks, words]

Axes are not merged before lowering: a device may hold a part of each of them. Where explicit mesh axes split operands,
a product is bound as a `jax.shard_map` of products of the parts (see `explicit`). Static parameters:

    layout           pattern and dense size
    dtype            of the result
    precision        as in `jax.lax.dot_general`
    implementation   None, "cuda", "cpu", "xla" or "dense"
    activation       of the epilogue, nm_spmm_p alone, with the flags has_scales and has_bias for its extra operands

Every primitive is defined by the same blocks in the same order: bind, abstract evaluation, JVP, transpose, batching.
Lowerings are registered in `lowering`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import ad, batching, xla
from jax.sharding import PartitionSpec

from jax_nmsparse import explicit, meshes, reference
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


def _result_aval(shape, dtype, operands):
    """An abstract value that varies as the operands do; explicit mesh axes split none of them here (see `_split`)."""
    # An operand that was not placed has an empty mesh; any other says which mesh it is.
    placed = next((a for a in operands if not a.sharding.mesh.empty), operands[0])
    sharding = placed.sharding.update(spec=PartitionSpec(*[None] * len(shape)))
    return operands[0].update(shape=shape, dtype=jnp.dtype(dtype), weak_type=False, sharding=sharding)


def _split(op: str, operands, params, bind, *, has_scales: bool = False, has_bias: bool = False, out_sharding):
    """The operation on meshes of explicit axis types: every device binds it for its part; None where nothing is split.

    Args:
      op: "spmm", "spmm_t" or "sddmm".
      operands: All of them, without None.
      params: Those of bind, with the layout of the whole weight.
      bind: The function that binds the primitive.
      has_scales, has_bias: Which operands follow the first three.
      out_sharding: Of the result, or None.
    """
    if not explicit.is_split(*operands):
        return None
    batch = operands[2].ndim - 3
    names, result = meshes.factors(op, batch, operands[0].ndim - batch - 1, len(operands) - 3)

    def local(piece: Layout, parts, axes: meshes.Axes, scatter: int | None) -> jax.Array:
        static = {**params, "layout": piece}
        if not axes:
            return bind(*parts[:3], *split_extras(parts[3:], has_scales, has_bias), **static)
        static["dtype"] = reference.accumulator_dtype(parts[0].dtype, parts[1].dtype)
        activation = static.pop("activation", None)
        acc = meshes.add_parts(bind(*parts[:3], **static), axes, scatter)
        return reference.epilogue(acc, *split_extras(parts[3:], has_scales, has_bias), activation, params["dtype"])

    described = list(zip(operands, names, strict=True))
    name = "sddmm" if op == "sddmm" else "spmm"
    summed = meshes.SUMMED[op]
    return explicit.run(name, params["layout"], described, result, local, summed=summed, out_sharding=out_sharding)


def _batch_weight(bind, operands, dims, params):
    """Batching where the weight is mapped (experts, ensembles): one call with one more batch axis."""
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    whole = [
        jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
        for x, d in zip(operands, dims, strict=True)
    ]
    return bind(*whole, **params), 0


def _batch(bind, operands, dims, params):
    """Batching of spmm and spmm_t: where x alone is mapped, its examples are one more axis of tokens."""
    x, *rest = operands
    if any(d is not None for d in dims[1:]):
        return _batch_weight(bind, operands, dims, params)
    batch = operands[2].ndim - 3
    return bind(jnp.moveaxis(x, dims[0], batch), *rest, **params), batch


def _sum_tangents(terms, aval):
    terms = [t for t in terms if t is not None]
    return sum(terms[1:], terms[0]) if terms else ad.Zero(aval)


def _is_zero(tangent) -> bool:
    return type(tangent) is ad.Zero


# spmm: y = act((x W) * scales + bias).


def spmm(x, values, mask, scales=None, bias=None, *, activation=None, out_sharding=None, **params):
    x, values = _common_dtype(x, values)
    operands = [x, values, mask, *(e for e in (scales, bias) if e is not None)]
    flags = {"has_scales": scales is not None, "has_bias": bias is not None}
    params = {**params, "dtype": jnp.dtype(params["dtype"]), "activation": activation}
    y = _split("spmm", operands, params, spmm, **flags, out_sharding=out_sharding)
    if y is not None:
        return y
    return explicit.place("spmm", nm_spmm_p.bind(*unify_varying(*operands), **params, **flags), out_sharding)


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
    return _result_aval((*x.shape[:-1], layout.out_features), dtype, (x, values, mask, *extras))


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
    return _batch(_spmm_bind, operands, dims, params)


# spmm_t: dx = g Wᵀ.


def spmm_t(g, values, mask, *, out_sharding=None, **params):
    g, values = _common_dtype(g, values)
    params = {**params, "dtype": jnp.dtype(params["dtype"])}
    dx = _split("spmm_t", [g, values, mask], params, spmm_t, out_sharding=out_sharding)
    if dx is not None:
        return dx
    return explicit.place("spmm", nm_spmm_t_p.bind(*unify_varying(g, values, mask), **params), out_sharding)


def _spmm_t_abstract(g, values, mask, *, layout, dtype, **_):
    return _result_aval((*g.shape[:-1], layout.in_features), dtype, (g, values, mask))


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
    return _batch(spmm_t, operands, dims, params)


# sddmm: dv = (xᵀ g) at the kept units.


def sddmm(x, g, mask, *, out_sharding=None, **params):
    x, g = _common_dtype(x, g)
    params = {**params, "dtype": jnp.dtype(params["dtype"])}
    dv = _split("sddmm", [x, g, mask], params, sddmm, out_sharding=out_sharding)
    if dv is not None:
        return dv
    return explicit.place("sddmm", nm_sddmm_p.bind(*unify_varying(x, g, mask), **params), out_sharding)


def _sddmm_abstract(x, g, mask, *, layout, dtype, **_):
    return _result_aval((*mask.shape[:-3], *layout.values_shape), dtype, (x, g, mask))


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
