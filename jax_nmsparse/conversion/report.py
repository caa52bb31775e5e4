"""What a conversion did to every layer."""

from __future__ import annotations

import dataclasses

from jax_nmsparse.tables import Table, amount


@dataclasses.dataclass(frozen=True)
class LayerReport:
    """What happened to one layer.

    Attributes:
      path: Of the layer, "encoder/layer_0/query".
      shape: Of its dense kernel or table.
      pattern: "2:4/1x4", or "dense".
      method: "magnitude", "wanda", "sparsegpt" or "mask"; empty for a dense layer.
      dtype: Of the values that are stored.
      bytes_before: Of the dense kernel.
      bytes_after: Of the weight: values, mask and scales.
      weight_error: ``||W - W'|| / ||W||`` in the Frobenius norm, W' being what is stored: 0 for a dense layer and for
        a weight of zeros, NaN where W holds NaN or Inf, None while tracing.
      output_error: ``||x (W - W')|| / ||x W||`` over the inputs of calibration, where their x^T x is known; None
        elsewhere. Infinite where the inputs see nothing of W, but something of W'.
      note: Why a layer stayed dense.
    """

    path: str
    shape: tuple[int, ...]
    pattern: str
    method: str
    dtype: str
    bytes_before: int
    bytes_after: int
    weight_error: float | None = 0.0
    output_error: float | None = None
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Report:
    """What `sparsify` did, layer by layer; printing it gives a table, and rich draws it.

    Attributes:
      layers: One for every layer with a kernel or an embedding table, also for those that stayed dense.
    """

    layers: tuple[LayerReport, ...]

    @property
    def bytes_before(self) -> int:
        """Bytes of all kernels before."""
        return sum(layer.bytes_before for layer in self.layers)

    @property
    def bytes_after(self) -> int:
        """Bytes of all kernels after."""
        return sum(layer.bytes_after for layer in self.layers)

    def table(self) -> Table:
        has_outputs = any(layer.output_error is not None for layer in self.layers)
        columns = ["layer", "shape", "pattern", "method", "dtype", "#weight error"]
        columns += ["#output error"] if has_outputs else []
        columns += ["#before", "#after", "note"]

        def row(layer: LayerReport) -> list[str]:
            weight, output = ("" if e is None else f"{e:.4f}" for e in (layer.weight_error, layer.output_error))
            return [
                layer.path,
                "x".join(map(str, layer.shape)),
                layer.pattern,
                layer.method,
                layer.dtype,
                "" if layer.pattern == "dense" else weight,
                *([output] if has_outputs else []),
                amount(layer.bytes_before),
                amount(layer.bytes_after),
                layer.note,
            ]

        footer = ["total", *[""] * (len(columns) - 4), amount(self.bytes_before), amount(self.bytes_after), ""]
        return Table(columns, [row(layer) for layer in self.layers], "", footer)

    def __str__(self) -> str:
        return str(self.table())

    def __rich__(self):
        return self.table()
