"""`make bench-checkpoint`: measure, print a table, write `bench-report/bench-checkpoint.json`.

A missed target is told, not raised. `--quick` is for trying out the bench itself; its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.performance import environment, overhead
from tests.performance.checkpoints import measure
from tests.performance.figures import Figure, table
from tests.performance.local_stack import running_stack
from tests.second_store import SecondStore

REPORT = Path("bench-report/bench-checkpoint.json")
DIGITS_EVERY = 20
DIGITS_RATIO = 1.02


def main() -> int:
    """Returns the exit code."""
    sections: dict[str, Callable[[measure.Bench, int, bool], list[Figure]]] = {
        "stall": lambda bench, rounds, quick: measure.stall(bench, rounds, quick=quick),
        "save": lambda bench, rounds, _: measure.saving(bench, rounds),
        "lora": lambda bench, rounds, _: measure.second_of_lora(bench, rounds),
        "slow": lambda bench, rounds, _: measure.slow_link(bench, rounds),
        "engine": lambda bench, rounds, quick: measure.engine(bench, rounds, quick=quick),
        "digits": _digits,
    }
    parser = argparse.ArgumentParser(prog="python -m tests.performance.checkpoints", description=__doc__)
    parser.add_argument("--only", choices=sections, action="append", help="may be repeated; default: everything")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="little of everything, to try out the bench itself")
    parser.add_argument("--output", type=Path, default=REPORT)
    options = parser.parse_args()
    os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
    rounds = 1 if options.quick else options.rounds
    figures: list[Figure] = []
    report: dict[str, Any] = {
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "quick": options.quick,
        "environment": environment.describe(),
        "server": "rclone serve s3 (in memory); for the engine: tests/performance/sink.py",
        "sections": {},
    }
    try:
        with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
            for name in options.only or sections:
                print(f"{name} ...", file=sys.stderr, flush=True)
                began = time.perf_counter()
                scratch = Path(folder, name)
                scratch.mkdir()
                # A server of its own for each: it keeps all that it is given.
                with SecondStore(scratch / "s3") as store:
                    figures += sections[name](measure.Bench(scratch, store, quick=options.quick), rounds, options.quick)
                report["sections"][name] = {
                    "seconds": round(time.perf_counter() - began, 1),
                    "load_after": environment.load(),
                }
    finally:
        report["figures"] = [figure.as_dict() for figure in figures]
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        if figures:
            print(table(figures))
        missed = [figure.name for figure in figures if figure.met is False]
        if missed:
            print(f"TARGETS MISSED: {'; '.join(missed)}")
        if options.quick:
            print("This was a quick try: the numbers mean nothing.")
    return 0


def _digits(bench: measure.Bench, rounds: int, quick: bool) -> list[Figure]:
    """The digits loop with a checkpoint every 20 steps against the bare one."""
    with running_stack(bench.scratch / "stack.log", cpus=overhead.Processors.split().rest) as stack:
        return overhead.measure(
            stack,
            bench.scratch,
            rounds=rounds,
            steps=100 if quick else 600,
            checkpoint_every=DIGITS_EVERY,
            at_most=DIGITS_RATIO,
        )


if __name__ == "__main__":
    sys.exit(main())
