"""Write results to standard output and messages to standard error."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

from pydantic import BaseModel
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.style import Style
from rich.table import Table
from rich.text import Text

from gpu_client.cli.core.formats import plain, printable
from gpu_client.transport.transfer.manager import Progress as BytesMoved

_PIPED_WIDTH = 100_000
"""Width of pipes and files, which have no terminal width; wide enough that no row is cut or folded."""


class CellFit(Enum):
    """Layout of a column's cells on a terminal that is too narrow."""

    WHOLE = "unchanged"
    CUT = "truncated with an ellipsis, one line per row"
    FOLDED = "continued on the next line"


WHOLE, CUT, FOLDED = CellFit


@dataclass(frozen=True)
class TableColumn:
    """Column of a table."""

    name: str
    fit: CellFit = WHOLE
    right: bool = False
    """True for numbers and money, which are never cut: other columns give way."""
    from_width: int = 0
    """Least width of the terminal that shows the column, for a column that narrow terminals leave out."""


_STYLES = {
    "complete": "green",
    "running": "cyan",
    "failed": "red",
    "interrupted": "yellow",
    "paused": "yellow",
    "canceled": "dim",
    "revoked": "dim",
    "expired": "dim",
    "damaged": "red",
}
"""Styles of states in a table."""


class CommandOutput:
    """Output streams of one command. Removes control characters from foreign text: job names, reasons, log lines."""

    def __init__(self) -> None:
        # Tests replace the streams, therefore each session creates its consoles.
        self._out = _console(sys.stdout)
        self.err = _console(sys.stderr)

    def note(self, text: str) -> None:
        """Write a message for the user to standard error."""
        self.err.print(Text(plain(text)), soft_wrap=True)

    def link(self, before: str, label: str, url: str, after: str) -> None:
        """Write a message with a link: the label is clickable on a terminal, elsewhere the URL follows."""
        text = Text(plain(before))
        text.append(plain(label), Style(link=plain(url)) if self.live and self._supports_links() else None)
        text.append(f" {plain(after)}")
        if not (self.live and self._supports_links()):
            text.append(f" {plain(url)}")
        self.err.print(text, soft_wrap=True)

    @staticmethod
    def _supports_links() -> bool:
        """Return True if the terminal supports hyperlinks; other terminals would hide the URL."""
        terminal = os.environ.get("TERM", "")
        return os.environ.get("TERM_PROGRAM") != "Apple_Terminal" and terminal not in ("", "dumb", "linux")

    def line(self, text: str) -> None:
        """Write one line of the result; keep its colors."""
        self._out.print(Text.from_ansi(printable(text)), soft_wrap=True)

    def raw(self, text: str) -> None:
        """Write one line of the result unchanged: an id, a key, JSON."""
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    def json(self, value: Any) -> None:
        """Write one JSON document."""
        self.raw(json.dumps(as_data(value), indent=2, ensure_ascii=False))

    def json_line(self, value: Any) -> None:
        """Write one JSON document on one line, as part of a stream."""
        self.raw(json.dumps(as_data(value), ensure_ascii=False))

    def paragraph(self, text: str) -> None:
        """Write sentences of the result, wrapped between words."""
        self.print(Text(plain(text)))

    def items(self, lines: Iterable[str]) -> None:
        """Write a list of sentences, each with a dash."""
        table = Table.grid(padding=(0, 1))
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for line in lines:
            table.add_row("  -", Text(plain(line)))
        self.print(table)

    def table(self, columns: Sequence[TableColumn | str], rows: Iterable[Sequence[str]]) -> None:
        """Write rows under headings. Omits empty columns, and the whole table without rows."""
        table = build_table(columns, rows)
        if table is not None:
            self.print(table)

    def print(self, content: RenderableType) -> None:
        """Write tables and texts without trailing blanks."""
        with self._out.capture() as shown:
            self._out.print(content)
        lines = shown.get().removesuffix("\n").split("\n")
        sys.stdout.write("".join(f"{line.rstrip()}\n" for line in lines))
        sys.stdout.flush()

    def clear(self) -> None:
        """Clear a terminal; do nothing on a pipe or file."""
        if self._out.is_terminal:
            self._out.clear()

    @contextmanager
    def live_area(self) -> Iterator[Callable[[RenderableType], None]]:
        """Yield a function that redraws one area of the terminal. The last content remains. Requires `live`."""
        with Live(console=self.err, auto_refresh=False, vertical_overflow="crop") as live:
            yield lambda content: live.update(content, refresh=True)

    @property
    def terminal_size(self) -> tuple[int, int]:
        """Return lines and columns of the terminal on standard error."""
        return self.err.height, self.err.width

    @property
    def supports_unicode(self) -> bool:
        """Return True if standard error accepts UTF-8."""
        return self.err.encoding.lower().startswith("utf")

    def fields(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Write names and values, one pair per line; omit empty values."""
        fields = build_fields(pairs)
        if fields.row_count:
            self.print(fields)

    @contextmanager
    def bytes_bar(self, title: str, total_bytes: int) -> Iterator[BytesMoved]:
        """Yield the progress callback of a transfer; show a bar if standard error is a terminal."""
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        bar = Progress(*columns, TimeRemainingColumn(), console=self.err, transient=True, disable=not self.live)
        with bar:
            task = bar.add_task(title, total=total_bytes)
            yield lambda moved_bytes: bar.update(task, advance=moved_bytes)

    @property
    def live(self) -> bool:
        """Return True if standard error is a terminal."""
        return self.err.is_terminal


def build_table(columns: Sequence[TableColumn | str], rows: Iterable[Sequence[str]]) -> RenderableType | None:
    """Build rows under headings without empty columns; None without rows."""
    every = [column if isinstance(column, TableColumn) else TableColumn(column) for column in columns]
    cells = [[plain(cell) for cell in row] for row in rows]
    kept = [number for number in range(len(every)) if any(row[number] for row in cells)]
    return (
        _FittedTable([every[number] for number in kept], [[row[number] for number in kept] for row in cells])
        if kept
        else None
    )


@dataclass(frozen=True)
class _FittedTable:
    """Table whose columns depend on the width of the terminal."""

    columns: list[TableColumn]
    rows: list[list[str]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = [at for at, column in enumerate(self.columns) if column.from_width <= options.max_width]
        table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
        for at in shown:
            column = self.columns[at]
            table.add_column(
                column.name,
                no_wrap=column.fit is WHOLE,
                overflow="ellipsis" if column.fit is WHOLE else "fold",
                justify="right" if column.right else "left",
                min_width=max(cell_len(row[at]) for row in self.rows) if column.right else None,
            )
        for row in self.rows:
            table.add_row(*(_cell(row[at], self.columns[at].fit) for at in shown))
        yield table


def build_fields(pairs: Iterable[tuple[str, str]]) -> Table:
    """Build names and values, one pair per line, without empty values."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in pairs:
        if value:
            table.add_row(name, Text(plain(value)))
    return table


def _cell(text: str, fit: CellFit) -> Text:
    style = _STYLES.get(text, "") if fit is WHOLE else ""
    if fit is CUT:
        return Text(text, style, no_wrap=True, overflow="ellipsis")
    return Text(text, style)


def as_data(value: Any) -> Any:
    """Convert models, and lists and dicts of models, to plain JSON values."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, dict):
        return {key: as_data(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_data(item) for item in value]
    return value


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise BrokenPipeError, which `main` converts to exit code 141; rich would exit with 1."""
        raise BrokenPipeError


def _console(stream: Any) -> Console:
    piped = not (hasattr(stream, "isatty") and stream.isatty())
    return _Console(file=stream, markup=False, highlight=False, emoji=False, width=_PIPED_WIDTH if piped else None)
