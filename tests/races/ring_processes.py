"""Run a writer or a reader for the kill tests of rings: `python -m tests.races.ring_processes ROLE PLACE FILE`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np

from gpu_client.ring.core.ring import open_ring
from gpu_client.ring.generating.writer import RingWriter
from gpu_client.ring.reading.reader import RingReader


def write(place: str, told: Path) -> None:
    """Put samples for ever; each that was taken is noted in a file, before the next is made."""
    with RingWriter(open_ring(place)) as writer, told.open("ab", buffering=0) as file:
        number = 0
        while True:
            writer.put({"x": np.full(1000, number), "by": np.array([os.getpid()])}, seed=[os.getpid(), number])
            file.write(f"{os.getpid()} {number}\n".encode())
            number += 1


def read(place: str, told: Path) -> None:
    """Read every sample of one newest manifest after the other; what is wrong is noted, and how many were read."""
    with RingReader(open_ring(place)) as reader, told.open("ab", buffering=0) as file:
        reader.wait(lambda: reader.newest() or None, "nothing came")
        while not Path(f"{told}.end").exists():
            newest = reader.newest()
            reader.keep_only([newest.number])
            try:
                ids = {slot.id for slot in newest.slots}
                assert len(ids) == len(newest), f"manifest {newest.number} has a sample twice"
                for slot in newest.slots:
                    sample = reader.sample(slot)
                    assert (sample["x"] == sample["x"][0]).all(), slot.id
                reader.record_consumed(len(newest))
                file.write(f"read {newest.number} {len(newest)}\n".encode())
            except Exception as error:
                file.write(f"wrong {error!r}\n".encode())


if __name__ == "__main__":
    {"write": write, "read": read}[sys.argv[1]](sys.argv[2], Path(sys.argv[3]))
