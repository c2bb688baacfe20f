"""`python -m demo.fleet`: machines that are rented for a job, within a budget, and all given back."""

from __future__ import annotations

import sys

from demo.fleet.figures import draw
from demo.fleet.scenario import play
from demo.runner import Demo

DEMO = Demo(
    "demo.fleet",
    "machines rented for a job, within a budget, and all given back",
    "demo-report-fleet",
    ("fleet.png",),
    play,
    draw,
)


if __name__ == "__main__":
    sys.exit(DEMO.main())
