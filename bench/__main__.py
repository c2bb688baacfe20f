"""`python -m bench`: measure, print a table, write `bench-report/bench.json`.

A missed target is told, not raised: the exit code is 0 unless something could not be measured. `--quick` is for
trying out the bench itself; its numbers mean nothing.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench.api import claim_latency, claim_race, cold_start, latencies, request_counts
from bench.harness.figures import Figure
from bench.harness.local_stack import RunningStack, running_stack
from bench.harness.plane import Plane
from bench.harness.reporting import parser_of, reporting
from bench.rules import backtest, hostile_rules, rank_agreement, rule_edits, step_time, training_overhead
from bench.training import contenders, dreambooth, overhead
from functions.local.emulator import Emulator

REPORT = Path("bench-report/bench.json")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sections, write the report, and return the exit code."""
    sections = {
        "requests": _requests,
        "cold": _cold,
        "claim": _claim,
        "race": _race,
        "latency": _latency,
        "overhead": _overhead,
        "dreambooth": _dreambooth,
        "rules": _rules,
        "backtest": _backtest,
    }
    parser = parser_of("python -m bench", "Cost and speed, measured.", sections, REPORT)
    options = parser.parse_args(arguments)
    # Refused commits, lost races and the like are part of what is measured; only trouble is shown.
    logging.basicConfig(level=logging.ERROR, format="%(levelname)s %(name)s: %(message)s")
    os.environ["AWS_EC2_METADATA_DISABLED"] = "true"

    def rounds_of(name: str) -> int:
        # The overhead is the smallest difference of all that is looked for here.
        return 1 if options.quick else options.rounds or (7 if name == "overhead" else 5)

    with reporting(options.output, quick=options.quick) as report:
        for name in options.only or sections:
            report.section(name, lambda name=name: sections[name](rounds_of(name), options.quick))
    return 0


def _requests(rounds: int, quick: bool) -> list[Figure]:
    with Emulator() as emulator:
        return request_counts.measure(Plane(emulator.endpoint_url, "counts-"))


def _cold(rounds: int, quick: bool) -> list[Figure]:
    figures = cold_start.measure(rounds=rounds)
    print(cold_start.tree(figures), end="\n\n")
    return figures


def _claim(rounds: int, quick: bool) -> list[Figure]:
    with Emulator() as emulator:
        if quick:
            return claim_latency.measure(emulator.endpoint_url, rounds=rounds, claims=5, large=500)
        return claim_latency.measure(emulator.endpoint_url, rounds=rounds, claims=40)


def _race(rounds: int, quick: bool) -> list[Figure]:
    with Emulator() as emulator:
        return claim_race.measure(emulator.endpoint_url, rounds=rounds, jobs=100 if quick else claim_race.JOBS)


def _latency(rounds: int, quick: bool) -> list[Figure]:
    with (
        tempfile.TemporaryDirectory(prefix="baton-bench-") as folder,
        running_stack(Path(folder, "stack.log")) as stack,
    ):
        return latencies.measure(stack, rounds=rounds, calls=3 if quick else 20)


def _rules(rounds: int, quick: bool) -> list[Figure]:
    if quick:
        found = step_time.measure(rounds=rounds, steps=100, history=2_000)
        found += hostile_rules.measure(rounds=rounds, fuzzed=200, full=2_000)
    else:
        found = [*step_time.measure(rounds=rounds), *hostile_rules.measure(rounds=rounds)]
    found += rank_agreement.measure(rounds=rounds)
    with _stack_beside_the_trainer() as (stack, scratch):
        # An edit takes a heartbeat, however many there are: two rounds are forty of them.
        found += rule_edits.measure(stack, scratch, rounds=min(rounds, 2), edits=2 if quick else rule_edits.EDITS)
        return found + training_overhead.measure(stack, scratch, rounds=rounds, steps=100 if quick else 600)


def _backtest(rounds: int, quick: bool) -> list[Figure]:
    return backtest.measure(rounds=rounds, reports=10_000 if quick else backtest.REPORTS)


def _overhead(rounds: int, quick: bool) -> list[Figure]:
    with _stack_beside_the_trainer() as (stack, scratch):
        return overhead.measure(stack, scratch, rounds=rounds, steps=100 if quick else 600)


def _dreambooth(rounds: int, quick: bool) -> list[Figure]:
    with _stack_beside_the_trainer() as (stack, scratch):
        if quick:
            return dreambooth.measure(stack, scratch, rounds=rounds, steps=4, resolution=64)
        return dreambooth.measure(stack, scratch, rounds=rounds, steps=40)


@contextmanager
def _stack_beside_the_trainer() -> Iterator[tuple[RunningStack, Path]]:
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        scratch = Path(folder)
        with running_stack(scratch / "stack.log", cpus=contenders.Processors.split().rest) as stack:
            yield stack, scratch


if __name__ == "__main__":
    sys.exit(main())
