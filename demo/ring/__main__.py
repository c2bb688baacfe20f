"""`python -m demo.ring`: a training that does not wait for its generators."""

from __future__ import annotations

import sys

from demo.ring.figures import draw
from demo.ring.scenario import play
from demo.runner import Demo

DEMO = Demo(
    "demo.ring", "a training that does not wait for its generators", "demo-report-ring", ("ring.png",), play, draw
)


if __name__ == "__main__":
    sys.exit(DEMO.main())
