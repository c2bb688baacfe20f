"""`python -m demo.rules`: rules that watch a training and steer it."""

from __future__ import annotations

import sys

from demo.rules.figures import draw
from demo.rules.scenario import play
from demo.runner import Demo

DEMO = Demo("demo.rules", "rules that watch a training and steer it", "demo-report-rules", ("rules.png",), play, draw)


if __name__ == "__main__":
    sys.exit(DEMO.main())
