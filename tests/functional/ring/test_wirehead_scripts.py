"""Test Wirehead's unit example and SLURM scripts as processes, with one changed import."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from gpu_client.ring.core.ring import open_ring
from gpu_client.ring.format.records import SAMPLES, WRITERS
from gpu_client.ring.reading.reader import RingReader
from tests.kits.waiting import until

pytestmark = pytest.mark.processes

SCRIPTS = Path(__file__).with_name("wirehead_scripts.py")
UNIT = {
    "MONGOHOST": "localhost", "DBNAME": "unit-test", "SWAP_CAP": 100, "SAMPLE": ["data", "label"],
    "WRITE_COLLECTION": "write", "READ_COLLECTION": "read", "TEMP_COLLECTION": "temp", "COUNTER_COLLECTION": "counter",
    "CHUNKSIZE": 10,
}  # fmt: skip


def test_a_generator_needs_no_torch() -> None:
    """Machines that only generate samples may lack torch, and start sooner without it."""
    names = "WireheadGenerator, WireheadManager, WireheadLogger"
    probe = f"import sys; from baton import {names}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], check=False, timeout=90).returncode == 0


class Started:
    """Processes of one test; none is left."""

    def __init__(self, folder: Path, **changed: object) -> None:
        self.config = folder / "config.yaml"
        self.config.write_text(yaml.safe_dump({**UNIT, **changed}))
        self.processes: list[subprocess.Popen[str]] = []

    def __call__(self, role: str, **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, str(SCRIPTS), role, str(self.config)],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        return process


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    found = Started(tmp_path)
    yield found
    for process in found.processes:
        process.kill()
        process.wait(60)
        assert process.stdout is not None
        process.stdout.close()


def said(process: subprocess.Popen[str], code: int = 0) -> str:
    out, _ = process.communicate(timeout=90)
    assert process.returncode == code
    return out


def test_its_unit_example_reads_what_was_put_though_the_loader_was_started_first(started: Started) -> None:
    loader = started("loader")
    until((started.config.parent / "unit-test.ring/ring.json").exists, 60, what="the loader's ring")
    started("manager")
    generator = started("generator")
    assert said(loader) == "unit example passed, 100 samples\n"
    assert generator.poll() is None, "it goes on"


def test_an_array_of_jobs_that_just_start_more_copies(started: Started) -> None:
    """A third one is started later, killed, and started again by SLURM; the trainer reads whole generations."""
    started.config.write_text(yaml.safe_dump({**UNIT, "SWAP_CAP": 20}))
    trainer = started("trainer")
    tasks = {number: started("task", SLURM_ARRAY_TASK_ID=str(number), SAMPLES="60") for number in (0, 1)}
    place = started.config.parent / "unit-test.ring"
    until((place / "ring.json").exists, 60, what="the ring")
    ring = open_ring(str(place))
    until(lambda: ring.newest().inserted >= 20, 60, what="the first generation")
    tasks[2] = started("task", SLURM_ARRAY_TASK_ID="2", SAMPLES="100000")
    pid = tasks[2].pid
    until(lambda: any(f"-{pid}-" in key for key in ring.store.keys(SAMPLES)), 60, what="samples of the third")
    tasks[2].send_signal(signal.SIGKILL)
    tasks[2].wait(60)
    tasks[2] = started("task", SLURM_ARRAY_TASK_ID="2", SAMPLES="60")
    for number, process in tasks.items():
        assert said(process) == f"task {number}: 60\n", "none was thrown away"
    started.config.with_name("config.yaml.enough").touch()
    assert int(said(trainer).split()[0]) >= 1
    while ring.publish() is not None:
        pass
    newest = ring.newest()
    waiting = sum(claim.samples for claim in ring.claims() if not newest.settled(claim.object))
    assert newest.inserted % 20 == 0 and 0 <= waiting < 20
    assert newest.inserted + waiting >= 180
    with RingReader(ring, threads=False) as reader:
        slots = reader.newest().slots
        found = [reader.sample(slot) for slot in slots]
    assert len({slot.id for slot in slots}) == 20, "each sample once"
    assert {int(one["data"][0]) for one in found} <= {0, 1, 2}


def test_the_unit_example_of_0_9_from_clean_to_its_logger(started: Started) -> None:
    """The commands of its test.sh, in their order, with the one that replaces clean.py."""

    def clean() -> str:
        command = [sys.executable, "-m", "gpu_client.ring.wirehead_clean", str(started.config)]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=90).stdout

    assert clean() == "There was no ring\n"
    generator, pairs = started("verbose"), started("pairs")
    assert said(pairs) == "unit example passed\n"
    lines = said(generator).splitlines()
    assert len(lines) == 101
    assert [line for line in lines if "success" in line] == [
        "Generator: swap success: generation 1, 100 samples so far"
    ]
    logger = started("log")
    assert logger.stdout is not None
    assert logger.stdout.readline() == "1 swaps\n"
    assert logger.stdout.readline().startswith("Logger: unit-test")
    assert json.loads(logger.stdout.readline())["swap_count"] == 1
    logger.kill()
    logger.wait(60)
    assert clean().startswith("Deleted the ring")
    assert list(started.config.parent.iterdir()) == [started.config]


def test_the_array_of_0_9_whose_tasks_call_cycle(started: Started) -> None:
    """No sample is lost and no writer stays registered, although no task ends its generators."""
    started.config.write_text(yaml.safe_dump({**UNIT, "SWAP_CAP": 2}))
    tasks = [started("cycles", SLURM_ARRAY_TASK_ID=str(number)) for number in (0, 1)]
    assert [said(task) for task in tasks] == ["", ""]
    ring = open_ring(str(started.config.parent / "unit-test.ring"))
    newest = ring.newest()
    waiting = sum(claim.samples for claim in ring.claims() if not newest.settled(claim.object))
    assert newest.inserted + waiting == 42 and waiting < 2
    assert ring.store.keys(WRITERS) == []
