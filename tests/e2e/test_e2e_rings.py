"""Generators and a training as jobs, with a ring between them: killed and resumed, the training reads what it read."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from baton.contract.jobs.history import EventType
from baton.contract.jobs.job import AttemptEnd, FailureClass, JobState, JobSubmit
from baton.contract.jobs.policy import Policy
from gpu_client.ring.core.ring import Ring, make_ring, open_ring
from gpu_client.ring.format.manifest import ObjectId
from gpu_client.ring.format.objects import StoredSamples
from gpu_client.ring.format.records import SAMPLES
from gpu_client.ring.generating.writer import RingWriter
from gpu_client.ring.settings import RingSettings
from tests.e2e.trainers.shapes_of_ring import make
from tests.kits.files.directories import json_lines
from tests.kits.stack.control_plane import TRAINERS
from tests.kits.stack.workshop import Gate, Workshop
from tests.kits.waiting import until

pytestmark = [pytest.mark.processes, pytest.mark.emulator]


def generator(shop: Workshop, place: Path, gate: Gate | None = None, **parameters: Any) -> str:
    """A job that generates; its function is installed, as far as the job knows."""
    job = shop.stack.client.submit(
        JobSubmit(
            recipe="generator@1",
            parameters={"function": "shapes_of_ring:make", "ring": str(place), **parameters},
            queue=shop.queue,
            environment={"PYTHONPATH": f"{TRAINERS}:{TRAINERS.parents[2]}", **(gate.environment if gate else {})},
            policy=Policy(heartbeat_interval_s=1, backoff_s=0, avoid_machine_s=0, stop_grace_s=20, max_failures=1),
        )
    )
    return job.id


def agent(shop: Workshop, name: str) -> Any:
    return shop.agent(name, workspace=shop.tmp_path / f"workspace-{name}")


def seeds_in(ring: Ring) -> list[int]:
    """Return the seeds of all stored samples."""
    found = []
    for key in ring.store.keys(SAMPLES):
        data = ring.store.read(key)
        if data is not None:
            stored = StoredSamples(key, data)
            found += [stored.seed(number) for number in range(len(stored))]
    return found


def test_a_generator_that_is_killed_goes_on_elsewhere_and_makes_as_many_as_were_wanted(shop: Workshop) -> None:
    place = shop.tmp_path / "ring"
    gate = shop.gate(30)
    job_id = generator(shop, place, gate, count=60, cap=100, options=["cost_s=0.1"])
    first = agent(shop, "w1")
    shop.stack.wait_for_step(job_id, 5)
    put = open_ring(str(place)).newest().inserted
    shop.lose(first, job_id)
    gate.open()
    agent(shop, "w2")
    job = shop.stack.wait_for(job_id, JobState.COMPLETE, JobState.FAILED)
    assert job.state is JobState.COMPLETE, job.reason
    assert (job.counters.interruptions, job.counters.failures) == (1, 0)
    ring = open_ring(str(place))
    newest = ring.newest()
    # Noted twice a second: of what was put since then the next attempt knows nothing, and makes as much again.
    assert 60 <= newest.inserted <= 60 + 6 and put >= 1
    assert {(slot.object.writer, slot.object.epoch) for slot in newest.slots} == {
        (f"job-{job_id}"[:64], epoch) for epoch in (1, newest.slots[-1].object.epoch)
    }
    seeds = seeds_in(ring)
    assert len(seeds) == len(set(seeds)) >= 60
    metrics = job.progress.metrics if job.progress else {}
    assert job.progress is not None and (job.progress.step, job.progress.total_steps) == (60, 60)
    assert metrics["ring.fill"] > 0 and metrics["ring.put_rate"] > 0 and metrics["refused"] == 0


def test_told_to_leave_a_generator_ends_cleanly_and_the_next_machine_has_it_at_once(shop: Workshop) -> None:
    place = shop.tmp_path / "ring"
    gate = shop.gate(20)
    job_id = generator(shop, place, gate, count=40, cap=100, pack=4, codec="zstd", options=["cost_s=0.1"])
    first = agent(shop, "w1")
    shop.stack.wait_for_step(job_id, 5)
    first.signal(signal.SIGTERM)
    until(lambda: "SIGTERM received" in first.log(), what="the signal")
    gate.open()
    first.wait()
    ring = open_ring(str(place))
    left = [found for key in ring.store.keys(SAMPLES) if (found := ObjectId.of_key(key))]
    assert {found.epoch for found in left} == {1}
    agent(shop, "w2")
    job = shop.stack.wait_for(job_id, JobState.COMPLETE, JobState.FAILED)
    assert job.state is JobState.COMPLETE, job.reason
    assert [attempt.end for attempt in shop.stack.attempts(job_id)] == [AttemptEnd.RELEASED, AttemptEnd.COMPLETE]
    assert ring.newest().inserted == 40, "the pack that was not full was stored, too"
    seeds = sorted(seeds_in(ring))
    assert len(set(seeds)) == 40 and seeds[:5] == [0, 1, 2, 3, 4]


def test_a_generator_that_cannot_be_run_fails_as_bad_input_with_the_reason(shop: Workshop) -> None:
    make_ring(str(shop.tmp_path / "ring"), RingSettings(cap=4))
    job_id = generator(shop, shop.tmp_path / "ring", cap=5)
    agent(shop, "w1")
    job = shop.stack.wait_for(job_id, JobState.COMPLETE, JobState.FAILED)
    assert job.state is JobState.FAILED
    attempt = shop.stack.attempts(job_id)[0]
    assert attempt.failure_class is FailureClass.BAD_INPUT and attempt.reason is not None
    assert "a ring exists with cap 4 instead of 5" in attempt.reason.message


def test_generators_are_killed_while_a_training_reads_is_killed_and_resumed(shop: Workshop) -> None:
    """The training reads exactly the same samples, although the machines of two endless generators vanish."""
    stack, place, trace = shop.stack, shop.tmp_path / "ring", shop.tmp_path / "trace.jsonl"
    makers = [generator(shop, place, cap=20, options=["cost_s=0.02"]) for _ in range(2)]
    agents = [agent(shop, "g1"), agent(shop, "g2")]
    until(lambda: place.is_dir() and (place / "pointer").exists(), what="the first samples")
    parameters = {"steps": 60, "step_s": 0.05, "ring": str(place), "trace": str(trace), "workers": 1}
    gate = shop.gate(40)
    job_id = shop.submit(
        "ringed.py", parameters, outputs=("end.json",), environment=gate.environment, heartbeat_interval_s=1
    )
    trainer = agent(shop, "t1")
    stack.wait_for_commit(job_id, 10)
    agents[0].kill_group()
    agents[0] = agent(shop, "g1")
    stack.wait_for_step(job_id, 22)
    shop.lose(trainer, job_id)
    gate.open()
    agent(shop, "t2")
    job = stack.wait_for(job_id, JobState.COMPLETE, JobState.FAILED, timeout_s=240)
    assert job.state is JobState.COMPLETE, job.reason
    assert (job.counters.interruptions, job.counters.failures) == (1, 0)
    lines = json_lines(trace)
    first = {one["step"]: one["ids"] for one in lines if one["epoch"] == 1}
    second = {one["step"]: one["ids"] for one in lines if one["epoch"] == lines[-1]["epoch"]}
    assert lines[-1]["epoch"] > 1 and sorted({*first, *second}) == list(range(1, 61))
    again = first.keys() & second.keys()
    assert {step: second[step] for step in again} == {step: first[step] for step in again}
    metrics = job.progress.metrics if job.progress else {}
    assert metrics["data.age"] > 0 and metrics["data.reuse"] > 0 and metrics["data.wait"] >= 0
    for maker in makers:
        assert stack.job(maker).state is JobState.RUNNING
        stack.client.stop(maker)


def test_a_flipped_bit_is_an_event_of_the_training_that_reads_it(shop: Workshop) -> None:
    """Met by a worker of its loader; the training goes on with another sample."""
    stack, place, trace = shop.stack, shop.tmp_path / "ring", shop.tmp_path / "trace.jsonl"
    ring = make_ring(str(place), RingSettings(cap=8, max_ahead=100))
    with RingWriter(ring, "w", threads=False) as writer:
        for seed in range(8):
            writer.put(make(seed), seed=seed)
    key = ring.store.keys(SAMPLES)[3]
    data = bytearray((place / key).read_bytes())
    data[-70] ^= 1
    (place / key).unlink()
    (place / key).write_bytes(data)
    parameters = {"steps": 12, "step_s": 0.05, "ring": str(place), "trace": str(trace), "workers": 1}
    job_id = shop.submit("ringed.py", parameters, outputs=("end.json",), heartbeat_interval_s=1)
    agent(shop, "t1")
    job = stack.wait_for(job_id, JobState.COMPLETE, JobState.FAILED, timeout_s=240)
    assert job.state is JobState.COMPLETE, job.reason
    assert len(json_lines(trace)) == 12
    (event,) = [one for one in stack.client.events(job_id).events if one.type is EventType.RING_QUARANTINED]
    said = event.data
    assert (said["ring"], said["object"], said["objects"], said["rank"]) == (str(place), key, 1, 0)
    assert 0 <= said["step"] <= 12 and said["message"].startswith(f"{key} is damaged: the bytes from")
    assert job.progress is not None and job.progress.metrics["ring.quarantined"] == 1
