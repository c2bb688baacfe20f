"""`make bench-console`: measure the console in a browser, print a table, write `bench-report/bench-console.json`.

A missed target is told, not raised. `--quick` is for trying out the bench itself; its numbers mean nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.console import job_page, views
from bench.harness.reporting import parser_of, reporting

REPORT = Path("bench-report/bench-console.json")
ROUNDS = 9


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sections, write the report, and return the exit code."""
    sections = {"views": views.measure, "curves": job_page.measure}
    options = parser_of("python -m bench.console", __doc__, sections, REPORT).parse_args(arguments)
    os.environ.update(job_page.CLOUD)
    points = job_page.QUICK_POINTS if options.quick else job_page.POINTS
    rounds = 1 if options.quick else options.rounds or ROUNDS
    with reporting(options.output, quick=options.quick) as report:
        for name in options.only or sections:
            report.section(name, lambda name=name: sections[name](rounds, points))
    return 0


if __name__ == "__main__":
    sys.exit(main())
