"""`python -m demo`: training that outlives its machines."""

from __future__ import annotations

import sys

from demo.runner import Demo
from demo.takeover.figures import draw
from demo.takeover.scenario import play

DEMO = Demo(
    "demo",
    "training that outlives its machines",
    "demo-report",
    ("loss.png", "predictions.png", "time.png"),
    play,
    draw,
)


if __name__ == "__main__":
    sys.exit(DEMO.main())
