"""`make bench-checkpoint`: measure, print a table, write `bench-report/bench-checkpoint.json`.

A missed target is told, not raised. `--quick` is for trying out the bench itself; its numbers mean nothing.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import psutil

from bench.checkpoints import measure
from bench.checkpoints.engine import engine
from bench.checkpoints.subjects import Bench
from bench.harness.figures import Figure
from bench.harness.local_stack import running_stack
from bench.harness.reporting import parser_of, reporting
from bench.sink import sink_process
from bench.training import contenders, overhead

MEMORY = Path("/dev/shm")
SCRATCH_BYTES = 12e9
"""Maximum memory for states, their copies, the server's objects and the processes."""
REPORT = Path("bench-report/bench-checkpoint.json")
ROUNDS = 5
DIGITS_EVERY = 20
DIGITS_RATIO = 1.02


def main() -> int:
    """Run the sections, write the report, and return the exit code."""
    sections: dict[str, Callable[[Bench, int], list[Figure]]] = {
        "stall": measure.stall,
        "save": measure.saving,
        "lora": measure.second_of_lora,
        "slow": measure.slow_link,
        "engine": engine,
        "digits": _digits,
    }
    parser = parser_of("python -m bench.checkpoints", __doc__, sections, REPORT)
    options = parser.parse_args()
    os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
    rounds = 1 if options.quick else options.rounds or ROUNDS
    root = _scratch_root()

    def measured(name: str, scratch: Path) -> list[Figure]:
        scratch.mkdir()
        with Bench(scratch, quick=options.quick) as bench:
            figures = sections[name](bench, rounds)
        shutil.rmtree(scratch)
        return figures

    with (
        reporting(options.output, quick=options.quick, server=sink_process.NAME, scratch=str(root)) as report,
        tempfile.TemporaryDirectory(prefix="baton-bench-", dir=root) as folder,
    ):
        for name in options.only or sections:
            report.section(name, lambda name=name: measured(name, Path(folder, name)))
    return 0


def _scratch_root() -> Path:
    """Choose a directory in memory if large enough: the bench compares clients, not the load of a disk."""
    if MEMORY.is_dir():
        free_bytes = min(shutil.disk_usage(MEMORY).free, psutil.virtual_memory().available)
        if free_bytes >= SCRATCH_BYTES:
            return MEMORY
    return Path(tempfile.gettempdir())


def _digits(bench: Bench, rounds: int) -> list[Figure]:
    """Compare the digits loop with a checkpoint every 20 steps to the bare loop."""
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
