"""The table and the plot of sparse_minilm.py."""

from __future__ import annotations

import pathlib
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import rich.box
import rich.console
import rich.table

_DENSE, _SPARSE = "#6b7280", "#1f77b4"


def _batches(row: dict[str, Any]) -> list[int]:
    return [int(name.split("_")[1]) for name in row if name.startswith("batch_")]


def show(results: dict[str, Any], console: rich.console.Console) -> None:
    """Prints the results as a table, with what its numbers mean below it."""
    meta, rows = results["meta"], results["rows"]
    dense = rows[0]
    table = rich.table.Table(
        title=f"{meta['model']}, all projections pruned by magnitude, no retraining",
        box=rich.box.SIMPLE_HEAD,
        collapse_padding=True,
    )
    table.add_column("weights", no_wrap=True)
    for name in ("cosine\nmean", "\nmin", "same\nnearest", "layers\nMB", "file\nMB", "memory\nMB"):
        table.add_column(name, justify="right", no_wrap=True)
    for size in _batches(dense):
        table.add_column(f"batch {size}\nms", justify="right", no_wrap=True)

    def bytes_cell(row, field):
        share = "" if row is dense else f"\n{row[field] / dense[field]:.0%}"
        return f"{row[field] / 1e6:.1f}{share}"

    def time_cell(row, size):
        median = row[f"batch_{size}_ms"]["median"]
        gain = "" if row is dense else f"\n{dense[f'batch_{size}_ms']['median'] / median:.2f}x"
        return f"{median:.1f}{gain}"

    for row in rows:
        table.add_row(
            row["name"],
            f"{row['cosine_mean']:.4f}",
            f"{row['cosine_min']:.4f}",
            f"{row['nearest']:.1%}",
            *(bytes_cell(row, field) for field in ("projection_bytes", "file_bytes", "resident_bytes")),
            *(time_cell(row, size) for size in _batches(dense)),
        )
    console.print(table)
    calls = " and ".join(f"{dense[f'batch_{size}_ms']['calls']}" for size in _batches(dense))
    notes = {
        "input": f"{meta['sentences']} sentences of Python's language reference, padded to {meta['length']} tokens",
        "numbers": meta["precision"],
        "sparse": meta["kernel"],
        "cosine": "of a sentence's embedding with its dense embedding",
        "same nearest": "sentences whose nearest other sentence is that of the dense model",
        "MB": "10^6 bytes, below it the share of dense",
        "layers": "values, masks and biases of the pruned projections",
        "file": "safetensors file of the whole encoder",
        "memory": "all arrays of the encoder; its embedding tables stay dense",
        "ms": f"median time of a call of the jitted encoder in this process ({calls} calls), encoders in turn, after a "
        f"call that compiles; below it dense time / sparse time; on {meta['device']}",
    }
    legend = rich.table.Table(box=None, show_header=False, pad_edge=False)
    for name, text in notes.items():
        legend.add_row(name, text)
    console.print(legend)
    console.print()
    example = results["example"]
    neighbours = rich.table.Table(
        title=f'nearest to: "{example["query"]}"', box=rich.box.SIMPLE_HEAD, title_justify="left"
    )
    neighbours.add_column("weights")
    neighbours.add_column("nearest of the other sentences")
    for name, sentence in example["nearest"].items():
        neighbours.add_row(name, sentence)
    console.print(neighbours)


def plot(results: dict[str, Any], path: pathlib.Path) -> None:
    """Draws agreement, size and latency of all variants into a PNG file."""
    meta, rows = results["meta"], results["rows"]
    names = [row["name"] for row in rows]
    colours = [_DENSE] + [_SPARSE] * (len(rows) - 1)
    figure, axes = plt.subplots(2, 2, figsize=(11, 7.5), layout="constrained")
    figure.suptitle(f"{meta['model']}: projections pruned by magnitude, no retraining\n{meta['device']}", fontsize=12)
    _plot_agreement(axes[0, 0], rows[1:], meta["sentences"])
    _plot_bars(
        axes[0, 1],
        names,
        np.array([row["file_bytes"] for row in rows]) / 1e6,
        colours,
        "size on disk [MB = 10$^6$ bytes]",
        "Size, and the part that the projections take",
    )
    projections = np.array([row["projection_bytes"] for row in rows]) / 1e6
    axes[0, 1].bar(names, projections, color="none", edgecolor="black", hatch="///", label="projections")
    axes[0, 1].legend(loc="upper right", framealpha=1)
    for axis, size in zip(axes[1], _batches(rows[0]), strict=True):
        times = [row[f"batch_{size}_ms"] for row in rows]
        medians = np.array([t["median"] for t in times])
        spread = np.array([[t["median"] - t["low"] for t in times], [t["high"] - t["median"] for t in times]])
        title = f"Latency, {size} sentence{'s' if size > 1 else ''} of {meta['length']} tokens (whiskers: quartiles)"
        _plot_bars(axis, names, medians, colours, "median time of a call [ms]", title, spread)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _plot_agreement(axis, rows: list[dict[str, Any]], sentences: int) -> None:
    axis.boxplot(
        [row["cosines"] for row in rows],
        tick_labels=[row["name"] for row in rows],
        whis=(0, 100),
        widths=0.5,
        patch_artist=True,
        boxprops={"facecolor": "#cfe3f3", "edgecolor": _SPARSE},
        medianprops={"color": "black"},
    )
    for i, row in enumerate(rows, 1):
        axis.annotate(
            f"same nearest\n{row['nearest']:.0%}",
            (i, 0.02),
            xycoords=("data", "axes fraction"),
            ha="center",
            va="bottom",
            fontsize=9,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )
    low = min(min(row["cosines"]) for row in rows)
    axis.set_ylim(low - 0.35 * (1 - low), 1.0 + 0.03 * (1 - low))
    axis.set_ylabel("cosine with the dense embedding")
    axis.set_title(f"Agreement on {sentences} sentences (box: quartiles, whiskers: all)", fontsize=10)
    axis.grid(axis="y", alpha=0.3)


def _plot_bars(axis, names, heights, colours, label: str, title: str, spread=None) -> None:
    bars = axis.bar(names, heights, color=colours, yerr=spread, capsize=4)
    axis.bar_label(bars, fmt="%.1f" if max(heights) < 1000 else "%.0f", padding=2, fontsize=9)
    axis.set_ylabel(label)
    axis.set_ylim(0, 1.2 * max(heights if spread is None else heights + spread[1]))
    axis.set_title(title, fontsize=10)
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)
