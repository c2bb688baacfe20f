"""Measure elastic trainings, print a table, write `bench-report/bench-elastic.json` (`make bench-elastic`).

A missed target is told, not raised. `--quick` is for trying out the bench itself; its numbers mean nothing.
"""

from __future__ import annotations

import subprocess
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from bench.elastic import codec_speed, copies, failures, joins, parity, reductions, soak, stalls
from bench.elastic.facts import FACTS
from bench.harness.figures import Figure
from bench.harness.reporting import parser_of, reporting

REPORT = Path("bench-report/bench-elastic.json")
ROUNDS = 9
SIZES = (2, 3)
QUICK_VALUES = 500_000
QUICK_MINUTES, QUICK_NODES = 0.3, 4

Section = Callable[[int, int, Namespace], list[Figure]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sections, write the report, and return the exit code."""
    parser = parser_of("python -m bench.elastic", __doc__, SECTIONS, REPORT)
    parser.add_argument("--minutes", type=float, default=30.0, help="duration of each half of the soak")
    parser.add_argument("--nodes", type=int, default=16, help="processes of the soak")
    parser.add_argument("--fault-every", type=float, default=soak.FAULT_EVERY_S, help="seconds between faults")
    options = parser.parse_args(arguments)
    rounds = 1 if options.quick else options.rounds or ROUNDS
    values = QUICK_VALUES if options.quick else reductions.VALUES
    if options.quick:
        options.minutes, options.nodes, options.fault_every = QUICK_MINUTES, QUICK_NODES, 12.0
    failed = 0
    with reporting(options.output, quick=options.quick, facts=FACTS) as report:
        for name in options.only or SECTIONS:
            try:
                report.section(name, partial(SECTIONS[name], rounds, values, options))
            except (RuntimeError, OSError, subprocess.SubprocessError):
                # Nodes fail, and the machine lacks rights or memory. A run takes an hour: the other sections go on.
                traceback.print_exc()
                failed += 1
            report.write(options.output)
    return min(failed, 1)


def _plain(measure: Callable[[int, int], list[Figure]]) -> Section:
    return lambda rounds, values, _: measure(rounds, values)


def _loopback(rounds: int, values: int) -> list[Figure]:
    return [figure for size in SIZES for figure in reductions.on_loopback(size, rounds, values)]


def _link(rounds: int, values: int) -> list[Figure]:
    try:
        return [figure for size in SIZES for figure in reductions.on_links(size, rounds, values)]
    except PermissionError as error:
        print(f"no links of limited rate: {error}", file=sys.stderr)
        return []


def _soak(_: int, __: int, options: Namespace) -> list[Figure]:
    return soak.soak(options.minutes, options.nodes, options.fault_every)


SECTIONS: dict[str, Section] = {
    "codecs": _plain(codec_speed.speed),
    "error": _plain(lambda _, values: codec_speed.error(min(values, 4_000_000))),
    "loopback": _plain(_loopback),
    "link": _plain(_link),
    "kills": _plain(failures.kills),
    "stops": _plain(failures.stops),
    "outage": _plain(failures.outage),
    "thirds": _plain(failures.thirds),
    "lone": _plain(failures.lone),
    "snapshots": _plain(failures.snapshots),
    "stalls": _plain(joins.stalls),
    "productive": _plain(joins.productive),
    "overlap": _plain(stalls.stalls),
    "copies": _plain(copies.copies),
    "parity": _plain(parity.parity),
    "soak": _soak,
}


if __name__ == "__main__":
    sys.exit(main())
