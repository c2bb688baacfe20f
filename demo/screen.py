"""Show the phases of a demo: a line with a bar each on a terminal, plain lines elsewhere."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

NAME_WIDTH = 32
TEXT_WIDTH = 100
QUIET_SHARE = 0.25
"""Without a terminal a phase prints a line each time it has advanced by this share."""


class _Mark(SpinnerColumn):
    """A spinner that becomes a mark at the end of the phase."""

    def render(self, task: Task) -> RenderableType:
        mark: RenderableType | None = task.fields["mark"]
        return mark if mark is not None else super().render(task)


class Phase:
    """A running phase of a demo: a line with a bar on a terminal, a line at each quarter elsewhere."""

    def __init__(self, console: Console, name: str, total: float | None, elapsed_s: Callable[[], float]) -> None:
        self.total = total
        self.began_s = elapsed_s()
        self._console, self._name, self._elapsed_s = console, name, elapsed_s
        self._done = self._printed_share = 0.0
        self._note = ""
        self.progress = Progress(
            _Mark(),
            TextColumn(f"{{task.description:<{NAME_WIDTH}}}"),
            BarColumn(bar_width=28, complete_style="cyan", finished_style="cyan"),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[note]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self.progress.add_task(name, total=total, note="", mark=None)
        if total is not None:
            self._print("...")

    def at(self, done: float, note: str = "") -> None:
        """Show that `done` of the total is done."""
        self._done, self._note = done, note or self._note
        self.progress.update(self._task, completed=done, note=self._note)
        share = done / self.total if self.total else 0.0
        if self._printed_share + QUIET_SHARE <= share < 1:
            self._printed_share = share - share % QUIET_SHARE
            self._print(f"{100 * share:.0f} %  {self._note}")

    def add(self, more: float) -> None:
        """Show that `more` is done than before."""
        self.at(self._done + more)

    def ends_with(self, note: str) -> None:
        """Set the final text of the phase's line."""
        self._note = note
        self.progress.update(self._task, note=note)

    def end(self) -> None:
        """Mark the phase as done; as cut short if less than its total is done."""
        cut_short = self.total is not None and self._done < self.total
        if self.total is None:
            self.progress.update(self._task, total=1.0, completed=1.0)
        self.progress.update(self._task, mark=Text("✗", "red") if cut_short else Text("✓", "green"))
        self.progress.stop_task(self._task)
        self._print(self._note or "done")

    def _print(self, text: str) -> None:
        if not self._console.is_terminal:
            line = f"[{self._elapsed_s():5.1f} s] {self._name:<{NAME_WIDTH}} {text}"
            self._console.print(line.rstrip(), markup=False, highlight=False, soft_wrap=True)


class Screen:
    """Shows phases one after the other and records the duration of each in seconds."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._started_at = clock()
        self.durations_s: dict[str, float] = {}

    @property
    def elapsed_s(self) -> float:
        """Return the seconds since the demo began."""
        return self._clock() - self._started_at

    def print_line(self, text: str) -> None:
        """Print a line, which may have rich's markup."""
        self._console.print(text, highlight=False, soft_wrap=True)

    def print_page(self, page: RenderableType) -> None:
        """Print a table or a page of the command line."""
        self._console.print(page)

    def print_point(self, text: str) -> None:
        """Print a bullet point of plain text, wrapped."""
        width = min(self._console.width, TEXT_WIDTH)
        wrapped = textwrap.fill(text, width, initial_indent=" • ", subsequent_indent="   ")
        self._console.print(wrapped, highlight=False, markup=False, soft_wrap=True)

    @contextmanager
    def phase(self, key: str, name: str, total: float | None = None) -> Iterator[Phase]:
        """Run a phase called `name`; record its duration under `key`."""
        phase = Phase(self._console, name, total, lambda: self.elapsed_s)
        with phase.progress:
            yield phase
            phase.end()
        self.durations_s[key] = round(self.elapsed_s - phase.began_s, 2)
