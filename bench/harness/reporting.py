"""Report and command-line options of a bench: results, durations and load of each part."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.harness import environment
from bench.harness.figures import Figure, table


def parser_of(program: str, description: str | None, sections: Iterable[str], report: Path) -> argparse.ArgumentParser:
    """Make the parser that all benches share; `rounds` is None by default."""
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument("--only", choices=[*sections], action="append", help="may be repeated; default: everything")
    parser.add_argument("--rounds", type=int, help="how often each is measured")
    parser.add_argument("--quick", action="store_true", help="little of everything, to try out the bench itself")
    parser.add_argument("--output", type=Path, default=report)
    return parser


class Report:
    """Report that `reporting` writes and prints at its end."""

    def __init__(self, *, quick: bool, **more: Any) -> None:
        self.figures: list[Figure] = []
        self.content: dict[str, Any] = {
            "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "quick": quick,
            "environment": environment.describe(),
            **more,
            "sections": {},
        }

    def section(self, name: str, measure: Callable[[], Sequence[Figure]]) -> None:
        """Run one part."""
        print(f"{name} ...", file=sys.stderr, flush=True)
        load_before, began_at = environment.load(), time.perf_counter()
        self.figures += measure()
        took_s = round(time.perf_counter() - began_at, 1)
        self.content["sections"][name] = {
            "seconds": took_s,
            "load_before": load_before,
            "load_after": environment.load(),
        }
        print(f"{name}: {took_s} s", file=sys.stderr, flush=True)

    def write(self, output: Path) -> None:
        """Write the report as JSON."""
        self.content["figures"] = [figure.as_dict() for figure in self.figures]
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(self.content, indent=1) + "\n", encoding="utf-8")

    def print_summary(self, output: Path) -> None:
        """Print the report. A missed target is printed, not raised."""
        where = self.content["environment"]
        if self.figures:
            print(table(self.figures))
        loads = [section["load_after"][0] for section in self.content["sections"].values()]
        averages = ", ".join(f"{load:g}" for load in loads)
        print(
            f"\n{where['usable_cores']} cores ({where['processor']}), Python {where['python']}; load during the "
            f"sections: {averages}. Medians; ratios within each round. Details: {output}"
        )
        missed = [figure.name.strip() for figure in self.figures if figure.met is False]
        if missed:
            print(f"TARGETS MISSED: {'; '.join(missed)}")
        if self.content["quick"]:
            print("This was a quick try: the numbers mean nothing.")


@contextmanager
def reporting(output: Path, *, quick: bool, **more: Any) -> Iterator[Report]:
    """Write the report even after a failure. `more`: further fields of the JSON."""
    report = Report(quick=quick, **more)
    try:
        yield report
    finally:
        report.write(output)
        report.print_summary(output)
