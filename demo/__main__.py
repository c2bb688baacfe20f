"""`python -m demo`: train, kill the worker, resume, compare."""

from __future__ import annotations

import sys

from demo.performance import Demo
from demo.story import tell

DEMO = Demo(
    program="demo",
    description="Train, kill the worker, resume, compare.",
    title="training that outlives its machines",
    story=tell,
    report="demo-report",
    files=("loss.png", "predictions.png", "time.png", "summary.json"),
)

if __name__ == "__main__":
    sys.exit(DEMO.main())
