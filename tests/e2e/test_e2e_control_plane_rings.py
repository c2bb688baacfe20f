"""Generators as jobs on machines that have no key of the user's: a ring with the control plane, one machine killed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from contract.jobs import AttemptEnd, JobState, JobSubmit, Policy
from gpu_client.ring.access import Access
from gpu_client.ring.errors import RingMismatch
from gpu_client.ring.reader import RingReader
from gpu_client.ring.ring import Ring
from gpu_client.ring.settings import RingSettings
from gpu_client.ring.status import verified
from gpu_client.ring.store_api import ApiStore
from tests.control_plane import TRAINERS
from tests.waiting import until
from tests.workshop import Workshop

pytestmark = [pytest.mark.processes, pytest.mark.emulator]

SAMPLES = 12


def test_a_killed_generator_costs_at_most_a_sample_and_its_token_ends_with_it(shop: Workshop) -> None:
    stack, name = shop.stack, shop.queue
    access = Access(stack.url, stack.keys["admin"])
    settings = RingSettings(cap=SAMPLES, publish_interval_s=0.2, lease_s=10)
    ring = Ring.make(ApiStore(name, access), settings)
    job = stack.client.submit(
        JobSubmit(
            command=[sys.executable, str(TRAINERS / "generates.py")],
            queue=name,
            rings=[name],
            outputs=["model.bin"],
            parameters={"ring": name, "samples": SAMPLES, "sample_s": 0.3},
            policy=Policy(heartbeat_interval_s=2, backoff_s=0, avoid_machine_s=0),
        )
    )
    first = shop.agent("w1")
    until(lambda: len(ring.newest()) >= 3, 25, what="samples of the first machine")
    (trainer,) = shop.training("generates.py")
    token = Path(f"/proc/{trainer.pid}/environ").read_bytes().split(b"BATON_RING_TOKEN=")[1].split(b"\0")[0].decode()
    assert Ring.open(ApiStore(name, Access(stack.url, token))).settings == settings
    first.kill_group()
    shop.agent("w2")
    stack.wait_for(job.id, JobState.COMPLETE)
    attempts = stack.attempts(job.id)
    assert (attempts[0].end, attempts[-1].end) == (AttemptEnd.INTERRUPTED, AttemptEnd.COMPLETE)
    while ring.publish() is not None:
        pass
    newest = ring.newest()
    assert len({slot.id for slot in newest.slots}) == len(newest) == SAMPLES
    assert {slot.object.writer for slot in newest.slots} >= {"epoch-1", f"epoch-{attempts[-1].epoch}"}
    assert set(dict(verified(ring)).values()) == {""}
    with RingReader(ring, threads=False) as reader:
        assert all(reader.provenance(slot)["seed"] == reader.sample(slot)["x"][0] for slot in reader.newest().slots)
    with pytest.raises(RingMismatch, match=r"key_unknown|key_revoked"):
        Ring.open(ApiStore(name, Access(stack.url, token)))
    for agent in shop.agents:
        assert "batonring_" not in agent.log(), "the token is in the agent's log"
    assert ApiStore(name, access).remove() > SAMPLES
