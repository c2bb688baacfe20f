"""Where output goes: results to standard output, everything else to standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pydantic import BaseModel
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from gpu_client.cli.formats import plain, printable
from gpu_client.transport.transfer import Progress as BytesMoved

_PIPED_WIDTH = 200
"""Into a pipe or a file nothing is cut to the width of a terminal that is not there."""


class Screen:
    """The two streams of one command. Job names, reasons and log lines are foreign text: they are made harmless."""

    def __init__(self) -> None:
        # made late, for tests replace the streams
        self._out = _console(sys.stdout)
        self.err = _console(sys.stderr)

    def say(self, text: str) -> None:
        """A message to the person; never part of a result."""
        self.err.print(Text(plain(text)), soft_wrap=True)

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

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Rows under headings."""
        table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
        for column in columns:
            table.add_column(column, overflow="fold", justify="right" if column in _NUMBERS else "left")
        for row in rows:
            table.add_row(*(Text(plain(cell)) for cell in row))
        self._out.print(table)

    def clear(self) -> None:
        """Begin the terminal anew; does nothing elsewhere."""
        if self._out.is_terminal:
            self._out.clear()

    def fields(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Names and values, one pair a line; empty values are left out."""
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in pairs:
            if value:
                table.add_row(name, Text(plain(value)))
        self._out.print(table)

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


_NUMBERS = frozenset({"size", "step", "attempts", "#", "line"})


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
