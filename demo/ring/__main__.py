"""`python -m demo.ring`: generators that die, and a training that does not wait for them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from demo.performance import perform
from demo.ring.story import tell

REPORT = Path("demo-report-ring")
TITLE = "[bold]Baton demo:[/] a training that does not wait for its generators\n"
FILES = ("ring.png", "summary.json")


def main(arguments: list[str] | None = None) -> int:
    """Run the demo. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m demo.ring", description="Train on generated samples, with and without a ring in between."
    )
    parser.add_argument("--report", type=Path, default=REPORT, help="where the picture and the numbers go (replaced)")
    return perform(TITLE, parser.parse_args(arguments).report, FILES, tell)


if __name__ == "__main__":
    sys.exit(main())
