"""Statistics of what layers read, gathered by running the user's own function over batches."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import ArrayLike

from jax_nmsparse import explicit
from jax_nmsparse.pruning.selection import score_dtype

LAYERS: tuple[type, ...] = (nn.Dense, nn.DenseGeneral, nnx.Linear, nnx.LinearGeneral)
"""The layers whose inputs `calibrate` looks at, unless told otherwise."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Statistics:
    """Sums over the tokens that a layer read: what Wanda and SparseGPT need to know of its inputs ``x``.

    A pytree of sums, so `jax.vmap(Statistics.from_inputs)` makes those of stacked layers (``[layers, ...]``),
    `lax.psum` joins those of several devices, and `module.sow` carries them out of a scan over layers.

    Attributes:
      tokens: int32 ``[...]``, how many tokens were counted.
      squares: ``[..., in_features]``, ``sum over tokens of x^2``. float32, or float64 for float64 inputs.
      gram: None, or ``[..., in_features, in_features]`` of the same dtype, ``x^T x``. Only SparseGPT needs it.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_nmsparse.pruning import Statistics
      >>> statistics = Statistics.from_inputs(jnp.ones((2, 8, 3)))
      >>> statistics = statistics.update(2 * jnp.ones((8, 3)))
      >>> int(statistics.tokens), statistics.squares
      (24, Array([48., 48., 48.], dtype=float32))
    """

    tokens: jax.Array
    squares: jax.Array
    gram: jax.Array | None = None

    @classmethod
    def from_inputs(cls, x: jax.Array, *, where: ArrayLike | None = None, gram: bool = True) -> Statistics:
        """Counts a first batch.

        Args:
          x: ``[..., in_features]``, a float dtype; half types are summed in float32.
          where: None, or bool broadcastable to ``[...]``: which tokens count (padding does not).
          gram: Whether to sum ``x^T x`` too (in_features^2 numbers; in_features * tokens multiplications each).

        Raises:
          TypeError, ValueError: For x that is no float array with at least one axis, or where of another shape.
        """
        if not hasattr(x, "dtype") or not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"Statistics: x is {getattr(x, 'dtype', type(x).__name__)}, expected a float array")
        if x.ndim < 1:
            raise ValueError("Statistics: x has no axes, expected [..., in_features]")
        if where is not None:
            try:
                where = jnp.broadcast_to(jnp.asarray(where) != 0, x.shape[:-1])
            except ValueError:
                raise ValueError(
                    f"Statistics: where has shape {jnp.shape(where)}, expected one that broadcasts to {x.shape[:-1]} "
                    "(= tokens of x)"
                ) from None
        return explicit.sum_over_tokens(functools.partial(_sums, gram=gram), x, where)

    def update(self, x: jax.Array, *, where: ArrayLike | None = None) -> Statistics:
        """Counts another batch; arguments as in `from_inputs`."""
        if x.ndim < 1 or x.shape[-1] != self.squares.shape[-1]:
            raise ValueError(
                f"update: x has shape {x.shape}, expected [..., {self.squares.shape[-1]}] (= in_features so far)"
            )
        return self.merge(Statistics.from_inputs(x, where=where, gram=self.gram is not None))

    def merge(self, other: Statistics) -> Statistics:
        """The statistics of both together."""
        if (self.gram is None) != (other.gram is None) or self.squares.shape != other.squares.shape:
            raise ValueError(f"merge: statistics of {self} and of {other}, expected the same in_features and gram")
        return _add(self, other)

    def __repr__(self) -> str:
        shape = getattr(self.squares, "shape", self.squares)
        return f"Statistics(squares {shape}, {'without' if self.gram is None else 'with'} gram)"


def check_statistics(op: str, inputs: Any, shape: tuple[int, ...], purpose: str = "") -> None:
    """Raises where inputs are not the statistics of what a weight of a shape reads."""
    if not isinstance(inputs, Statistics):
        got = "missing" if inputs is None else f"a {type(inputs).__name__}"
        raise TypeError(
            f"{op}: inputs is {got}, expected Statistics{purpose}; pruning.calibrate(function, model, batches) or "
            "pruning.Statistics.from_inputs(x) makes them"
        )
    lead, rows = shape[:-2], shape[-2]
    if tuple(inputs.squares.shape) not in ((rows,), (*lead, rows)):
        expected = f"{(rows,)} or {(*lead, rows)}" if lead else f"{(rows,)}"
        raise ValueError(
            f"{op}: inputs have squares of shape {inputs.squares.shape}, expected {expected} (= in_features of dense "
            f"{shape})"
        )


@jax.jit(static_argnames="gram")
def _sums(x: jax.Array, where: jax.Array | None, gram: bool) -> Statistics:
    x = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    tokens = jnp.asarray(x.shape[0], jnp.int32)
    if where is not None:
        # Not a product with the mask: what a padding token holds may be NaN.
        x, tokens = jnp.where(where.reshape(len(x), 1), x, 0), jnp.sum(where, dtype=jnp.int32)
    dtype = score_dtype(x.dtype)
    squares = jnp.sum(jnp.square(x.astype(dtype)), axis=0)
    if not gram:
        return Statistics(tokens, squares)
    product = lax.dot_general(
        x, x, (((0,), (0,)), ((), ())), precision=lax.Precision.HIGHEST, preferred_element_type=dtype
    )
    return Statistics(tokens, squares, product)


@jax.jit
def _add(a: Statistics, b: Statistics) -> Statistics:
    return jax.tree.map(jnp.add, a, b)


def calibrate(
    function: Callable[[Any, Any], Any],
    model: Any,
    batches: Iterable[Any],
    *,
    include: str = "",
    gram: bool = True,
    where: Callable[[Any], ArrayLike] | None = None,
    layers: tuple[type, ...] = LAYERS,
) -> dict[str, Statistics]:
    """Runs ``function(model, batch)`` over batches and returns the statistics of what every layer read.

    Flax linen layers are watched by `nn.intercept_methods`, NNX layers by replacing ``__call__`` of their classes while
    function is traced; neither the model nor its code changes. Everything runs in one jitted program per shape of
    batch, and no activation leaves it: only the sums.

    Args:
      function: The user's own, for example ``lambda variables, batch: net.apply(variables, *batch)`` for linen and
        ``lambda model, batch: model(batch)`` for NNX. Its result is ignored.
      model: Variables of a linen model (any pytree), or an `nnx.Module`.
      batches: Pytrees of arrays. Batches of equal shapes compile once.
      include: Regular expression, searched in the path of a layer; by default all layers. Sums of ``x^T x`` of every
        layer of a large model may not fit: calibrate some layers at a time.
      gram: Whether to sum ``x^T x``, which SparseGPT needs; Wanda does not.
      where: None, or a function of a batch: bool ``[batch, length]``, the tokens that count. It applies to layers whose
        inputs start with those axes; of others (a pooled sequence) every row counts.
      layers: Classes of the layers to look at.

    Returns:
      Path of a layer ("encoder/layer_0/query") -> `Statistics`, in the order of the calls. A layer that is called
      several times has them summed. The contracted axes of `DenseGeneral` and `LinearGeneral` count as one in_features,
      in the order of the kernel's axes.

    Raises:
      ValueError: Where no layer was seen, where the inputs of none begin with the axes of the result of where, where a
        layer runs inside an inner jit, scan, vmap or remat of function (whose intermediate values cannot leave it:
        unroll, or `sow` a `Statistics` by hand), or where inputs are not finite.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp, jax_nmsparse as nms
      >>> net = nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(4)])
      >>> variables = net.init(jax.random.key(0), jnp.ones((1, 16)))
      >>> batches = [jax.random.normal(jax.random.key(i), (8, 16)) for i in range(4)]
      >>> statistics = nms.pruning.calibrate(net.apply, variables, batches)
      >>> list(statistics), int(statistics["layers_2"].tokens)
      (['layers_0', 'layers_2'], 32)
      >>> kernel = variables["params"]["layers_2"]["kernel"]
      >>> nms.prune(kernel, "2:4", method="sparsegpt", inputs=statistics["layers_2"])
      NMSparse(32x4, 2:4, float32)
    """
    # A jitted function may be compiled already, and would then not call the layers at all.
    function = getattr(function, "__wrapped__", function) if hasattr(function, "lower") else function
    searched = re.compile(include)
    graph, state = nnx.split(model) if isinstance(model, nnx.Module) else (None, model)

    @jax.jit
    def step(state: Any, batch: Any) -> dict[str, Statistics]:
        live = state if graph is None else nnx.merge(graph, state)
        recorder = _Recorder(searched, gram, None if where is None else where(batch), layers)
        with recorder.watching(live):
            function(live, batch)
        recorder.check_where()
        return recorder.found

    total: dict[str, Statistics] = {}
    order: list[str] = []
    for batch in batches:
        try:
            found = step(state, batch)
        except jax.errors.UnexpectedTracerError as error:
            raise ValueError(
                "calibrate: a layer runs inside an inner jit, scan, vmap or remat of function, so what it reads cannot "
                "be seen from outside; unroll that part for calibration, or sow a Statistics inside it"
            ) from error
        order += [path for path in found if path not in total]
        total = {**total, **{path: total[path].merge(s) if path in total else s for path, s in found.items()}}
    if not total:
        names = ", ".join(layer.__name__ for layer in layers)
        raise ValueError(
            f"calibrate: function called no layer among {names} whose path matches {include!r}; batches may be empty, "
            "or a jitted function inside function was compiled already: call it without jit"
        )
    for path, statistics in total.items():
        if not bool(jnp.all(jnp.isfinite(statistics.squares))):
            raise ValueError(f"calibrate: inputs of {path} hold NaN or Inf (or squares too large for float32)")
    return total


class _Recorder:
    """Statistics by path, filled while function is traced."""

    def __init__(self, include: re.Pattern, gram: bool, where: ArrayLike | None, layers: tuple[type, ...]) -> None:
        self.found: dict[str, Statistics] = {}
        self._include, self._gram, self._layers = include, gram, layers
        self._where = None if where is None else jnp.asarray(where)
        self._unfit: dict[str, tuple[int, ...]] = {}
        self._active: set[int] = set()

    def _record(self, path: str, module: Any, x: jax.Array) -> None:
        if not self._include.search(path):
            return
        axes = getattr(module, "axis", -1)
        # Ascending, as Flax contracts them whatever their order.
        axes = sorted(axis % x.ndim for axis in (axes if isinstance(axes, (tuple, list)) else (axes,)))
        rows = [axis for axis in range(x.ndim) if axis not in axes]
        x = x.transpose(*rows, *axes).reshape(*(x.shape[a] for a in rows), math.prod(x.shape[a] for a in axes))
        where = self._where
        if where is not None:
            fits = x.shape[: where.ndim] == where.shape and x.ndim > where.ndim
            where = where.reshape(*where.shape, *[1] * (x.ndim - 1 - where.ndim)) if fits else None
            if not fits:
                self._unfit[path] = x.shape
        statistics = Statistics.from_inputs(x, where=where, gram=self._gram)
        self.found[path] = self.found[path].merge(statistics) if path in self.found else statistics

    def check_where(self) -> None:
        if self._where is None or not self.found or self._unfit.keys() != self.found.keys():
            return
        path, shape = next(iter(self._unfit.items()))
        raise ValueError(
            f"calibrate: where gives an array of shape {self._where.shape}, with which the inputs of no layer begin: "
            f"{path} reads {shape}; return a mask of the leading axes, [batch, length]"
        )

    def _call(self, call: Callable[..., Any], path: str, module: Any, args: tuple, kwargs: dict) -> Any:
        """Calls the layer; a subclass that calls its base's __call__ counts once."""
        if id(module) in self._active:
            return call(*args, **kwargs)
        self._record(path, module, args[0] if args else kwargs["inputs"])
        self._active.add(id(module))
        try:
            return call(*args, **kwargs)
        finally:
            self._active.discard(id(module))

    @contextlib.contextmanager
    def watching(self, model: Any) -> Iterator[None]:
        def intercept(call, args, kwargs, context):
            if context.method_name != "__call__" or not isinstance(context.module, self._layers):
                return call(*args, **kwargs)
            return self._call(call, "/".join(context.module.path), context.module, args, kwargs)

        paths = {}
        if isinstance(model, nnx.Module):
            paths = {id(module): "/".join(map(str, path)) for path, module in nnx.iter_modules(model)}

        def replacement(original):
            def __call__(module, *args, **kwargs):
                if id(module) not in paths:
                    return original(module, *args, **kwargs)
                call = lambda *args, **kwargs: original(module, *args, **kwargs)  # noqa: E731
                return self._call(call, paths[id(module)], module, args, kwargs)

            return __call__

        with contextlib.ExitStack() as stack:
            for layer in self._layers if paths else ():
                if issubclass(layer, nnx.Module):
                    own = vars(layer).get("__call__")
                    inherited: Any = layer.__call__
                    setattr(layer, "__call__", replacement(inherited))  # noqa: B010
                    if own is None:
                        stack.callback(delattr, layer, "__call__")
                    else:
                        stack.callback(setattr, layer, "__call__", own)
            stack.enter_context(nn.intercept_methods(intercept))
            yield
