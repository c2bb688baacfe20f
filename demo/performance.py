"""How a story is performed: its processes and directories, its end in plain words, and exit code 1 with one sentence
when something is wrong."""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rich.console import Console

from demo.failure import DemoError, Interrupts, log_tail
from demo.processes import Household
from demo.screen import Screen
from demo.steps import Steps
from gpu_client.transport.errors import BatonError

SHARED_MEMORY = Path("/dev/shm")
"""Where workers stage checkpoints. Without it they do so on disk."""
EXIT_INTERRUPTED = 130


class Told(Protocol):
    """What a story comes to."""

    def in_plain_words(self) -> list[str]:
        """What just happened, a sentence or two a line."""
        ...


Story = Callable[[Steps, Screen, Path], Told]
"""It leaves its pictures and numbers in the directory. Raises DemoError or BatonError."""


@dataclass(frozen=True)
class Demo:
    """A story as a program, `python -m program`."""

    program: str
    description: str
    title: str
    story: Story
    report: str
    """The directory for what it leaves, unless another one is named."""
    files: tuple[str, ...]
    """What it leaves there, besides logs."""

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Run it. Returns the exit code."""
        parser = argparse.ArgumentParser(prog=f"python -m {self.program}", description=self.description)
        parser.add_argument(
            "--report", type=Path, default=Path(self.report), help="where pictures and numbers go (replaced)"
        )
        report: Path = parser.parse_args(arguments).report
        return perform(f"[bold]Baton demo:[/] {self.title}\n", report, self.files, self.story)


def perform(title: str, report: Path, files: Sequence[str], story: Story) -> int:
    """Run a story that leaves `files` in `report`, besides logs. Returns the exit code."""
    # What the demo has to say about a failure it says itself.
    logging.basicConfig(level=logging.ERROR, format="%(levelname)s %(name)s: %(message)s")
    interrupts = Interrupts()
    interrupts.install()
    console = Console()
    screen = Screen(console)
    try:
        _empty(report, files)
        with (
            _nobodys() as scratch,
            _nobodys(SHARED_MEMORY) as memory,
            Household(report / "logs", Path(scratch), interrupts) as household,
        ):
            screen.say(title)
            try:
                told = story(Steps(household, screen, Path(scratch), Path(memory)), screen, report)
            except BatonError as error:
                raise household.explain(error) from error
    except DemoError as error:
        return _failed(console, error.sentence, error.log)
    except OSError as error:
        return _failed(console, str(error), None)
    except KeyboardInterrupt:
        screen.say("\nInterrupted. Every process of the demo has ended.")
        return EXIT_INTERRUPTED
    screen.say("\n[bold]What just happened[/]")
    for line in told.in_plain_words():
        screen.say_point(line)
    *others, last = files
    screen.say(f"\n{screen.elapsed_s:.0f} s in all. Look at {report}/{', '.join(others)} and {last}.")
    return 0


def _nobodys(parent: Path | None = None) -> tempfile.TemporaryDirectory[str]:
    """A directory that is gone when the demo is."""
    usable = parent if parent is not None and os.access(parent, os.W_OK) else None
    return tempfile.TemporaryDirectory(prefix="baton-demo-", dir=usable, ignore_cleanup_errors=True)


def _empty(report: Path, files: Sequence[str]) -> None:
    """Nothing of an earlier run may pass for this one's."""
    for name in files:
        (report / name).unlink(missing_ok=True)
    shutil.rmtree(report / "logs", ignore_errors=True)
    report.mkdir(parents=True, exist_ok=True)


def _failed(console: Console, sentence: str, log: Path | None) -> int:
    if log and (tail := log_tail(log)):
        console.print(f"\nThe end of {log}:\n{tail}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"\nThe demo failed: {sentence}", style="bold red", markup=False, highlight=False, soft_wrap=True)
    return 1
