"""`make bench-ring`: measure, print a table, write `bench-report/bench-ring.json`.

A missed target is told, not raised. `--quick` is for trying out the bench itself; its numbers mean nothing.
"""

from __future__ import annotations

import logging
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.harness.figures import Figure
from bench.harness.reporting import parser_of, reporting
from bench.ring.population import CONTEXT
from bench.ring.sections import SECTIONS, Extent, measured

REPORT = Path("bench-report/bench-ring.json")
ROUNDS = 5


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sections, write the report, and return the exit code."""
    parser = parser_of("python -m bench.ring", __doc__, SECTIONS, REPORT)
    parser.add_argument("--scratch", type=Path, help="where rings are made; default: where temporary files are")
    options = parser.parse_args(arguments)
    CONTEXT.set_forkserver_preload(["bench.ring.roles"])
    logging.basicConfig(level=logging.ERROR, format="%(levelname)s %(name)s: %(message)s")
    extent = Extent(1 if options.quick else options.rounds or ROUNDS, options.quick)

    def in_scratch(name: str, scratch: Path) -> list[Figure]:
        scratch.mkdir()
        figures = measured(name, scratch, extent)
        shutil.rmtree(scratch)
        return figures

    with (
        tempfile.TemporaryDirectory(prefix="baton-bench-", dir=options.scratch) as folder,
        reporting(options.output, quick=options.quick, scratch=folder) as report,
    ):
        for name in options.only or SECTIONS:
            report.section(name, lambda name=name: in_scratch(name, Path(folder, name)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
