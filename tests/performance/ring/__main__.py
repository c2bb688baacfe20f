"""`make bench-ring`: measure, print a table, write `bench-report/bench-ring.json`.

A missed target is told, not raised. `--quick` is for trying out the bench itself; its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.performance import environment
from tests.performance.figures import Figure, table
from tests.performance.ring.sections import SECTIONS, Extent, measured

REPORT = Path("bench-report/bench-ring.json")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.performance.ring", description=__doc__)
    parser.add_argument("--only", choices=SECTIONS, action="append", help="may be repeated; default: everything")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="little of everything, to try out the bench itself")
    parser.add_argument("--scratch", type=Path, help="where rings are made; default: where temporary files are")
    parser.add_argument("--output", type=Path, default=REPORT)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.ERROR, format="%(levelname)s %(name)s: %(message)s")
    extent = Extent(1 if options.quick else options.rounds, options.quick)
    figures: list[Figure] = []
    report: dict[str, Any] = {
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "quick": options.quick,
        "environment": environment.describe(),
        "sections": {},
    }
    try:
        with tempfile.TemporaryDirectory(prefix="baton-bench-", dir=options.scratch) as folder:
            report["scratch"] = folder
            for name in options.only or SECTIONS:
                print(f"{name} ...", file=sys.stderr, flush=True)
                load, began_at = environment.load(), time.perf_counter()
                scratch = Path(folder, name)
                scratch.mkdir()
                figures += measured(name, scratch, extent)
                shutil.rmtree(scratch)
                took_s = round(time.perf_counter() - began_at, 1)
                report["sections"][name] = {
                    "seconds": took_s,
                    "load_before": load,
                    "load_after": environment.load(),
                }
                print(f"{name}: {took_s} s", file=sys.stderr, flush=True)
    finally:
        report["figures"] = [figure.as_dict() for figure in figures]
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        if figures:
            print(table(figures))
        missed = [figure.name.strip() for figure in figures if figure.met is False]
        if missed:
            print(f"TARGETS MISSED: {'; '.join(missed)}")
        if options.quick:
            print("This was a quick try: the numbers mean nothing.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
