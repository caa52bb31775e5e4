"""Draws the figures of the documentation as SVG: ``python docs/figures/draw.py [--check]``.

Nothing is drawn by hand or at random, so that the files can be compared with what this script gives.
"""

from __future__ import annotations

import argparse
import html
import pathlib
import sys

FOLDER = pathlib.Path(__file__).parent
INK, FAINT, GRID = "#24292f", "#6e7781", "#d0d7de"
KEPT, MASK, X, Y = "#3f7fbf", "#d9822b", "#4c9f70", "#8a63b0"


class Figure:
    """Rectangles, lines and text on a white ground."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'role="img" font-family="Helvetica, Arial, sans-serif" font-size="13">',
            f"<title>{html.escape(title)}</title>",
            f'<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{FAINT}"/></marker></defs>',
            f'<rect width="{width}" height="{height}" rx="8" fill="white"/>',
        ]

    def box(self, x: float, y: float, width: float, height: float, fill: str = "white", stroke: str = GRID) -> None:
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" stroke="{stroke}"/>'
        )

    def text(self, x: float, y: float, text: str, anchor: str = "start", fill: str = INK, weight: str = "") -> None:
        bold = f' font-weight="{weight}"' if weight else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{fill}"{bold}>{html.escape(text)}</text>'
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        self._parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{FAINT}" stroke-width="1.5" '
            'marker-end="url(#tip)"/>'
        )

    def cell(self, x: float, y: float, size: float, text: str, fill: str = "white") -> None:
        """A square with a short text in its middle."""
        self.box(x, y, size, size, fill)
        if text:
            ink = INK if fill == "white" else "white"
            self.text(x + size / 2, y + size / 2 + 4.5, text, "middle", ink)

    def svg(self) -> str:
        return "\n".join([*self._parts, "</svg>"]) + "\n"


def weight_format() -> Figure:
    """One column block, 8 of its 32 units: dense, mask word, values."""
    figure = Figure(780, 320, "A weight in the N:M format")
    kept = {0: "a", 3: "b", 5: "c", 6: "d"}
    others = {0: (1, 2, 4, 7), 2: (0, 2, 5, 6), 3: (1, 3, 4, 6)}
    figure.text(24, 30, "dense W, pattern 2:4", weight="bold")
    figure.text(24, 48, "in_features down, out_features across", fill=FAINT)
    for column in range(4):
        for row in range(8):
            mine = column == 1 and row in kept
            fill = KEPT if mine else ("#b7cde4" if row in others.get(column, ()) else "white")
            figure.cell(70 + 26 * column, 62 + 26 * row, 26, kept.get(row, "") if mine else "", fill)
    for group in range(2):
        top = 62 + 104 * group
        figure.text(62, top + 56, f"group {group}", "end", FAINT)
        figure.box(68, top, 108, 104, "none", INK)
    figure.text(122, 292, "... 32 rows are one window", "middle", FAINT)
    figure.arrow(186, 166, 250, 110)
    figure.arrow(186, 166, 250, 226)
    figure.text(262, 62, "mask [windows, out_blocks]: one uint32 for column 1", weight="bold")
    for bit in range(8):
        figure.cell(262 + 26 * bit, 76, 26, "1" if bit in kept else "0", MASK if bit in kept else "white")
        figure.text(275 + 26 * bit, 118, str(bit), "middle", FAINT)
    figure.text(480, 94, "... bit 31", fill=FAINT)
    figure.text(262, 140, "bit u: unit u of the window is kept", fill=FAINT)
    figure.text(262, 196, "values [windows, out_blocks, q, bk, bn]: the kept units, in order", weight="bold")
    for j, value in enumerate(kept.values()):
        figure.cell(262 + 26 * j, 210, 26, value, KEPT)
        figure.text(275 + 26 * j, 252, str(j), "middle", FAINT)
    figure.text(376, 228, "... j = q - 1 = 15", fill=FAINT)
    figure.text(262, 276, "2:4, 4:8, 8:16 and 16:32 all keep q = 16 of 32: one kernel serves them", fill=FAINT)
    return figure


def spmv() -> Figure:
    """Why one token is free of bank conflicts."""
    figure = Figure(720, 300, "One token: a window of x is the 32 banks of shared memory")
    figure.text(24, 32, "one window of x in shared memory: 32 words = 32 banks", weight="bold")
    for bank in range(16):
        figure.cell(40 + 38 * bank, 48, 38, f"x{bank}", X)
        figure.text(59 + 38 * bank, 102, str(bank), "middle", FAINT)
    figure.text(656, 72, "... 31", fill=FAINT)
    figure.text(8, 102, "bank", fill=FAINT)
    reads = {0: 2, 1: 5, 2: 5, 3: 9, 4: 0, 5: 13}
    for lane, bank in reads.items():
        left = 60 + 100 * lane
        figure.box(left, 196, 86, 60, "white", INK)
        figure.text(left + 43, 216, f"lane {lane}", "middle", weight="bold")
        figure.text(left + 43, 234, f"column {lane}", "middle", FAINT)
        figure.text(left + 43, 250, f"bit {bank} is set", "middle", MASK)
        figure.arrow(59 + 38 * bank, 110, left + 43, 192)
    figure.text(24, 284, "Different bits are different banks, equal bits (lanes 1 and 2) one broadcast: no conflicts.")
    return figure


def many_tokens() -> Figure:
    """The gather of a vector-wise product."""
    figure = Figure(720, 330, "Many tokens: kept rows of x are gathered for dense tensor cores")
    figure.text(24, 32, "VW-128, 1:4", weight="bold")
    figure.text(24, 50, "one column block of W", fill=FAINT)
    for row in range(12):
        kept = row in (1, 6, 8)
        figure.box(40, 64 + 18 * row, 120, 18, KEPT if kept else "white")
        if kept:
            figure.text(100, 77 + 18 * row, f"row {row}", "middle", "white")
    figure.text(230, 32, "xᵀ [in_features, tokens]", weight="bold")
    figure.text(230, 50, "tokens are contiguous", fill=FAINT)
    for row in range(12):
        figure.box(230, 64 + 18 * row, 150, 18, X if row in (1, 6, 8) else "white")
    for i, row in enumerate((1, 6, 8)):
        figure.arrow(384, 73 + 18 * row, 452, 203 + 18 * i)
    figure.text(458, 72, "shared memory", weight="bold")
    figure.box(458, 86, 110, 54, KEPT)
    figure.text(513, 117, "values", "middle", "white")
    figure.text(576, 110, "by TMA: kept", fill=FAINT)
    figure.text(576, 126, "rows lie together", fill=FAINT)
    for i, row in enumerate((1, 6, 8)):
        figure.box(458, 194 + 18 * i, 150, 18, X)
        figure.text(533, 207 + 18 * i, f"row {row} of xᵀ", "middle", "white")
    figure.text(458, 268, "by cp.async, row by row", fill=FAINT)
    figure.text(40, 310, "yᵀ += valuesᵀ · gathered xᵀ: a dense product of the kept rows alone, a quarter of the work.")
    return figure


def trilinear() -> Figure:
    """Three primitives, each the derivative of the others."""
    figure = Figure(720, 250, "Three primitives, closed under differentiation")
    figure.text(360, 34, "T(x, values, g) = Σ over kept units of x · value · g", "middle", weight="bold")
    boxes = (
        (30, Y, "spmm", "y = x W", "∂T/∂g: forward"),
        (265, X, "spmm, transpose", "dx = g Wᵀ", "∂T/∂x"),
        (500, KEPT, "sddmm", "dv = (xᵀ g) where kept", "∂T/∂values"),
    )
    for left, colour, name, equation, role in boxes:
        figure.box(left, 84, 190, 84, colour)
        figure.text(left + 95, 108, name, "middle", "white", "bold")
        figure.text(left + 95, 132, equation, "middle", "white")
        figure.text(left + 95, 154, role, "middle", "white")
        figure.arrow(360, 44, left + 95, 80)
    figure.arrow(222, 118, 262, 118)
    figure.arrow(263, 136, 223, 136)
    figure.arrow(457, 118, 497, 118)
    figure.arrow(498, 136, 458, 136)
    figure.text(360, 200, "The derivative of each is the other two: every order exists, forward and reverse,", "middle")
    figure.text(360, 220, "and no dense [in_features, out_features] buffer is ever made.", "middle")
    return figure


FIGURES = {"format": weight_format, "one_token": spmv, "many_tokens": many_tokens, "derivatives": trilinear}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail where a file is out of date")
    check = parser.parse_args().check
    stale = []
    for name, draw in FIGURES.items():
        path = FOLDER / f"{name}.svg"
        if not path.is_file() or path.read_text(encoding="utf-8") != draw().svg():
            stale.append(path.name)
            if not check:
                path.write_text(draw().svg(), encoding="utf-8")
    for name in stale:
        print(f"{name}: {'out of date' if check else 'written'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
