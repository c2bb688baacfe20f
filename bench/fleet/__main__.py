"""`make bench-fleet`: measure, print a table, write `bench-report/bench-fleet.json`.

A missed target is told, not raised. `--quick` is for trying out the bench itself; its numbers mean nothing.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.fleet import claim_time, nights, scale
from bench.harness.figures import Figure
from bench.harness.reporting import parser_of, reporting
from functions.local.emulator import Emulator

REPORT = Path("bench-report/bench-fleet.json")
ROUNDS = 7
NIGHTS = 1000
FAULT_RATES = (0.1, 0.01)
"""Faults that begin in a minute: a bad night, and a usual one. Rates of real providers are not known."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sections, write the report, and return the exit code."""
    sections = {"tick": _tick, "claim": _claim, "nights": _nights}
    options = parser_of("python -m bench.fleet", __doc__, sections, REPORT).parse_args(arguments)
    # The faults of the nights are part of what is measured.
    logging.basicConfig(level=logging.CRITICAL)
    os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
    rounds = 1 if options.quick else options.rounds or ROUNDS
    with reporting(options.output, quick=options.quick) as report:
        for name in options.only or sections:
            report.section(name, lambda name=name: sections[name](rounds, options.quick))
    return 0


def _tick(rounds: int, quick: bool) -> list[Figure]:
    with Emulator() as emulator:
        if quick:
            return scale.measure(emulator.endpoint_url, machines=20, jobs=100)
        return scale.measure(emulator.endpoint_url)


def _claim(rounds: int, quick: bool) -> list[Figure]:
    return claim_time.measure(rounds)


def _nights(rounds: int, quick: bool) -> list[Figure]:
    return [figure for rate in FAULT_RATES for figure in nights.measure(4 if quick else NIGHTS, rate)]


if __name__ == "__main__":
    sys.exit(main())
