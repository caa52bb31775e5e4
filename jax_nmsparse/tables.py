"""Tables and progress bars on a terminal: by rich where it is installed, otherwise as plain text."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def _rich() -> Any:
    """The modules of rich, or None."""
    try:
        import rich.console  # noqa: PLC0415  (an extra)
        import rich.progress  # noqa: PLC0415
        import rich.table  # noqa: PLC0415
    except ImportError:
        return None
    return rich


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of text under a header, without the columns that say nothing; `str` gives plain text, and rich draws it.

    Attributes:
      columns: Names. Columns whose name starts with "#" hold numbers: they are aligned to the right.
      rows: As many texts each as there are columns.
      title: Above.
      footer: None, or one more row below a line.

    Example:
      >>> print(Table(("layer", "#bytes"), [("a", "12"), ("bc", "7")]))
      layer  bytes
      a         12
      bc         7
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    footer: Sequence[str] | None = None

    def _shown(self) -> list[int]:
        """The columns that say anything."""
        return [i for i in range(len(self.columns)) if not self.rows or any(row[i] for row in self.rows)]

    def __str__(self) -> str:
        shown, footer = self._shown(), [] if self.footer is None else [self.footer]
        names = [name.removeprefix("#") for name in self.columns]
        lines = [[line[i] for i in shown] for line in (names, *self.rows, *footer)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        right = [self.columns[i].startswith("#") for i in shown]

        def text(line: Sequence[str]) -> str:
            cells = zip(line, widths, right, strict=True)
            return "  ".join(cell.rjust(w) if r else cell.ljust(w) for cell, w, r in cells).rstrip()

        return "\n".join([*([self.title] if self.title else []), *map(text, lines)])

    def __rich__(self) -> Any:
        import rich.box  # noqa: PLC0415  (rich itself calls this)
        from rich.table import Table as RichTable  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        table = RichTable(
            title=Text(self.title) if self.title else None,
            title_justify="left",
            show_footer=self.footer is not None,
            box=rich.box.SIMPLE_HEAD,
            pad_edge=False,
            padding=(0, 1, 0, 0),
        )
        cells = [[row[i] for row in self.rows] for i in range(len(self.columns))]
        shown = self._shown()
        # Names and notes, the first and the last column, are folded where the terminal is narrow.
        for i in shown:
            folds = i in (0, len(self.columns) - 1)
            name = Text(self.columns[i].removeprefix("#").replace(" ", "\n"))
            table.add_column(
                name,
                Text("" if self.footer is None else self.footer[i]),
                justify="right" if self.columns[i].startswith("#") else "left",
                overflow="fold",
                no_wrap=not folds,
                min_width=min(16, max(map(len, cells[i]), default=0)) if folds else None,
            )
        for row in self.rows:
            table.add_row(*(Text(row[i]) for i in shown))
        return table


def show(what: Any) -> None:
    """Prints to standard output: drawn by rich on a terminal that is wide enough, otherwise as plain text."""
    rich = _rich()
    console = None if rich is None or not sys.stdout.isatty() else rich.console.Console()
    # Measured with room to spare, since a measure never exceeds the width that it is given.
    if console is None or console.measure(what, options=console.options.update(width=1000)).minimum > console.width:
        print(what)
    else:
        console.print(what)


def track(
    items: Iterable[T], description: str, total: int, *, enabled: bool = True, label: Callable[[T], str] = str
) -> Iterator[T]:
    """The items, with a progress bar on standard error; lines of text where rich is missing or there is no terminal."""
    rich = _rich()
    if not enabled:
        yield from items
    elif rich is not None and sys.stderr.isatty():
        yield from rich.progress.track(
            items, description=description, total=total, console=rich.console.Console(stderr=True)
        )
    else:
        for done, item in enumerate(items, 1):
            print(f"{description} {done}/{total}: {label(item)}", file=sys.stderr, flush=True)
            yield item


def amount(nbytes: float) -> str:
    """Bytes for a reader.

    Example:
      >>> amount(123456)
      '123.5 kB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"
