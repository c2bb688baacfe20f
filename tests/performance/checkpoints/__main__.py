"""`make bench-checkpoint`: measure, print a table, write `bench-report/bench-checkpoint.json`.

A missed target is told, not raised. `--quick` is for trying out the bench itself; its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from tests.performance import contenders, environment, overhead
from tests.performance.checkpoints import measure, server
from tests.performance.checkpoints.engine import engine
from tests.performance.checkpoints.subjects import Bench
from tests.performance.figures import Figure, table
from tests.performance.local_stack import running_stack

MEMORY = Path("/dev/shm")
SCRATCH_BYTES = 12e9
"""What states, their copies, the server's objects and the processes take at most."""
REPORT = Path("bench-report/bench-checkpoint.json")
DIGITS_EVERY = 20
DIGITS_RATIO = 1.02


def main() -> int:
    """Returns the exit code."""
    sections: dict[str, Callable[[Bench, int], list[Figure]]] = {
        "stall": measure.stall,
        "save": measure.saving,
        "lora": measure.second_of_lora,
        "slow": measure.slow_link,
        "engine": engine,
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
    scratch_root = _scratch_root()
    report: dict[str, Any] = {
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "quick": options.quick,
        "environment": environment.describe(),
        "server": server.NAME,
        "scratch": str(scratch_root),
        "sections": {},
    }
    try:
        with tempfile.TemporaryDirectory(prefix="baton-bench-", dir=scratch_root) as folder:
            for name in options.only or sections:
                print(f"{name} ...", file=sys.stderr, flush=True)
                began = time.perf_counter()
                scratch = Path(folder, name)
                scratch.mkdir()
                with Bench(scratch, quick=options.quick) as bench:
                    figures += sections[name](bench, rounds)
                shutil.rmtree(scratch)
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


def _scratch_root() -> Path:
    """Memory where there is enough: what is compared is the clients, not how busy a disk is."""
    if MEMORY.is_dir():
        free_bytes = min(shutil.disk_usage(MEMORY).free, psutil.virtual_memory().available)
        if free_bytes >= SCRATCH_BYTES:
            return MEMORY
    return Path(tempfile.gettempdir())


def _digits(bench: Bench, rounds: int) -> list[Figure]:
    """The digits loop with a checkpoint every 20 steps against the bare one."""
    with running_stack(bench.scratch / "stack.log", cpus=contenders.Processors.split().rest) as stack:
        return overhead.measure(
            stack,
            bench.scratch,
            rounds=rounds,
            steps=100 if bench.quick else 600,
            checkpoint_every=DIGITS_EVERY,
            at_most=DIGITS_RATIO,
        )


if __name__ == "__main__":
    sys.exit(main())
