"""Generators as jobs on machines that have no key of the user's: a ring with the control plane, one machine killed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil
import pytest

from baton.contract.jobs.job import AttemptEnd, InputRef, JobState, JobSubmit
from baton.contract.jobs.policy import Policy
from gpu_client.ring.core.repair import verify_objects
from gpu_client.ring.core.ring import Ring
from gpu_client.ring.errors import RingMismatch
from gpu_client.ring.generating.named_counter import read_count
from gpu_client.ring.reading.reader import RingReader
from gpu_client.ring.settings import RingSettings
from gpu_client.ring.store.control_plane import ControlPlaneStore
from gpu_client.ring.store.uri import ControlPlaneAccess
from tests.kits.stack.control_plane import TRAINERS
from tests.kits.stack.stack import Stack
from tests.kits.stack.workshop import Workshop
from tests.kits.waiting import until

pytestmark = [pytest.mark.processes, pytest.mark.emulator]

SAMPLES = 12


def test_a_killed_generator_costs_at_most_a_sample_and_its_token_ends_with_it(shop: Workshop) -> None:
    stack, name = shop.stack, shop.queue
    access = ControlPlaneAccess(stack.url, stack.keys["admin"])
    settings = RingSettings(cap=SAMPLES, publish_interval_s=0.5, lease_s=10)
    ring = Ring.make(ControlPlaneStore(name, access), settings)
    gate = shop.gate(8)
    job = stack.client.submit(
        JobSubmit(
            command=[sys.executable, str(TRAINERS / "generates.py")],
            queue=name,
            rings=[name],
            outputs=["model.bin"],
            environment=gate.environment,
            parameters={"ring": name, "samples": SAMPLES, "sample_s": 0.3},
            policy=Policy(heartbeat_interval_s=3, backoff_s=0, avoid_machine_s=0),
        )
    )
    first = shop.agent("w1")
    until(lambda: len(ring.newest()) >= 3, what="samples of the first machine")
    (trainer,) = shop.training("generates.py")
    token = Path(f"/proc/{trainer.pid}/environ").read_bytes().split(b"BATON_RING_TOKEN=")[1].split(b"\0")[0].decode()
    assert Ring.open(ControlPlaneStore(name, ControlPlaneAccess(stack.url, token))).settings == settings
    shop.lose(first, job.id)
    gate.open()
    shop.agent("w2")
    stack.wait_for(job.id, JobState.COMPLETE)
    attempts = stack.attempts(job.id)
    # On a machine that stands still for seconds, the second one may lose its lease as well.
    assert {one.end for one in attempts[:-1]} == {AttemptEnd.INTERRUPTED}, [one.reason for one in attempts]
    assert attempts[-1].end is AttemptEnd.COMPLETE
    while ring.publish() is not None:
        pass
    newest = ring.newest()
    assert len({slot.id for slot in newest.slots}) == len(newest) == SAMPLES
    writers = {slot.object.writer for slot in newest.slots}
    assert "epoch-1" in writers and len(writers) > 1
    assert writers <= {f"epoch-{one.epoch}" for one in attempts}
    assert set(dict(verify_objects(ring)).values()) == {""}
    with RingReader(ring, threads=False) as reader:
        assert all(reader.provenance(slot)["seed"] == reader.sample(slot)["x"][0] for slot in reader.newest().slots)
    with pytest.raises(RingMismatch, match=r"key_unknown|key_revoked"):
        Ring.open(ControlPlaneStore(name, ControlPlaneAccess(stack.url, token)))
    for agent in shop.agents:
        assert "batonring_" not in agent.log(), "the token is in the agent's log"
    assert ControlPlaneStore(name, access).remove() > SAMPLES


def environment_of(process: psutil.Process) -> dict[str, str]:
    """Return the environment that the process was started with."""
    parts = Path(f"/proc/{process.pid}/environ").read_bytes().decode().split("\0")
    return dict(part.split("=", 1) for part in parts if "=" in part)


def test_generators_by_recipe_need_no_credentials_and_who_gets_a_killed_one_s_job_goes_on(
    shop: Workshop, stack: Stack
) -> None:
    """Two jobs of `generator@1` receive their code as input, and send samples to the bucket by presigned URL."""
    name, access = shop.queue, ControlPlaneAccess(stack.url, stack.keys["admin"])
    ring = Ring.make(ControlPlaneStore(name, access), RingSettings(cap=100, publish_interval_s=0.5, lease_s=10))
    for code in ("shapes_of_ring.py", "gate.py"):
        stack.write(f"{name}/{code}", (TRAINERS / code).read_bytes(), "training-data")
    # A generator notes twice a second what it has made: held after 6 samples, it has noted at least 3.
    gate = shop.gate(6)
    repository = TRAINERS.parents[2]
    jobs = [
        stack.client.submit(
            JobSubmit(
                recipe="generator@1",
                parameters={
                    "function": "shapes_of_ring:make",
                    "ring": f"baton:{name}",
                    "count": count,
                    "processes": processes,
                    "options": ["cost_s=0.2"],
                },
                inputs=[InputRef(prefix=f"{name}/")],
                queue=name,
                environment={"PYTHONPATH": str(repository), **gate.environment},
                policy=Policy(heartbeat_interval_s=3, backoff_s=0, avoid_machine_s=0, stop_grace_s=20, max_failures=1),
            )
        )
        for count, processes in ((14, 1), (18, 2))
    ]
    assert [stack.job(job.id).rings for job in jobs] == [[name], [name]]
    nothing = {variable: "" for variable in os.environ if variable.startswith("AWS_")}
    agents = [
        shop.agent(f"w{number}", workspace=shop.tmp_path / f"w{number}", environment=nothing) for number in (1, 2)
    ]
    for job in jobs:
        stack.wait_for_step(job.id, 3)
    generators = [one for one in shop.trainers() if one.cmdline()[1:3] == ["-m", "gpu_client.ring.generate"]]
    assert len(generators) == 4, "one, and two with the one that watches over them"
    for generator in generators:
        had = environment_of(generator)
        assert had["BATON_RING_TOKEN"] and "BATON_API_KEY" not in had
        assert not [variable for variable, value in had.items() if variable.startswith("AWS_") and value]
    agents[0].kill_group()
    gate.open()
    shop.agent("w3", workspace=shop.tmp_path / "w3", environment=nothing)
    ended = [stack.wait_for(job.id, JobState.COMPLETE, JobState.FAILED, timeout_s=240) for job in jobs]
    assert [job.state for job in ended] == [JobState.COMPLETE] * 2, [job.reason for job in ended]
    assert sorted(job.counters.interruptions for job in ended) == [0, 1]
    while ring.publish() is not None:
        pass
    newest = ring.newest()
    # Noted twice a second: of what was put since then the next attempt knows nothing, and makes as much again.
    assert 32 <= len(newest) <= 32 + 8
    assert len({slot.id for slot in newest.slots}) == len(newest)
    writers = [f"job-{jobs[0].id}", f"job-{jobs[1].id}-0", f"job-{jobs[1].id}-1"]
    assert {slot.object.writer for slot in newest.slots} == set(writers)
    assert [read_count(ring.store, writer) for writer in writers] == [14, 9, 9]
    assert set(dict(verify_objects(ring)).values()) == {""}
    with RingReader(ring, threads=False) as reader:
        found = [(reader.provenance(slot)["seed"], reader.sample(slot)["x"][0]) for slot in newest.slots]
    assert all(seed == value for seed, value in found)
    assert len({seed for seed, _ in found}) == len(found), "no seed comes twice"
    stored = [one for one in stack.s3.requests("^PUT ") if f"/rings/{name}/" in one and "/samples/" in one]
    assert len(stored) >= len(newest)
    assert ControlPlaneStore(name, access).remove() > len(newest)
