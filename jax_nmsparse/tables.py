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
    """Rows of text under a header; `str` gives plain text, and rich draws it.

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

    def __str__(self) -> str:
        names = [name.removeprefix("#") for name in self.columns]
        lines = [names, *self.rows, *([] if self.footer is None else [self.footer])]
        widths = [max(len(line[i]) for line in lines) for i in range(len(names))]

        def text(line: Sequence[str]) -> str:
            cells = zip(line, widths, self.columns, strict=True)
            padded = (cell.rjust(w) if name.startswith("#") else cell.ljust(w) for cell, w, name in cells)
            return "  ".join(padded).rstrip()

        return "\n".join([*([self.title] if self.title else []), *map(text, lines)])

    def __rich__(self) -> Any:
        from rich.table import Table as RichTable  # noqa: PLC0415  (rich itself calls this)

        table = RichTable(title=self.title or None, show_footer=self.footer is not None)
        for i, name in enumerate(self.columns):
            footer = "" if self.footer is None else self.footer[i]
            justify = "right" if name.startswith("#") else "left"
            # The first and the last column, names and notes, may be long.
            wraps = i in (0, len(self.columns) - 1)
            table.add_column(name.removeprefix("#"), footer, justify=justify, overflow="fold", no_wrap=not wraps)
        for row in self.rows:
            table.add_row(*(cell.replace("[", r"\[") for cell in row))
        return table


def show(what: Any) -> None:
    """Prints to standard output, drawn by rich on a terminal, otherwise as plain text."""
    rich = _rich()
    if rich is None or not sys.stdout.isatty():
        print(what)
    else:
        rich.console.Console().print(what)


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
