"""Run a generator: `python -m demo.ring.generate PLACE NUMBER START FILE`. SIGTERM ends it after its current sample.

The loop in `main` is the whole generator. Each start of each generator has its own seeds, so no seed is used twice.
"""

from __future__ import annotations

import signal
import sys
import threading
from itertools import count
from pathlib import Path

from baton import RingWriter, open_ring
from demo.ring.shapes import render


def main(place: str, number: str, start: str, file: str) -> None:
    """Draw and put samples until SIGTERM. `file` grows by a byte for each sample that is begun."""
    ending = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ending.set())
    with (
        Path(file).open("ab", buffering=0) as begun,
        RingWriter(open_ring(place), f"generator-{number}", generator="demo.ring.shapes:render") as writer,
    ):
        for made in count():
            if ending.is_set():
                return
            begun.write(b".")
            seed = [int(number), int(start), made]
            writer.put(render(seed), seed=seed)


if __name__ == "__main__":
    main(*sys.argv[1:])
