"""What a transformer costs on a mesh that need not be here: memory, bytes, floors and expected times of one step.

Every projection is split as `PROJECTIONS` says (Megatron's scheme: columns, then rows), and each device's part costs
what `explain` says of it. A floor assumes the bandwidth and rates that the device was measured to reach; an expected
time comes from measurements of the kernel that would run, as latency + floor / efficiency fitted over the shapes that
`dispatch_table.json` holds for the nearest pattern and number of tokens. All-reduces are counted as those of a ring.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_nmsparse import dispatch, tuning
from jax_nmsparse.array import check_pattern
from jax_nmsparse.explanation import DEVICES, Ceilings, cost
from jax_nmsparse.kernels import Call
from jax_nmsparse.layout import Layout
from jax_nmsparse.meshes import check_whole
from jax_nmsparse.pattern import NMPattern

LINKS = {"NVIDIA H200": 450e9}
"""Bytes/s that one device sends to its neighbours, by device kind: the data sheet's NVLink 4 rate, not measured."""


@dataclasses.dataclass(frozen=True)
class Model:
    """Sizes of a decoder-only transformer with gated MLPs.

    Attributes:
      layers, hidden, intermediate, vocabulary: Sizes.
      heads, kv_heads: Query heads, and key and value heads, of hidden / heads each.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int


@functools.cache
def models() -> dict[str, Model]:
    """The shapes by name, from `models.json`: published configurations of Llama 2 (7b, 13b) and Llama 3 (8b, 70b)."""
    text = pathlib.Path(__file__).with_name("models.json").read_text(encoding="utf-8")
    return {name: Model(**sizes) for name, sizes in json.loads(text).items()}


@dataclasses.dataclass(frozen=True)
class Projection:
    """One device's part of one product of a layer.

    Attributes:
      name: "query", "down" ...
      split: "columns" or "rows".
      call: The product.
      kernel: What runs it, and why.
      weight_bytes: Values and mask.
      bytes: All that moves.
      floor_us: The floor; time_us: what is expected, None where nothing was measured.
      dense_bytes, dense_floor_us, dense_time_us: The same for a dense weight.
    """

    name: str
    split: str
    call: Call
    kernel: str
    weight_bytes: int
    bytes: int
    floor_us: float
    time_us: float | None
    dense_bytes: int
    dense_floor_us: float
    dense_time_us: float | None


@dataclasses.dataclass(frozen=True)
class Plan:
    """The answer of `plan`; printing it gives the text. Bytes and times are those of one device.

    Attributes:
      name, model, pattern, dtype, device: What was asked.
      data, tensor: Size of the mesh.
      tokens: In one step, of every data-parallel group.
      layer: The products of one layer.
      sums: All-reduces of one layer, of so many bytes each; sum_us: their time at the link's rate.
      weight_bytes: Of all layers. dense_weight_bytes: the same without sparsity.
      other_bytes: Embedding and head (split over tensor) and norms, dense.
      cache_bytes: Keys and values of `context` positions for every sequence (one for each token of a step).
    """

    name: str
    model: Model
    pattern: NMPattern
    dtype: str
    device: str
    data: int
    tensor: int
    tokens: int
    context: int
    layer: tuple[Projection, ...]
    sums: tuple[int, int]
    sum_us: float
    weight_bytes: int
    dense_weight_bytes: int
    other_bytes: int
    cache_bytes: int

    @property
    def layer_bytes(self) -> int:
        return sum(p.bytes for p in self.layer)

    @property
    def layer_floor_us(self) -> float:
        """Floor of one layer's products and sums; attention itself is not counted."""
        return sum(p.floor_us for p in self.layer) + self.sum_us

    @property
    def layer_time_us(self) -> float | None:
        """Expected time of the same."""
        return _total([p.time_us for p in self.layer], self.sum_us)

    @property
    def dense_layer_floor_us(self) -> float:
        return sum(p.dense_floor_us for p in self.layer) + self.sum_us

    @property
    def dense_layer_time_us(self) -> float | None:
        return _total([p.dense_time_us for p in self.layer], self.sum_us)

    def __str__(self) -> str:
        rows = [
            f"{self.name}: {self.model.layers} layers, {self.pattern}, {self.dtype}, mesh {self.data} data x "
            f"{self.tensor} tensor of {self.device}, {self.tokens} tokens a step and group",
            "",
            f"memory of one device    {_gigabytes(self.weight_bytes + self.other_bytes + self.cache_bytes)}",
            f"  sparse projections    {_gigabytes(self.weight_bytes)}  (dense {_gigabytes(self.dense_weight_bytes)})",
            f"  embedding, head, norms{_gigabytes(self.other_bytes)}",
            f"  keys and values       {_gigabytes(self.cache_bytes)}  ({self.tokens} x {self.context} positions)",
            "",
            "one layer on one device",
            f"  {'':<8} {'split':<8} {'part':<14} {'MB':>8} {'floor us':>9} {'expected':>9} {'dense':>9}  runs",
        ]
        for p in self.layer:
            layout = p.call.layout
            rows.append(
                f"  {p.name:<8} {p.split:<8} {f'{layout.in_features}x{layout.out_features}':<14} {p.bytes / 1e6:8.2f} "
                f"{p.floor_us:9.2f} {_us(p.time_us)} {_us(p.dense_time_us)}  {p.kernel}"
            )
        number, size = self.sums
        rows.append(
            f"  {'sums':<8} {f'{number} all-reduces':<23} {number * size / 1e6:8.2f} {self.sum_us:9.2f} "
            f"{_us(self.sum_us)} {_us(self.sum_us)}"
        )
        rows.append(
            f"  {'total':<32} {(self.layer_bytes + number * size) / 1e6:8.2f} {self.layer_floor_us:9.2f} "
            f"{_us(self.layer_time_us)} {_us(self.dense_layer_time_us)}"
        )
        floor, expected = self.layer_floor_us, self.layer_time_us
        rows += [
            "",
            f"per token and layer     {self.layer_bytes / self.tokens / 1e6:.3f} MB, floor {floor / self.tokens:.3f} us"
            + ("" if expected is None else f", expected {expected / self.tokens:.3f} us"),
            f"all layers              floor {floor * self.model.layers / 1e3:.2f} ms a step"
            + ("" if expected is None else f", expected {expected * self.model.layers / 1e3:.2f} ms")
            + f"; dense floor {self.dense_layer_floor_us * self.model.layers / 1e3:.2f} ms",
            "Not counted: attention over the cache, norms, the head, latency of the collectives.",
        ]
        return "\n".join(rows)


def _total(times: Sequence[float | None], more: float) -> float | None:
    known = [t for t in times if t is not None]
    return sum(known) + more if len(known) == len(times) else None


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:8.2f} GB"


def _us(time: float | None) -> str:
    return f"{'unknown':>9}" if time is None else f"{time:9.2f}"


def projections(model: Model) -> list[tuple[str, str, int, int]]:
    """(name, split, in_features, out_features) of the whole products of one layer."""
    head = model.hidden // model.heads
    queries, keys = model.heads * head, model.kv_heads * head
    return [
        ("query", "columns", model.hidden, queries),
        ("key", "columns", model.hidden, keys),
        ("value", "columns", model.hidden, keys),
        ("output", "rows", queries, model.hidden),
        ("gate", "columns", model.hidden, model.intermediate),
        ("up", "columns", model.hidden, model.intermediate),
        ("down", "rows", model.intermediate, model.hidden),
    ]


def fit(floors: Sequence[float], times: Sequence[float]) -> tuple[float, float]:
    """(latency, slope) of ``time = latency + slope * floor`` with the least relative errors, latency at least 0."""
    floor, time = np.asarray(floors, float), np.asarray(times, float)
    if len(time) > 1:
        latency, slope = np.linalg.lstsq(np.stack([1 / time, floor / time], 1), np.ones(len(time)), rcond=None)[0]
        if latency >= 0 and slope > 0:
            return float(latency), float(slope)
    ratio = floor / time
    return 0.0, float(ratio.sum() / np.square(ratio).sum())


def expected_us(call: Call, name: str, platform: str, ceilings: Ceilings) -> float | None:
    """The time that measurements let expect of a kernel, or of "dense" or "xla"; None where it was never measured.

    Times of feature-major kernels hold the transposes of an isolated call, as the table does. "dense" stands for a
    weight that is dense already.
    """
    layout = call.layout
    if name in dispatch.BY_XLA:
        dense = expected_us(call, "dense", platform, ceilings)
        expansion = tuning.expansion_us(platform, call.op, name, layout.pattern, cost(call, ceilings).dense_bytes)
        return None if dense is None else dense + expansion
    points = tuning.nearest(
        platform,
        call.op,
        layout.pattern,
        *call.measured_as,
        call.tokens,
        layout.in_features,
        layout.out_features,
    )
    points = [p for p in points if name in p.times_us]
    if not points:
        return None
    # Of the nearest pattern and number of tokens, all the shapes that were measured.
    found = min(points, key=lambda p: p.distance(layout.pattern, max(1, call.tokens), p.in_features, p.out_features))
    group = [p for p in points if (p.pattern, p.tokens, p.precision) == (found.pattern, found.tokens, found.precision)]

    def floor(point: tuning.Measurement) -> float:
        like = dataclasses.replace(
            call, layout=Layout(point.pattern, point.in_features, point.out_features), tokens=point.tokens, batch=1
        )
        return _floor(like, name, ceilings)

    latency, slope = fit([floor(p) for p in group], [p.times_us[name] for p in group])
    return latency + slope * _floor(call, name, ceilings)


def _floor(call: Call, name: str, ceilings: Ceilings) -> float:
    what = cost(call, ceilings)
    floor = what.dense_floor_us if name == "dense" else what.floor_us
    assert floor is not None  # there are ceilings
    return floor


def plan(
    model: str | Model,
    *,
    mesh: tuple[int, int] = (1, 1),
    pattern: NMPattern | str = "16:32",
    tokens: int = 1,
    context: int = 4096,
    dtype: Any = jnp.bfloat16,
    device: str = "NVIDIA H200",
    link: float | None = None,
) -> Plan:
    """What one step of a sparse transformer costs on a mesh of devices that need not be present.

    Args:
      model: A name in `models` ("7b", "8b", "13b", "70b"), or a `Model`.
      mesh: (data, tensor): groups that hold the whole model, and devices that share it.
      pattern: Of every projection.
      tokens: In one step, of every group: sequences that decode, or the tokens of a prompt.
      context: Positions of keys and values kept for every sequence.
      dtype: Of weights and activations.
      device: A device kind that has ceilings.
      link: Bytes/s that a device sends; by default `LINKS`.

    Returns:
      A `Plan`; print it.

    Raises:
      ValueError: For an unknown model or device, or where a part would not hold whole windows and column blocks.

    Example:
      >>> from jax_nmsparse.planning import plan
      >>> p = plan("70b", mesh=(8, 8), pattern="16:32")
      >>> round(p.weight_bytes / 1e9, 1), round(p.dense_weight_bytes / 1e9, 1)
      (9.6, 17.1)
    """
    name = model if isinstance(model, str) else "model"
    if isinstance(model, str):
        if model not in models():
            raise ValueError(f"plan: model is {model!r}, expected one of {', '.join(models())}, or a Model")
        model = models()[model]
    if device not in DEVICES:
        raise ValueError(f"plan: device is {device!r}, expected one of {', '.join(DEVICES)}")
    data, tensor = mesh
    if min(data, tensor, tokens) < 1:
        raise ValueError(f"plan: mesh is {mesh} and tokens {tokens}, expected at least 1 each")
    if context < 0:
        raise ValueError(f"plan: context is {context}, expected at least 0")
    if link is not None and not 0 < link < float("inf"):
        raise ValueError(f"plan: link is {link} bytes/s, expected a positive number")
    if model.heads % tensor:
        raise ValueError(f"plan: {model.heads} heads cannot be split over {tensor} devices")
    pattern, dtype, ceilings = check_pattern("plan", pattern), jnp.dtype(dtype), DEVICES[device]
    platform, link = "cuda", link or LINKS[device]
    layer, whole = [], 0
    for label, split, rows, columns in projections(model):
        # Fewer key and value heads than devices: several devices hold the same.
        parts = min(tensor, model.kv_heads) if label in ("key", "value") else tensor
        by_rows, by_columns = (parts, 1) if split == "rows" else (1, parts)
        check_whole(f"plan: {label}", Layout(pattern, rows, columns), by_rows, by_columns)
        call = Call(
            "spmm",
            Layout(pattern, rows // by_rows, columns // by_columns),
            batch=1,
            tokens=tokens,
            x_dtype=dtype,
            values_dtype=dtype,
            dtype=dtype,
            precision=None,
        )
        with dispatch.compiling_elsewhere(ceilings.capability):
            choice = dispatch.choose(call, platform, None, ceilings.capability)
        what = cost(call, ceilings)
        dense = rows // by_rows * (columns // by_columns) * dtype.itemsize
        whole += dense
        layer.append(
            Projection(
                name=label,
                split=split,
                call=call,
                kernel=choice.name,
                weight_bytes=what.values_bytes + what.mask_bytes,
                bytes=what.values_bytes + what.mask_bytes + what.activation_bytes,
                floor_us=_floor(call, "sparse", ceilings),
                time_us=expected_us(call, choice.name, platform, ceilings),
                dense_bytes=what.dense_bytes,
                dense_floor_us=_floor(call, "dense", ceilings),
                dense_time_us=expected_us(call, "dense", platform, ceilings),
            )
        )
    result = tokens * model.hidden * dtype.itemsize
    sums = (2, result) if tensor > 1 else (0, 0)
    cached = 2 * max(1, model.kv_heads // tensor) * (model.hidden // model.heads) * context * tokens
    return Plan(
        name=name,
        model=model,
        pattern=pattern,
        dtype=dtype.name,
        device=device,
        data=data,
        tensor=tensor,
        tokens=tokens,
        context=context,
        layer=tuple(layer),
        sums=sums,
        # A ring sends every byte twice, but for the part that a device holds.
        sum_us=1e6 * sums[0] * sums[1] * 2 * (tensor - 1) / tensor / link,
        weight_bytes=model.layers * sum(p.weight_bytes for p in layer),
        dense_weight_bytes=model.layers * whole,
        other_bytes=(2 * model.vocabulary // tensor + 2 * model.layers + 1) * model.hidden * dtype.itemsize,
        cache_bytes=model.layers * cached * dtype.itemsize,
    )
