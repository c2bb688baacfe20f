"""Writers of a ring are killed all the time, publishers among them: readers notice nothing, and nothing is lost."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from gpu_client.ring.core.ring import make_ring
from gpu_client.ring.format.manifest import RingManifest
from gpu_client.ring.settings import RingSettings

WRITERS, READERS = 4, 2
LASTS_S = 8.0
KILLS = 12


def begun(role: str, place: Path, told: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "tests.races.ring_processes", role, str(place), str(told)])


def test_readers_notice_nothing_of_writers_that_are_killed(tmp_path: Path) -> None:
    place, chance = tmp_path / "ring", random.Random(7)
    settings = RingSettings(cap=100, publish_interval_s=0.05, retain=3, lease_s=1.0, max_ahead=500)
    ring = make_ring(str(place), settings)
    writers = [begun("write", place, tmp_path / f"writer-{number}") for number in range(WRITERS)]
    readers = [begun("read", place, tmp_path / f"reader-{number}") for number in range(READERS)]
    kills, sizes = 0, [0] * WRITERS
    try:
        until = time.monotonic() + LASTS_S
        while kills < KILLS or time.monotonic() < until:
            time.sleep(chance.uniform(0.1, 0.8))  # the moment of a kill
            victim = chance.randrange(WRITERS)
            told = tmp_path / f"writer-{victim}"
            if not told.exists() or told.stat().st_size == sizes[victim]:
                continue  # it has only just begun
            writers[victim].send_signal(signal.SIGKILL)
            writers[victim].wait()
            kills += 1
            sizes[victim] = told.stat().st_size
            writers[victim] = begun("write", place, told)
        for number in range(READERS):
            (tmp_path / f"reader-{number}.end").touch()
        for reader in readers:
            assert reader.wait(60) == 0
    finally:
        for process in (*writers, *readers):
            process.kill()
            process.wait()
    while ring.publish() is not None:
        pass
    lines = [line for number in range(READERS) for line in (tmp_path / f"reader-{number}").read_text().splitlines()]
    assert [line for line in lines if line.startswith("wrong")] == []
    assert len(lines) >= 10
    files = [path for number in range(WRITERS) if (path := tmp_path / f"writer-{number}").exists()]
    put = sum(len(path.read_text().splitlines()) for path in files)
    assert put >= KILLS
    newest: RingManifest = ring.newest()
    assert put <= newest.inserted <= put + kills + WRITERS, "a kill costs one sample at most, and none that was put"
