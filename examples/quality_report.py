"""The table and the plot of quality.py."""

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

_COLOURS = {"magnitude": "#9ca3af", "wanda": "#60a5fa", "sparsegpt": "#1d4ed8"}


def show(results: dict[str, Any], console: rich.console.Console) -> None:
    """Prints one line for every pattern and method."""
    meta = results["meta"]
    table = rich.table.Table(
        title=f"{meta['model']}, pruned without retraining", box=rich.box.SIMPLE_HEAD, collapse_padding=True
    )
    for name in ("pattern", "method"):
        table.add_column(name, no_wrap=True)
    for name in ("cosine\nmean", "\nmin", "same\nnearest", "10 nearest\nshared", "output\nerror"):
        table.add_column(name, justify="right", no_wrap=True)
    previous = None
    for row in results["rows"]:
        if previous not in (None, row["pattern"]):
            table.add_section()
        previous = row["pattern"]
        table.add_row(
            row["pattern"],
            row["method"],
            f"{row['cosine_mean']:.4f}",
            f"{row['cosine_min']:.4f}",
            f"{row['nearest']:.1%}",
            f"{row['neighbours']:.1%}",
            f"{row['output_error']:.4f}",
        )
    console.print(table)
    console.print(
        f"calibrated on {meta['calibration']['sentences']} sentences ({meta['calibration']['tokens']} tokens), "
        f"measured on {meta['held_out']['sentences']} others, against the dense model; output error: "
        "||x (W - W')||² / ||x W||², mean over the projections",
        soft_wrap=True,
    )


def plot(results: dict[str, Any], path: pathlib.Path) -> None:
    """Draws agreement by pattern and method into a PNG file."""
    rows = {(row["pattern"], row["method"]): row for row in results["rows"]}
    patterns = list(dict.fromkeys(pattern for pattern, _ in rows))
    methods = list(dict.fromkeys(method for _, method in rows))
    figure, axes = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
    width = 0.8 / len(methods)
    for axis, field, label in (
        (axes[0], "cosine_mean", "mean cosine with the dense embedding"),
        (axes[1], "neighbours", "share of the 10 nearest kept"),
    ):
        for i, method in enumerate(methods):
            place = np.arange(len(patterns)) + (i - (len(methods) - 1) / 2) * width
            axis.bar(place, [rows[p, method][field] for p in patterns], width, label=method, color=_COLOURS[method])
        axis.set_xticks(np.arange(len(patterns)), patterns, rotation=35, ha="right", fontsize=8)
        axis.set_ylabel(label, fontsize=9)
        axis.set_ylim(0, 1.02)
        axis.grid(axis="y", alpha=0.3)
        axis.set_axisbelow(True)
    axes[0].legend(fontsize=8, loc="upper right", framealpha=1)
    figure.suptitle(f"{results['meta']['model']}, pruned without retraining", fontsize=11)
    figure.savefig(path, dpi=100)
    plt.close(figure)
