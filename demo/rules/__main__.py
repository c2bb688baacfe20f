"""`python -m demo.rules`: stop what diverges, roll back what spikes, steer what runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from demo.performance import perform
from demo.rules.story import tell

REPORT = Path("demo-report-rules")
TITLE = "[bold]Baton demo:[/] rules that watch a training and steer it\n"
FILES = ("rules.png", "summary.json")


def main(arguments: list[str] | None = None) -> int:
    """Run the demo. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m demo.rules", description="Stop what diverges, roll back what spikes, steer what runs."
    )
    parser.add_argument("--report", type=Path, default=REPORT, help="where the picture and the numbers go (replaced)")
    return perform(TITLE, parser.parse_args(arguments).report, FILES, tell)


if __name__ == "__main__":
    sys.exit(main())
