"""`python -m demo.rules`: stop what diverges, roll back what spikes, steer what runs."""

from __future__ import annotations

import sys

from demo.performance import Demo
from demo.rules.story import tell

DEMO = Demo(
    program="demo.rules",
    description="Stop what diverges, roll back what spikes, steer what runs.",
    title="rules that watch a training and steer it",
    story=tell,
    report="demo-report-rules",
    files=("rules.png", "summary.json"),
)

if __name__ == "__main__":
    sys.exit(DEMO.main())
