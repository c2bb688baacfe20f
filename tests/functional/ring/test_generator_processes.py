"""Test the generator program as processes: concurrent, stopped, killed, orphaned."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from gpu_client.ring.core.ring import Ring, open_ring
from gpu_client.ring.format.manifest import ObjectId
from gpu_client.ring.format.objects import StoredSamples
from gpu_client.ring.format.records import SAMPLES
from tests.kits.waiting import alive, until

pytestmark = pytest.mark.processes

FUNCTION = """
import time
import numpy as np

def slow(seed, cost_s=0.02):
    time.sleep(cost_s)
    if seed == 5:
        raise ValueError("no five")
    return np.full(50, seed)

def wrong(seed):
    raise ValueError("never")
"""


class Program:
    """Starts the program in a directory with a user's module; ends what is left of it."""

    def __init__(self, folder: Path) -> None:
        (folder / "made_for_test.py").write_text(FUNCTION)
        self.folder, self.place = folder, folder / "ring"
        self.log = folder / "log.txt"
        self.processes: list[subprocess.Popen[bytes]] = []

    def __call__(self, *arguments: str, function: str = "slow", **environment: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "gpu_client.ring.generate", f"--function=made_for_test:{function}"]
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("BATON_", "SLURM_"))}
        root = str(Path(__file__).resolve().parents[3])
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [*command, f"--ring={self.place}", *arguments, "--settings", "cap=5000", "publish_interval_s=0.05"],
                cwd=self.folder,
                env={**kept, "PYTHONPATH": root, **environment},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def ring(self) -> Ring:
        until((self.place / "ring.json").exists, what="the ring")
        return open_ring(str(self.place))

    def writers(self) -> set[str]:
        """Return the names of the writers that have put samples."""
        keys = self.ring().store.keys(SAMPLES)
        return {found.writer for key in keys if (found := ObjectId.of_key(key)) is not None}


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    made = Program(tmp_path)
    yield made
    for process in made.processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(60)


def seeds_in(ring: Ring) -> list[int]:
    found = []
    for key in ring.store.keys(SAMPLES):
        data = ring.store.read(key)
        assert data is not None
        stored = StoredSamples(key, data)
        assert (stored.sample() == stored.seed()).all()
        found.append(stored.seed())
    return found


def test_several_processes_share_the_count_and_the_seeds(program: Program) -> None:
    process = program("--processes=3", "--count=50", "--name=several")
    assert process.wait(60) == 0, program.log.read_text()
    ring = program.ring()
    assert ring.newest().inserted == 50
    assert program.writers() == {"several-0", "several-1", "several-2"}
    seeds = seeds_in(ring)
    assert len(seeds) == len(set(seeds)) == 50 and 5 not in seeds
    assert "50 of 50 samples put" in program.log.read_text()
    again = program("--processes=3", "--count=50", "--name=several")
    assert again.wait(60) == 0
    assert ring.newest().inserted == 50, "they had made theirs"


def test_told_to_stop_all_of_them_end_cleanly_and_nothing_is_lost(program: Program) -> None:
    process = program("--processes=2")
    until(lambda: len(program.writers()) == 2, what="samples of both")
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(60) == 0, program.log.read_text()
    ring = program.ring()
    assert ring.newest().inserted == len(seeds_in(ring)), "all that is stored can be read"
    assert ring.store.keys("writers/") == [], "they have left"
    assert ring.store.keys("generators/") + ring.store.keys("copies/") == [], "names that never come again"


def test_they_end_with_the_one_that_started_them(program: Program) -> None:
    process = program("--processes=2")
    until(lambda: len(program.writers()) == 2, what="samples of both")
    children = [child.pid for child in psutil.Process(process.pid).children()]
    process.kill()
    process.wait(60)
    until(lambda: not any(alive(pid) for pid in children), what="the end of the copies")


def test_when_one_cannot_generate_all_end_and_the_reason_is_told(program: Program) -> None:
    process = program("--processes=2", function="wrong")
    assert process.wait(60) == 1
    assert "ValueError: never" in program.log.read_text()
    assert program("--processes=2", function="no_such").wait(60) == 65
    assert "error: made_for_test has no function no_such" in program.log.read_text()


def test_a_task_that_is_killed_and_requeued_goes_on_with_its_count(program: Program) -> None:
    task = {"SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "3"}
    process = program("--count=40", **task)
    until(lambda: program.ring().newest().inserted >= 5, what="samples")
    process.kill()
    process.wait(60)
    assert program("--count=40", **task).wait(60) == 0, program.log.read_text()
    ring = program.ring()
    assert program.writers() == {"slurm-77-3-0"}
    # Noted twice a second: what was put since then, and was not noted before the kill, is made again.
    assert 40 <= ring.newest().inserted <= 40 + 26
    seeds = seeds_in(ring)
    assert len(seeds) == len(set(seeds))
