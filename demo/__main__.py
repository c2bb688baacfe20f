"""`python -m demo`: the story, its end in plain words, and exit code 1 with one sentence when something is wrong."""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from demo.failure import DemoError, Interrupts, log_tail
from demo.processes import Household
from demo.screen import Screen
from demo.steps import Steps
from demo.story import tell
from demo.summary import Result
from gpu_client.transport.errors import BatonError

REPORT = Path("demo-report")
SHARED_MEMORY = Path("/dev/shm")
"""Where workers stage checkpoints. Without it they do so on disk."""
EXIT_INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> int:
    """Run the demo. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m demo", description="Train, kill the worker, resume, compare.")
    parser.add_argument("--report", type=Path, default=REPORT, help="where pictures and numbers go (replaced)")
    report: Path = parser.parse_args(arguments).report
    # What the demo has to say about a failure it says itself.
    logging.basicConfig(level=logging.ERROR, format="%(levelname)s %(name)s: %(message)s")
    interrupts = Interrupts()
    interrupts.install()
    console = Console()
    screen = Screen(console)
    logs = report / "logs"
    try:
        _empty(report)
        with (
            _nobodys() as scratch,
            _nobodys(SHARED_MEMORY) as memory,
            Household(logs, Path(scratch), interrupts) as household,
        ):
            screen.say("[bold]Baton demo:[/] training that outlives its machines\n")
            try:
                result = tell(Steps(household, screen, Path(scratch), Path(memory)), screen, report)
            except BatonError as error:
                raise household.explain(error) from error
    except DemoError as error:
        return _failed(console, error.sentence, error.log)
    except OSError as error:
        return _failed(console, str(error), None)
    except KeyboardInterrupt:
        screen.say("\nInterrupted. Every process of the demo has ended.")
        return EXIT_INTERRUPTED
    _tell_the_end(screen, result, report)
    return 0


def _nobodys(parent: Path | None = None) -> tempfile.TemporaryDirectory[str]:
    """A directory that is gone when the demo is."""
    usable = parent if parent is not None and os.access(parent, os.W_OK) else None
    return tempfile.TemporaryDirectory(prefix="baton-demo-", dir=usable, ignore_cleanup_errors=True)


def _empty(report: Path) -> None:
    """Nothing of an earlier run may pass for this one's."""
    for name in ("loss.png", "predictions.png", "time.png", "summary.json"):
        (report / name).unlink(missing_ok=True)
    shutil.rmtree(report / "logs", ignore_errors=True)
    report.mkdir(parents=True, exist_ok=True)


def _failed(console: Console, sentence: str, log: Path | None) -> int:
    if log and (tail := log_tail(log)):
        console.print(f"\nThe end of {log}:\n{tail}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"\nThe demo failed: {sentence}", style="bold red", markup=False, highlight=False, soft_wrap=True)
    return 1


def _tell_the_end(screen: Screen, result: Result, report: Path) -> None:
    screen.say("\n[bold]What just happened[/]")
    for line in result.in_plain_words():
        screen.say_point(line)
    screen.say(
        f"\n{screen.elapsed_s:.0f} s in all. Look at {report}/loss.png, predictions.png, time.png and summary.json."
    )


if __name__ == "__main__":
    sys.exit(main())
