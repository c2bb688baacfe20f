"""Run a demo as a program: start its scenario, draw its charts, write its summary, check and print its claims."""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from matplotlib.figure import Figure
from rich.console import Console

from demo.failure import DemoError, Interrupts, log_tail
from demo.processes import ManagedProcesses
from demo.screen import Screen
from gpu_client.ring.errors import RingError
from gpu_client.transport.errors import BatonError

SHARED_MEMORY = Path("/dev/shm")
"""Workers stage checkpoints here; on a machine without it they stage them on disk."""
SUMMARY = "summary.json"
EXIT_INTERRUPTED = 130


@dataclass(frozen=True)
class Claim:
    """A sentence that the demo prints if its measurements confirm it. `failure`: why they do not; "" if they do."""

    sentence: str
    failure: str = ""


class Summarizable(Protocol):
    """The measurements of a scenario."""

    def as_dict(self) -> dict[str, Any]:
        """Return the content of `summary.json`; the runner adds the durations of the phases."""
        ...

    def claims(self) -> Sequence[Claim]:
        """Return what the demo claims, in the order in which the runner checks and prints it."""
        ...


Results = TypeVar("Results", bound=Summarizable)


@dataclass(frozen=True)
class Stage:
    """Directories and processes of a scenario. The runner deletes `scratch` and `memory` (in RAM) after the demo."""

    processes: ManagedProcesses
    screen: Screen
    scratch: Path
    memory: Path


@dataclass(frozen=True)
class Demo(Generic[Results]):
    """A scenario as a program, `python -m program`."""

    program: str
    title: str
    report: str
    """Default directory of the report."""
    charts: tuple[str, ...]
    """File names of the charts in the report."""
    scenario: Callable[[Stage], Results]
    """Raises DemoError, BatonError or RingError if the demo cannot go on."""
    draw: Callable[[Results], Mapping[str, Figure]]
    """Draws the charts, by file name."""

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Run the demo. Returns the exit code."""
        parser = argparse.ArgumentParser(prog=f"python -m {self.program}", description=f"Show {self.title}.")
        parser.add_argument(
            "--report", type=Path, default=Path(self.report), help="directory of the charts and numbers (replaced)"
        )
        report: Path = parser.parse_args(arguments).report
        # The runner explains failures itself, therefore libraries log errors only.
        logging.basicConfig(level=logging.ERROR, format="%(levelname)s %(name)s: %(message)s")
        interrupts = Interrupts()
        interrupts.install()
        console = Console()
        screen = Screen(console)
        try:
            claims = self.perform(report, screen, interrupts)
        except (DemoError, OSError) as error:
            return _failed(console, error)
        except KeyboardInterrupt:
            screen.print_line("\nInterrupted. Every process of the demo has ended.")
            return EXIT_INTERRUPTED
        screen.print_line("\n[bold]What just happened[/]")
        for claim in claims:
            screen.print_point(claim.sentence)
        files = f"{report}/{', '.join(self.charts)}"
        screen.print_line(f"\n{screen.elapsed_s:.0f} s in all. Look at {files} and {SUMMARY}.")
        return 0

    def perform(self, report: Path, screen: Screen, interrupts: Interrupts) -> Sequence[Claim]:
        """Run the scenario, write the report, check the claims. Raises DemoError for the first that does not hold."""
        # A file of an earlier run must not pass for one of this run.
        for name in (*self.charts, SUMMARY):
            (report / name).unlink(missing_ok=True)
        shutil.rmtree(report / "logs", ignore_errors=True)
        report.mkdir(parents=True, exist_ok=True)
        with (
            _temporary_directory() as scratch,
            _temporary_directory(SHARED_MEMORY) as memory,
            ManagedProcesses(report / "logs", Path(scratch), interrupts) as processes,
        ):
            screen.print_line(f"[bold]Baton demo:[/] {self.title}\n")
            try:
                results = self.scenario(Stage(processes, screen, Path(scratch), Path(memory)))
            except BatonError as error:
                raise processes.explain(error) from error
            except RingError as error:
                raise DemoError(f"the ring failed: {error}") from error
        with screen.phase("draw", "Draw the charts") as phase:
            figures = self.draw(results)
            for name in self.charts:
                figures[name].savefig(report / name)
            phase.ends_with(", ".join(self.charts))
        summary = {**results.as_dict(), "durations_s": {**screen.durations_s, "total": round(screen.elapsed_s, 2)}}
        (report / SUMMARY).write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
        claims = results.claims()
        for claim in claims:
            if claim.failure:
                raise DemoError(claim.failure)
        return claims


def _temporary_directory(parent: Path | None = None) -> tempfile.TemporaryDirectory[str]:
    usable = parent if parent is not None and os.access(parent, os.W_OK) else None
    return tempfile.TemporaryDirectory(prefix="baton-demo-", dir=usable, ignore_cleanup_errors=True)


def _failed(console: Console, error: DemoError | OSError) -> int:
    log = error.log if isinstance(error, DemoError) else None
    if log and (tail := log_tail(log)):
        console.print(f"\nThe end of {log}:\n{tail}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"\nThe demo failed: {error}", style="bold red", markup=False, highlight=False, soft_wrap=True)
    return 1
