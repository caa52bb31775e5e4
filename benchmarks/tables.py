"""Regenerates the tables between ``<!-- table: NAME -->`` and ``<!-- end -->`` in README.md and docs/ from the newest
recorded results: ``python -m benchmarks.tables [--check]``."""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
_MARKED = re.compile(r"(<!-- table: (?P<name>[\w-]+) (?P<device>[\w-]+) -->\n)(?:.*?)(?P<end><!-- end -->)", re.DOTALL)


def newest(device: str, suite: str) -> dict | None:
    """The newest recorded run of a suite."""
    runs = []
    for path in (RESULTS / device).glob("*.json"):
        run = json.loads(path.read_text(encoding="utf-8"))
        if run["meta"]["suite"] == suite:
            runs.append((run["meta"]["date"], run))
    return max(runs, key=lambda r: r[0])[1] if runs else None


def geometric_mean(numbers: Iterable[float]) -> float:
    numbers = list(numbers)
    return math.exp(sum(map(math.log, numbers)) / len(numbers))


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "| " + " | ".join("---" for _ in header) + " |"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def _provenance(run: dict) -> str:
    meta = run["meta"]
    jax = f"jax {meta['versions']['jax']}, " if meta["versions"].get("jax") else ""
    return f"{meta['device']}, {jax}revision {meta['revision']}, {meta['date'][:10]}. Times: {meta['timing']}."


def _fastest(rows: list[dict]) -> list[dict]:
    """Where several kernels were measured for the same call, the fastest."""
    best: dict[tuple, dict] = {}
    names = ("op", "dtype", "precision", "block", "pattern", "tokens", "in_features", "out_features")
    for row in rows:
        key = tuple(row[n] for n in names)
        if key not in best or row["time_us"] < best[key]["time_us"]:
            best[key] = row
    return list(best.values())


def summary(run: dict, brief: bool = False) -> str:
    """One line per case over all its shapes: geometric mean, worst and best of dense_us / time_us.

    "row-major" is the same mean for calls of feature-major kernels whose neighbours are not.
    """
    groups: dict[tuple, list[dict]] = defaultdict(list)
    for row in _fastest(run["rows"]):
        if brief and (row["op"] != "spmm" or row["block"] == "1x64" or row["tokens"] in (2, 4, 32, 256)):
            continue
        key = (row["op"], row["dtype"], row["precision"], row["block"], row["pattern"], row["tokens"])
        groups[key].append(row)
    rows = []
    for (op, dtype, precision, block, pattern, tokens), group in groups.items():
        ratios = [r["dense_us"] / r["time_us"] for r in group]
        floors = [r["floor_us"] / r["time_us"] for r in group if r["floor_us"]]
        isolated = [r["dense_us"] / r["isolated_us"] for r in group if r.get("isolated_us")]
        kernels = ", ".join(sorted({r["kernel"] for r in group}))
        rows.append(
            [
                op,
                dtype if precision == "default" else f"{dtype} {precision}",
                pattern if block == "1x1" else f"{pattern}/{block}",
                str(tokens),
                f"{geometric_mean(ratios):.2f}",
                f"{min(ratios):.2f} to {max(ratios):.2f}",
                f"{geometric_mean(isolated):.2f}" if isolated else "",
                f"{100 * geometric_mean(floors):.0f} %" if floors else "",
                kernels,
            ]
        )
    header = [
        "op",
        "dtype",
        "pattern",
        "tokens",
        "dense / sparse time",
        "range over shapes",
        "row-major",
        "of the floor",
    ]
    return _table([*header, "kernel"], rows) + "\n" + _provenance(run) + "\n"


def full(run: dict) -> str:
    """One line per row."""
    rows = [
        [
            row["op"],
            row["dtype"],
            row["pattern"] if row["block"] == "1x1" else f"{row['pattern']}/{row['block']}",
            str(row["tokens"]),
            f"{row['in_features']}x{row['out_features']}",
            row["kernel"],
            f"{row['time_us']:.1f}",
            f"{row['isolated_us']:.1f}" if row.get("isolated_us") else "",
            f"{row['dense_us']:.1f}",
            f"{row['dense_us'] / row['time_us']:.2f}",
            "" if row["floor_us"] is None else f"{row['floor_us']:.1f}",
            ", ".join(f"{peer} {us:g}" for peer, us in row["peers"].items()),
        ]
        for row in run["rows"]
    ]
    header = [
        "op",
        "dtype",
        "pattern",
        "tokens",
        "in x out",
        "kernel",
        "us",
        "row-major us",
        "dense us",
        "ratio",
        "floor us",
        "peers us",
    ]
    return _table(header, rows) + "\n" + _provenance(run) + "\n"


def models(run: dict) -> str:
    """One line per whole model."""
    rows = [
        [
            f"decode, batch {row['batch']}" if row["phase"] == "decode" else f"prefill, {row['tokens']} tokens",
            row["pattern"] if row["block"] == "1x1" else f"{row['pattern']}/{row['block']}",
            row["head"],
            row["layers"],
            f"{row['tokens_per_s']:,.0f}",
            f"{row['dense_tokens_per_s']:,.0f}",
            f"{row['dense_us'] / row['time_us']:.2f}",
            "" if row["floor_us"] is None else f"{100 * row['floor_us'] / row['time_us']:.0f} %",
            f"{row['bytes'] / 1e9:.2f}",
            f"{row['dense_bytes'] / 1e9:.2f}",
            row["kernel"],
        ]
        for row in run["rows"]
    ]
    header = [
        "phase",
        "pattern",
        "head",
        "layers",
        "tokens/s",
        "dense tokens/s",
        "ratio",
        "of the floor",
        "GB",
    ]
    return _table([*header, "dense GB", "kernel of gate and up"], rows) + "\n" + _provenance(run) + "\n"


def quality(run: dict) -> str:
    """One line per pattern: cosine, nearest neighbours kept and output error by every method."""
    rows: dict[tuple[str, str], dict] = {(row["pattern"], row["method"]): row for row in run["rows"]}
    patterns, methods = (list(dict.fromkeys(key[i] for key in rows)) for i in (0, 1))
    forms = (
        ("cosine_mean", "cosine", lambda x: f"{x:.3f}"),
        ("neighbours", "10 nearest", lambda x: f"{100 * x:.0f} %"),
    )
    header = ["pattern", *(f"{title}, {method}" for _, title, _ in forms for method in methods)]
    lines = [
        [pattern, *(form(rows[pattern, method][field]) for field, _, form in forms for method in methods)]
        for pattern in patterns
    ]
    means = [
        form(sum(rows[pattern, method][field] for pattern in patterns) / len(patterns))
        for field, _, form in forms
        for method in methods
    ]
    meta = run["meta"]
    about = (
        f"{meta['model']}, float32, calibrated on {meta['calibration']['sentences']} sentences "
        f"({meta['calibration']['tokens']} tokens), measured on {meta['held_out']['sentences']} others. jax "
        f"{meta['versions']['jax']}, revision {meta['revision']}, {meta['date'][:10]}."
    )
    return _table(header, [*lines, ["mean", *means]]) + "\n" + about + "\n"


def pruning(run: dict) -> str:
    """One line per pattern and method: how long pruning one matrix takes."""
    rows = [
        [
            f"{row['size']}x{row['size']}",
            row["pattern"],
            row["method"],
            f"{row['seconds']:.2f}",
            f"{row['seconds_with_compile']:.2f}",
            f"{row['relative_error']:.4f}",
        ]
        for row in run["rows"]
    ]
    header = ["weight", "pattern", "method", "seconds", "with compilation", "relative squared error of x W"]
    return _table(header, rows) + "\n" + _provenance(run) + "\n"


def digits(run: dict) -> str:
    """One line per kind of network: accuracy over the seeds, and how the masks settle."""
    dense = run["rows"][0]["accuracy"]
    rows = []
    for row in run["rows"]:
        accuracy, flips = row["accuracy"], row["flip_rate"]
        settling = [f"{flips[i]:.4f}" for i in (0, len(flips) // 2, -1)] if row["name"] != "dense" else ["", "", ""]
        mean = statistics.mean(accuracy)
        change = f"{100 * (mean - statistics.mean(dense)):+.2f}" if row["name"] != "dense" else ""
        rows.append(
            [row["name"], f"{100 * mean:.2f} %", f"{100 * min(accuracy):.2f} to {100 * max(accuracy):.2f}", change]
            + settling
        )
    meta = run["meta"]
    header = ["weights", "accuracy", "range over seeds", "to dense", "flip rate, first epoch", "middle", "last"]
    about = f"{meta['network']}, {len(dense)} seeds, {meta['epochs']} epochs. jax {meta['versions']['jax']}, "
    return _table(header, rows) + "\n" + about + meta["date"][:10] + ".\n"


_OWN_TABLES = {"quality": quality, "sparsegpt": pruning, "digits": digits, "model": models}


def render(name: str, device: str) -> str:
    """The text of a table: "<suite>" is the summary, "<suite>-brief" less of it, "<suite>-full" every row.

    "quality" and "digits" lie in a folder "quality", named like a device: they do not depend on one.
    """
    suite, _, form = name.partition("-")
    run = newest(device, suite)
    if run is None:
        return f"No run of suite {suite} on {device} is recorded yet.\n"
    if suite in _OWN_TABLES:
        return _OWN_TABLES[suite](run)
    return full(run) if form == "full" else summary(run, brief=form == "brief")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail where a table is out of date")
    options = parser.parse_args(arguments)
    stale = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        new = _MARKED.sub(lambda m: m[1] + "\n" + render(m["name"], m["device"]) + "\n" + m["end"], text)
        if new != text:
            stale.append(path)
            if not options.check:
                path.write_text(new, encoding="utf-8")
    for path in stale:
        print(f"{path.relative_to(ROOT)}: {'out of date' if options.check else 'rewritten'}")
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
