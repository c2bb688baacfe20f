"""Writers of a ring with `max_bytes` are killed all the time: what its directory holds never exceeds it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gpu_client.ring.core.ring import make_ring
from gpu_client.ring.settings import RingSettings

WRITERS, KILLS, CAP = 3, 4, 40
OBJECT_BYTES = 8640
"""Largest object of a sample that `ring_processes` puts."""


def begun(place: Path, told: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "tests.races.ring_processes", "write", str(place), str(told)])


def bytes_at_one_moment(place: Path, writers: list[subprocess.Popen[bytes]]) -> int:
    """Return the total size of all files, with each file of two names once, while the writers are stopped."""
    for writer in writers:
        writer.send_signal(signal.SIGSTOP)
    for writer in writers:
        os.waitid(os.P_PID, writer.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    found = {info.st_ino: info.st_size for path in place.rglob("*") if path.is_file() for info in [path.stat()]}
    for writer in writers:
        writer.send_signal(signal.SIGCONT)
    return sum(found.values())


@pytest.mark.parametrize(("mode", "caps"), [("rolling", 1), ("generation", 2)])
def test_a_directory_never_holds_more_than_max_bytes(tmp_path: Path, mode: Any, caps: int) -> None:
    place, chance = tmp_path / "ring", random.Random(7)
    objects = caps * CAP + 4 * WRITERS
    most = RingSettings(cap=CAP).notes_bytes + objects * OBJECT_BYTES
    settings = RingSettings(
        cap=CAP, mode=mode, publish_interval_s=0.05, lease_s=1.0, max_ahead=20 * CAP, max_bytes=most
    )
    ring = make_ring(str(place), settings)
    told = [tmp_path / f"writer-{number}" for number in range(WRITERS)]
    writers = [begun(place, path) for path in told]
    kills, looks, kill_at, sizes = 0, [0], 0.0, [0] * WRITERS
    try:
        while kills < KILLS or ring.newest().inserted < 6 * CAP:
            looks.append(bytes_at_one_moment(place, writers))
            assert looks[-1] <= most
            victim = chance.randrange(WRITERS)
            at_work = told[victim].exists() and told[victim].stat().st_size > sizes[victim]
            if kills < KILLS and at_work and time.monotonic() > kill_at:
                writers[victim].kill()
                writers[victim].wait()
                sizes[victim] = told[victim].stat().st_size
                writers[victim] = begun(place, told[victim])
                kills, kill_at = kills + 1, time.monotonic() + chance.uniform(0.1, 0.5)
            time.sleep(0.01)  # between two looks
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
    assert max(looks) > most / 2, "the bound was near"
