"""Where output goes: results to standard output, everything else to standard error."""

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
from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.style import Style
from rich.table import Table
from rich.text import Text

from gpu_client.cli.core.formats import plain, printable
from gpu_client.transport.transfer.manager import Progress as BytesMoved

_PIPED_WIDTH = 100_000
"""Into a pipe or a file nothing is cut or broken to the width of a terminal that is not there."""


class Fit(Enum):
    """What becomes of a column's cells on a terminal that is too narrow."""

    WHOLE = "stays as it is"
    CUT = "ends with an ellipsis, so that a row stays one line"
    FOLDED = "goes on in the next line"


WHOLE, CUT, FOLDED = Fit


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    name: str
    fit: Fit = WHOLE
    right: bool = False


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
"""States, as they stand in a table."""


class Screen:
    """The two streams of one command. Job names, reasons and log lines are foreign text: they are made harmless."""

    def __init__(self) -> None:
        # made late, for tests replace the streams
        self._out = _console(sys.stdout)
        self.err = _console(sys.stderr)

    def say(self, text: str) -> None:
        """A message to the person; never part of a result."""
        self.err.print(Text(plain(text)), soft_wrap=True)

    def link(self, before: str, label: str, url: str, after: str) -> None:
        """A message with a link: the label is one on a terminal, elsewhere the address stands at the end."""
        text = Text(plain(before))
        text.append(plain(label), Style(link=plain(url)) if self.live and self._knows_links() else None)
        text.append(f" {plain(after)}")
        if not (self.live and self._knows_links()):
            text.append(f" {plain(url)}")
        self.err.print(text, soft_wrap=True)

    @staticmethod
    def _knows_links() -> bool:
        """Whether this terminal makes a link of a word; where it does not, nothing of the address would be seen."""
        terminal = os.environ.get("TERM", "")
        return os.environ.get("TERM_PROGRAM") != "Apple_Terminal" and terminal not in ("", "dumb", "linux")

    def line(self, text: str) -> None:
        """One line of result; colours in it stay."""
        self._out.print(Text.from_ansi(printable(text)), soft_wrap=True)

    def raw(self, text: str) -> None:
        """One line of result exactly as it is: ids, keys, JSON."""
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    def json(self, value: Any) -> None:
        """One JSON document."""
        self.raw(json.dumps(as_data(value), indent=2, ensure_ascii=False))

    def json_line(self, value: Any) -> None:
        """One JSON document on one line, of a stream of them."""
        self.raw(json.dumps(as_data(value), ensure_ascii=False))

    def paragraph(self, text: str) -> None:
        """A sentence or more of result, broken between words where a terminal is too narrow."""
        self._print(Text(plain(text)))

    def items(self, lines: Iterable[str]) -> None:
        """Sentences of result, each with a dash."""
        table = Table.grid(padding=(0, 1))
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for line in lines:
            table.add_row("  -", Text(plain(line)))
        self._print(table)

    def table(self, columns: Sequence[Column | str], rows: Iterable[Sequence[str]]) -> None:
        """Rows under headings. Nothing without rows; no column in which nothing stands."""
        every = [column if isinstance(column, Column) else Column(column) for column in columns]
        cells = [[plain(cell) for cell in row] for row in rows]
        kept = [number for number in range(len(every)) if any(row[number] for row in cells)]
        if not kept:
            return
        table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
        for column in (every[number] for number in kept):
            table.add_column(
                column.name,
                no_wrap=column.fit is WHOLE,
                overflow="ellipsis" if column.fit is WHOLE else "fold",
                justify="right" if column.right else "left",
            )
        for row in cells:
            table.add_row(*(_cell(row[number], every[number].fit) for number in kept))
        self._print(table)

    def _print(self, content: RenderableType) -> None:
        """Without the blanks that fill the lines of a table."""
        with self._out.capture() as shown:
            self._out.print(content)
        lines = shown.get().removesuffix("\n").split("\n")
        sys.stdout.write("".join(f"{line.rstrip()}\n" for line in lines))
        sys.stdout.flush()

    def clear(self) -> None:
        """Begin the terminal anew; does nothing elsewhere."""
        if self._out.is_terminal:
            self._out.clear()

    @contextmanager
    def redrawn(self) -> Iterator[Callable[[RenderableType], None]]:
        """A part of the terminal that is drawn anew with each call; what was drawn last stays. Only where `live`."""
        with Live(console=self.err, auto_refresh=False, vertical_overflow="crop") as area:
            yield lambda content: area.update(content, refresh=True)

    @property
    def area(self) -> tuple[int, int]:
        """Lines and columns of the terminal, on standard error."""
        return self.err.height, self.err.width

    @property
    def knows_blocks(self) -> bool:
        """Whether the terminal shows more than ASCII."""
        return self.err.encoding.lower().startswith("utf")

    def fields(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Names and values, one pair a line; empty values are left out."""
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in pairs:
            if value:
                table.add_row(name, Text(plain(value)))
        self._print(table)

    @contextmanager
    def bytes_bar(self, title: str, total_bytes: int) -> Iterator[BytesMoved]:
        """A bar on a terminal's standard error, nothing elsewhere; gives what transfers report to."""
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        bar = Progress(*columns, TimeRemainingColumn(), console=self.err, transient=True, disable=not self.live)
        with bar:
            task = bar.add_task(title, total=total_bytes)
            yield lambda moved_bytes: bar.update(task, advance=moved_bytes)

    @property
    def live(self) -> bool:
        """Whether a person looks at standard error."""
        return self.err.is_terminal


def _cell(text: str, fit: Fit) -> Text:
    style = _STYLES.get(text, "") if fit is WHOLE else ""
    if fit is CUT:
        return Text(text, style, no_wrap=True, overflow="ellipsis")
    return Text(text, style)


def as_data(value: Any) -> Any:
    """Models, and lists and objects of them, as plain JSON values."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, dict):
        return {key: as_data(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_data(item) for item in value]
    return value


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Rich would leave with exit code 1; `main` knows better."""
        raise BrokenPipeError


def _console(stream: Any) -> Console:
    piped = not (hasattr(stream, "isatty") and stream.isatty())
    return _Console(file=stream, markup=False, highlight=False, emoji=False, width=_PIPED_WIDTH if piped else None)
