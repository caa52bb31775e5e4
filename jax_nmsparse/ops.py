"""The operations that users call."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jax_nmsparse import dispatch, primitives, reference
from jax_nmsparse import lowering as _lowering  # noqa: F401  (registers the lowerings)
from jax_nmsparse.array import NMSparse
from jax_nmsparse.kernels import Call

_FLOAT_DTYPES = tuple(jnp.dtype(d) for d in (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64, jnp.float8_e4m3fn))
_RESULT_DTYPES = (*_FLOAT_DTYPES[:-1], jnp.dtype(jnp.int32))


def _as_operand(op: str, name: str, x: Any) -> jax.Array:
    if isinstance(x, NMSparse):
        raise TypeError(f"{op}: {name} is an NMSparse, expected a dense array; x @ w multiplies dense by sparse")
    if not (hasattr(x, "shape") and hasattr(x, "dtype")) and not isinstance(x, (list, tuple, int, float)):
        raise TypeError(f"{op}: {name} is a {type(x).__name__}, expected an array")
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        names = ", ".join(d.name for d in _FLOAT_DTYPES)
        raise TypeError(f"{op}: {name} has dtype {x.dtype.name}, supported are {names} and int8")
    return x


def _check_weight(op: str, w: Any) -> NMSparse:
    if not isinstance(w, NMSparse):
        raise TypeError(f"{op}: w is a {type(w).__name__}, expected an NMSparse; prune(dense, pattern) makes one")
    w.check_arrays(op)
    return w


def _call(op: str, x, values, w: NMSparse, dtype, precision) -> Call:
    lead = w.ndim - 2
    # Without int(): under jax.export a size may be symbolic.
    batch, tokens = math.prod(x.shape[:lead]), math.prod(x.shape[lead:-1])
    return Call(op, w.layout, batch, tokens, x.dtype, values.dtype, dtype, precision)


def _check_rows(op: str, name: str, x: jax.Array, w: NMSparse, size: int, what: str) -> None:
    """Checks x against `[*lead, ..., size]` where lead are the batch axes of w."""
    dims, lead = "x".join(map(str, w.shape)), w.shape[:-2]
    if x.ndim < len(lead) + 1:
        raise ValueError(
            f"{op}: {name} has {x.ndim} axes, expected at least {len(lead) + 1} "
            f"({len(lead)} batch axes of w {dims} and {what})"
        )
    if x.shape[-1] != size:
        other = w.out_features if size == w.in_features else w.in_features
        remedy = f"; it fits the other axis of w: use transpose={what == 'in_features'}" if x.shape[-1] == other else ""
        raise ValueError(
            f"{op}: {name} has trailing size {x.shape[-1]}, expected {size} (= {what} of w {dims})"
            f"{remedy if op == 'spmm' else ''}"
        )
    if tuple(x.shape[: len(lead)]) != lead:
        raise ValueError(
            f"{op}: {name} has leading sizes {tuple(x.shape[: len(lead)])}, expected {lead} (= batch axes of w {dims})"
        )


def _operand_pair(op: str, name: str, x: jax.Array, w: NMSparse) -> tuple[jax.Array, jax.Array]:
    """x and values in dtypes that can be multiplied: promoted as `jnp.dot` does, quantised values as they are."""
    values = w.values
    if values.dtype == jnp.int8 and x.dtype == jnp.int8:
        return x, values
    if values.dtype.itemsize == 1:
        if x.dtype not in _FLOAT_DTYPES:
            raise TypeError(
                f"{op}: {name} has dtype {x.dtype.name} beside {values.dtype.name} values, expected "
                f"{', '.join(d.name for d in _FLOAT_DTYPES)}" + (" or int8" if values.dtype == jnp.int8 else "")
            )
        return (x.astype(jnp.bfloat16) if x.dtype.itemsize == 1 and values.dtype == jnp.int8 else x), values
    dtype = _promote(x.dtype, values.dtype)
    return x.astype(dtype), values.astype(dtype)


def _promote(*dtypes) -> jnp.dtype:
    """As `jnp.promote_types`; float8, which JAX promotes with nothing, gives way to the others."""
    wide = [d for d in dtypes if d != jnp.float8_e4m3fn]
    return functools.reduce(jnp.promote_types, wide or dtypes)


def _result_dtype(op: str, given, x_dtype, w: NMSparse, preferred, epilogue: bool = False) -> jnp.dtype:
    """The dtype of a product of an x of dtype given, computed in x_dtype."""
    integer = x_dtype == jnp.int8 and w.dtype == jnp.int8
    if preferred is None:
        if integer:
            return jnp.dtype(jnp.int32 if w.scales is None and not epilogue else jnp.float32)
        one_byte = given.itemsize == w.dtype.itemsize == 1
        return jnp.dtype(jnp.float32) if one_byte or x_dtype.itemsize == 1 else x_dtype
    preferred = jax.dtypes.canonicalize_dtype(preferred)
    if preferred not in _RESULT_DTYPES or (preferred == jnp.int32 and not integer):
        names = ", ".join(d.name for d in _RESULT_DTYPES[:-1])
        raise TypeError(
            f"{op}: preferred_element_type is {preferred.name}, expected {names} (or int32 for int8 times int8)"
        )
    return preferred


def _check_precision(op: str, precision: Any) -> Any:
    """A hashable precision as `jax.lax.dot_general` reads it; None follows jax_default_matmul_precision."""
    if precision is None:
        precision = getattr(jax.config, "jax_default_matmul_precision")  # noqa: B009  (defined at run time)
        if precision is None:
            return None
    try:
        if isinstance(precision, str) and precision in lax.DotAlgorithmPreset.__members__:
            return lax.DotAlgorithmPreset[precision]
        if isinstance(precision, lax.DotAlgorithmPreset):
            return precision
        if isinstance(precision, (tuple, list)):
            return tuple(lax.Precision(p) for p in precision)
        return lax.Precision(precision)
    except ValueError:
        raise ValueError(
            f"{op}: precision is {precision!r}, expected None, 'default', 'high', 'highest', a jax.lax.Precision "
            "or a jax.lax.DotAlgorithmPreset"
        ) from None


def _check_implementation(op: str, implementation: Any, call: Call) -> None:
    if implementation is None:
        return
    if implementation not in dispatch.IMPLEMENTATIONS:
        raise ValueError(
            f"{op}: implementation is {implementation!r}, expected None or one of {', '.join(dispatch.IMPLEMENTATIONS)}"
        )
    reason = dispatch.rejection(call, implementation)
    if reason is not None:
        raise NotImplementedError(
            f"{op}: implementation={implementation!r} cannot run this call: {reason}; implementation=None chooses "
            "what can, 'xla' runs everywhere"
        )


def _check_bias(bias: Any, w: NMSparse) -> jax.Array:
    bias = jnp.asarray(bias)
    if bias.dtype not in _FLOAT_DTYPES[:-1]:
        raise TypeError(f"spmm: bias has dtype {bias.dtype.name}, expected float32, bfloat16, float16 or float64")
    lead = w.shape[:-2]
    if bias.shape not in {(w.out_features,), (*lead, w.out_features)}:
        raise ValueError(
            f"spmm: bias has shape {bias.shape}, expected {(*lead, w.out_features)} (= out_features of w "
            f"{'x'.join(map(str, w.shape))})"
        )
    return jnp.broadcast_to(bias, (*lead, w.out_features))


def spmm(
    x: ArrayLike,
    w: NMSparse,
    *,
    transpose: bool = False,
    bias: ArrayLike | None = None,
    activation: str | None = None,
    precision: Any = None,
    preferred_element_type: Any = None,
    implementation: str | None = None,
    out_sharding: Any = None,
) -> jax.Array:
    """Product with an N:M sparse weight: ``y = act(x W + bias)``, with ``transpose=True`` ``y = x Wᵀ``.

    Args:
      x: ``[*lead, ..., in_features]`` where lead are the batch axes of w (none for a single weight); with transpose
        ``[*lead, ..., out_features]``. It is promoted together with the values as `jnp.dot` does; beside int8 or
        float8_e4m3fn values it stays as it is.
      w: The weight, ``[*lead, in_features, out_features]``.
      transpose: Multiply by Wᵀ; excludes bias and activation.
      bias: ``[out_features]`` or ``[*lead, out_features]``, added before the activation.
      activation: None, "relu", "gelu" (exact), "gelu_tanh" or "silu", applied in the accumulator's precision.
      precision: As in `jnp.dot`. By default float32 may use TF32 tensor cores on a GPU; "highest" is full float32.
      preferred_element_type: dtype of the result. By default that of the promoted x; for int8 times int8
        without scales, bias and activation it is int32, for other pairs of one byte each float32.
      implementation: None chooses (see `explain`); "cuda", "cpu", "xla" or "dense" runs exactly that or raises.
      out_sharding: On a mesh of explicit axis types, the `NamedSharding` or `PartitionSpec` of the result, as in
        `jnp.dot`: needed where in_features is sharded. The sum is then one all-reduce, or one reduce-scatter where
        the result is to be split over the same mesh axes.

    Returns:
      ``[*lead, ..., out_features]``; sums are kept in float32 (float64 for float64, int32 for int8 times int8).

    Raises:
      TypeError: For an operand or dtype that has no product.
      ValueError: For shapes that do not fit.
      NotImplementedError: Where a named implementation cannot run the call.

    Example:
      >>> import jax, jax.numpy as jnp, jax_nmsparse as nms
      >>> w = nms.prune(jax.random.normal(jax.random.key(0), (256, 512)), nms.NMPattern(8, 32))
      >>> nms.spmm(jnp.ones((4, 256)), w, activation="relu").shape
      (4, 512)

    Source: the access pattern of the kernels after Lin et al., nmSPARSE, MLSys 2023.
    """
    w = _check_weight("spmm", w)
    x = _as_operand("spmm", "x", x)
    if transpose:
        if bias is not None or activation is not None:
            raise ValueError("spmm: bias and activation go with transpose=False; add them to the result")
        return _spmm_t(x, w, precision, preferred_element_type, implementation, out_sharding)
    _check_rows("spmm", "x", x, w, w.in_features, "in_features")
    if activation is not None and activation not in reference.ACTIVATIONS:
        raise ValueError(
            f"spmm: activation is {activation!r}, expected None or one of {', '.join(reference.ACTIVATIONS)}; "
            "apply any other function to the result"
        )
    given, (x, values) = x.dtype, _operand_pair("spmm", "x", x, w)
    epilogue = bias is not None or activation is not None
    dtype = _result_dtype("spmm", given, x.dtype, w, preferred_element_type, epilogue)
    static = _static("spmm", x, values, w, dtype, precision, implementation)
    return primitives.spmm(
        x,
        values,
        w.mask_with_words,
        w.scales,
        None if bias is None else _check_bias(bias, w),
        activation=activation,
        out_sharding=out_sharding,
        **static,
    )


def _static(op: str, x, second, w: NMSparse, dtype, precision, implementation) -> dict[str, Any]:
    """The static parameters of a primitive call, checked."""
    precision = _check_precision(op, precision)
    _check_implementation(op, implementation, _call(op, x, second, w, dtype, precision))
    return {"layout": w.layout, "dtype": dtype, "precision": precision, "implementation": implementation}


def _spmm_t(g, w: NMSparse, precision, preferred_element_type, implementation, out_sharding) -> jax.Array:
    _check_rows("spmm", "x", g, w, w.out_features, "out_features")
    given, (g, values) = g.dtype, _operand_pair("spmm", "x", g, w)
    if w.scales is not None:
        # (g * scales) Wᵀ: the scales belong to out_features, the axis that is summed over here.
        lead = w.ndim - 2
        scales = w.scales.reshape(*w.scales.shape[:lead], *([1] * (g.ndim - lead - 1)), w.out_features)
        g = g.astype(jnp.float32) if given.itemsize == 1 else g
        g = (g * scales).astype(g.dtype)
    dtype = _result_dtype("spmm", given, g.dtype, w, preferred_element_type)
    static = _static("spmm_t", g, values, w, dtype, precision, implementation)
    return primitives.spmm_t(g, values, w.mask_with_words, out_sharding=out_sharding, **static)


def spmv(x: ArrayLike, w: NMSparse, **options: Any) -> jax.Array:
    """Product of one vector with an N:M sparse weight: ``y = x W``; `spmm` for x of one axis.

    Args:
      x: ``[in_features]``.
      w: ``[in_features, out_features]``, without batch axes.
      **options: As in `spmm`.

    Returns:
      ``[out_features]``.

    Example:
      >>> import jax.numpy as jnp, jax_nmsparse as nms
      >>> nms.spmv(jnp.arange(4.0), nms.NMSparse.fromdense(jnp.eye(4), "1:4"))
      Array([0., 1., 2., 3.], dtype=float32)
    """
    w = _check_weight("spmv", w)
    x = _as_operand("spmv", "x", x)
    if x.ndim != 1 or w.ndim != 2:
        raise ValueError(
            f"spmv: x has {x.ndim} axes and w {w.ndim}, expected 1 and 2; spmm takes any number of leading axes"
        )
    return spmm(x, w, **options)


def sddmm(
    x: ArrayLike,
    g: ArrayLike,
    w: NMSparse,
    *,
    precision: Any = None,
    implementation: str | None = None,
    out_sharding: Any = None,
) -> jax.Array:
    """Sampled product ``(xᵀ g)`` at the kept units of w: the gradient of ``sum(g * (x @ w))`` by ``w.values``.

    Args:
      x: ``[*lead, ..., in_features]``.
      g: ``[*lead, ..., out_features]`` with the same leading axes.
      w: The weight whose mask says which units to compute; its values do not matter.
      precision: As in `jnp.dot`.
      implementation: As in `spmm`.
      out_sharding: As in `spmm`; needed where an axis of tokens is sharded over explicit mesh axes.

    Returns:
      An array of the shape of ``w.values`` (``w.with_values`` takes it), in the dtype of float values, otherwise
      float32; zero in the padding.

    Raises:
      TypeError, ValueError, NotImplementedError: As `spmm`.

    Example:
      >>> import jax.numpy as jnp, jax_nmsparse as nms
      >>> w = nms.NMSparse.fromdense(jnp.eye(4), "1:4")
      >>> w.with_values(nms.sddmm(jnp.arange(4.0), jnp.ones(4), w)).todense().diagonal()
      Array([0., 1., 2., 3.], dtype=float32)
    """
    w = _check_weight("sddmm", w)
    x, g = _as_operand("sddmm", "x", x), _as_operand("sddmm", "g", g)
    _check_rows("sddmm", "x", x, w, w.in_features, "in_features")
    _check_rows("sddmm", "g", g, w, w.out_features, "out_features")
    if x.shape[:-1] != g.shape[:-1]:
        raise ValueError(f"sddmm: x has leading sizes {x.shape[:-1]} and g {g.shape[:-1]}, expected the same")
    dtype = w.dtype if w.dtype in _FLOAT_DTYPES[:-1] else jnp.dtype(jnp.float32)
    common = _promote(x.dtype, g.dtype, dtype)
    x, g = x.astype(common), g.astype(common)
    static = _static("sddmm", x, g, w, dtype, precision, implementation)
    return primitives.sddmm(x, g, w.mask_with_words, out_sharding=out_sharding, **static)


def _is_weight(node: Any) -> bool:
    return isinstance(node, NMSparse)


def _split(tree: Any):
    """The leaves to differentiate, and a function that puts others into their places."""
    nodes, structure = jax.tree.flatten(tree, is_leaf=_is_weight)

    def moving(node):
        if not _is_weight(node):
            return (node,)
        leaves = (node.values,) if jnp.issubdtype(node.dtype, jnp.floating) else ()
        leaves += () if node.scales is None else (node.scales,)
        if not leaves:
            raise TypeError(f"grad: {node!r} has nothing to differentiate; integer values need scales")
        return leaves

    def place(node, leaves):
        if not _is_weight(node):
            return leaves[0]
        leaves = list(leaves)
        new = {"values": leaves.pop(0)} if jnp.issubdtype(node.dtype, jnp.floating) else {}
        return node._replace(**new, **({"scales": leaves.pop(0)} if leaves else {}))

    def rebuild(leaves):
        return jax.tree.unflatten(structure, [place(*pair) for pair in zip(nodes, leaves, strict=True)])

    return [moving(node) for node in nodes], rebuild


def value_and_grad(fun: Callable, argnums: int | Sequence[int] = 0, has_aux: bool = False, **options: Any) -> Callable:
    """`jax.value_and_grad` for functions of N:M sparse weights.

    Args:
      fun: A function with a scalar result. Its arguments may be pytrees that hold `NMSparse` weights.
      argnums: Which positional arguments to differentiate.
      has_aux: Whether fun returns (value, auxiliary).
      **options: Passed to `jax.value_and_grad`.

    Returns:
      A function that returns the value and gradients of the arguments' structure. The gradient of a weight is an
      `NMSparse` with the same mask, whose values (and scales) are the derivatives; only kept units have any. Do not
      hand it to an optimiser as a whole, which would update the mask too: optimise ``w.values``.

    Example:
      >>> import jax.numpy as jnp, jax_nmsparse as nms
      >>> w = nms.NMSparse.fromdense(jnp.eye(4), "1:4")
      >>> loss, dw = nms.value_and_grad(lambda w: (jnp.arange(4.0) @ w).sum())(w)
      >>> dw.todense().diagonal()
      Array([0., 1., 2., 3.], dtype=float32)
    """
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    @functools.wraps(fun)
    def wrapped(*args, **kwargs):
        wanted = [n if n >= 0 else n + len(args) for n in numbers]
        if any(not 0 <= n < len(args) for n in wanted):
            raise ValueError(f"value_and_grad: argnums {argnums} with {len(args)} positional arguments")
        parts = [_split(args[n]) for n in wanted]

        def inner(leaves):
            full = list(args)
            for n, (_, rebuild), part in zip(wanted, parts, leaves, strict=True):
                full[n] = rebuild(part)
            return fun(*full, **kwargs)

        value, grads = jax.value_and_grad(inner, has_aux=has_aux, **options)([leaves for leaves, _ in parts])
        grads = tuple(rebuild(part) for (_, rebuild), part in zip(parts, grads, strict=True))
        return value, grads[0] if isinstance(argnums, int) else grads

    return wrapped


def grad(fun: Callable, argnums: int | Sequence[int] = 0, has_aux: bool = False, **options: Any) -> Callable:
    """`jax.grad` for functions of N:M sparse weights; see `value_and_grad`.

    Returns:
      A function that returns the gradients, with has_aux the pair (gradients, auxiliary).
    """
    both = value_and_grad(fun, argnums, has_aux, **options)

    @functools.wraps(fun)
    def wrapped(*args, **kwargs):
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return wrapped
