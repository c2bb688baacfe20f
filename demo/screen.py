"""What the person in front of the demo sees: a line with a bar for each phase, or plain lines without a terminal."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

NAME_WIDTH = 32
TEXT_WIDTH = 100
QUIET_SHARE = 0.25
"""Without a terminal a phase says how far it is each time it has come this much further."""


class Phase:
    """One phase under way."""

    def __init__(self, show: Callable[[float, float, str], None], total: float | None, began_s: float) -> None:
        self._show = show
        self.began_s = began_s
        self.total = total
        self.done = 0.0
        self.note = ""

    def at(self, done: float, note: str = "") -> None:
        """So far: `done` of the total."""
        self.done = done
        self.note = note or self.note
        self._show(done, self.total or 0.0, self.note)

    def add(self, more: float) -> None:
        """So much more than before."""
        self.at(self.done + more)

    def ends_with(self, note: str) -> None:
        """What its line says in the end."""
        self.note = note
        self._show(self.done, self.total or 0.0, note)


class _Mark(SpinnerColumn):
    """Spins until the phase is over, then says how it ended."""

    def render(self, task: Task) -> RenderableType:
        mark: RenderableType | None = task.fields["mark"]
        return mark if mark is not None else super().render(task)


class Screen:
    """Shows phases one after the other and keeps how long each took, in seconds."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._started_at = clock()
        self.durations_s: dict[str, float] = {}

    @property
    def elapsed_s(self) -> float:
        """Since the demo began."""
        return self._clock() - self._started_at

    def say(self, text: str) -> None:
        """A line that is no phase; may carry rich's markup."""
        self._console.print(text, highlight=False, soft_wrap=True)

    def say_point(self, text: str) -> None:
        """One point of a list, plain text of any length."""
        width = min(self._console.width, TEXT_WIDTH)
        wrapped = textwrap.fill(text, width, initial_indent=" • ", subsequent_indent="   ")
        self._console.print(wrapped, highlight=False, markup=False, soft_wrap=True)

    @contextmanager
    def phase(self, key: str, name: str, total: float | None = None) -> Iterator[Phase]:
        """A phase called `name`; its duration is kept under `key`."""
        began_at = self._clock()
        show = self._live if self._console.is_terminal else self._lines
        with show(name, total) as phase:
            yield phase
        self.durations_s[key] = round(self._clock() - began_at, 2)

    @contextmanager
    def _live(self, name: str, total: float | None) -> Iterator[Phase]:
        progress = Progress(
            _Mark(),
            TextColumn(f"{{task.description:<{NAME_WIDTH}}}"),
            BarColumn(bar_width=28, complete_style="cyan", finished_style="cyan"),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[note]}"),
            console=self._console,
        )
        task: TaskID = progress.add_task(name, total=total, note="", mark=None)

        def show(done: float, _: float, note: str) -> None:
            progress.update(task, completed=done, note=note)

        with progress:
            phase = Phase(show, total, self.elapsed_s)
            yield phase
            if total is None:
                progress.update(task, total=1.0, completed=1.0)
            cut_short = total is not None and phase.done < total
            progress.update(task, mark=Text("✗", "red") if cut_short else Text("✓", "green"))
            progress.stop_task(task)

    @contextmanager
    def _lines(self, name: str, total: float | None) -> Iterator[Phase]:
        if total is not None:
            self._line(name, "...")
        said = 0.0

        def show(done: float, whole: float, note: str) -> None:
            nonlocal said
            share = done / whole if whole else 0.0
            if said + QUIET_SHARE <= share < 1:
                said = share - share % QUIET_SHARE
                self._line(name, f"{100 * share:.0f} %  {note}")

        phase = Phase(show, total, self.elapsed_s)
        yield phase
        self._line(name, phase.note or "done")

    def _line(self, name: str, text: str) -> None:
        self._console.print(
            f"[{self.elapsed_s:5.1f} s] {name:<{NAME_WIDTH}} {text}".rstrip(),
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
