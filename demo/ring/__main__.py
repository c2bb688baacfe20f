"""`python -m demo.ring`: generators that die, and a training that does not wait for them."""

from __future__ import annotations

import sys

from demo.performance import Demo
from demo.ring.story import tell

DEMO = Demo(
    program="demo.ring",
    description="Train on generated samples, with and without a ring in between.",
    title="a training that does not wait for its generators",
    story=tell,
    report="demo-report-ring",
    files=("ring.png", "summary.json"),
)

if __name__ == "__main__":
    sys.exit(DEMO.main())
