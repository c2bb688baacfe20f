"""`python -m demo`: train, kill the worker, resume, compare."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from demo.performance import perform
from demo.story import tell

REPORT = Path("demo-report")
TITLE = "[bold]Baton demo:[/] training that outlives its machines\n"
FILES = ("loss.png", "predictions.png", "time.png", "summary.json")


def main(arguments: list[str] | None = None) -> int:
    """Run the demo. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m demo", description="Train, kill the worker, resume, compare.")
    parser.add_argument("--report", type=Path, default=REPORT, help="where pictures and numbers go (replaced)")
    return perform(TITLE, parser.parse_args(arguments).report, FILES, tell)


if __name__ == "__main__":
    sys.exit(main())
