"""`python -m demo.elastic`: one training on several machines that vanish, freeze and join."""

from __future__ import annotations

import sys

from demo.elastic.figures import draw
from demo.elastic.scenario import play
from demo.runner import Demo

DEMO = Demo(
    "demo.elastic",
    "one training on several machines that vanish, freeze and join",
    "demo-report-elastic",
    ("elastic.png",),
    play,
    draw,
)


if __name__ == "__main__":
    sys.exit(DEMO.main())
