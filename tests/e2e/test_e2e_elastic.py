"""Train on several agents and the local stack: machines die one by one and all at once, and come back."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise

import pytest

from baton.contract.elastic.nodes import NodesSpec
from baton.contract.elastic.world import WorldView
from baton.contract.jobs.job import JobState, JobSubmit
from baton.contract.jobs.policy import Policy
from functions.domain.worlds.seat_ids import seat_ids
from tests.kits.stack.workshop import Workshop
from tests.kits.waiting import until

pytestmark = [pytest.mark.processes, pytest.mark.emulator]

NODES = 3
ROUNDS = 40
START_S = 240


def submit(shop: Workshop) -> str:
    """Submit the example to copy, for three nodes."""
    job = JobSubmit(
        command=["python", "-m", "gpu_client.training.byte_transformer"],
        parameters={"rounds": ROUNDS, "inner_steps": 10, "batch_size": 4, "context": 32, "width": 32, "layers": 1},
        nodes=NodesSpec(min=NODES, max=NODES),
        queue=shop.queue,
        outputs=["model.safetensors", "result.json"],
        policy=Policy(heartbeat_interval_s=2, backoff_s=0, avoid_machine_s=0, stop_grace_s=20),
    )
    return shop.stack.client.submit(job).id


def wait_for_world(shop: Workshop, job_id: str, members: int, *, above_epoch: int = 0) -> WorldView:
    """Wait until the world has so many members in a later epoch."""

    def found() -> WorldView | None:
        view = shop.stack.client.world(job_id)
        return view if view.epoch > above_epoch and len(view.members) == members else None

    view: WorldView = until(found, START_S, what=f"{members} members after epoch {above_epoch}")
    return view


def test_machines_die_one_by_one_and_all_at_once_and_the_training_goes_on(shop: Workshop) -> None:
    stack = shop.stack
    job_id = submit(shop)
    assert stack.job(job_id).state is JobState.PENDING
    seats = seat_ids(job_id, NODES)
    first = [shop.agent(f"first-{number}") for number in range(NODES)]
    formed = wait_for_world(shop, job_id, NODES)
    stack.wait_for_commit(job_id)
    assert stack.job(job_id).state is JobState.RUNNING

    first[0].kill_group()
    alone = wait_for_world(shop, job_id, NODES - 1, above_epoch=formed.epoch)
    assert {one.machine_id for one in alone.members} == {"machine-of-first-1", "machine-of-first-2"}
    before = stack.job(job_id).checkpoint_step or 0
    stack.wait_for_commit(job_id, before + 2)

    for agent in first[1:]:
        agent.kill_group()
    for seat in seats:
        stack.expire_lease(seat)
    stack.wait_for(job_id, JobState.PENDING)
    newest = stack.job(job_id).checkpoint_step or 0
    assert newest >= before + 2

    for number in range(NODES):
        shop.agent(f"second-{number}")
    again = wait_for_world(shop, job_id, NODES, above_epoch=alone.epoch)
    assert again.round >= newest
    job = stack.wait_for(job_id, JobState.COMPLETE, JobState.FAILED, timeout_s=START_S)
    assert job.state is JobState.COMPLETE, job.reason
    assert json.loads(stack.artifact(job_id, "result.json"))["rounds"] == ROUNDS
    steps = stack.steps(job_id)
    assert all(one < other for one, other in pairwise(steps)), steps
    assert newest in steps
    events = stack.events(job_id)
    joined = [event.data["joined"] for event in events if event.type == "world.joined"]
    # A node that a loaded machine keeps from running is lost and joins once more.
    assert min(Counter(seat for seats in joined for seat in seats)[seat] for seat in range(NODES)) >= 2
    lost = [one["seat"] for event in events if event.type == "world.lost" for one in event.data["lost"]]
    assert next(one.seat for one in formed.members if one.machine_id == "machine-of-first-0") in lost
    assert [one.id for one in stack.client.jobs(queue=shop.queue).jobs] == [job_id]
    until(lambda: not shop.trainers(), what="the end of the other nodes")


def test_two_machines_without_a_way_to_each_other_train_through_the_object_store(shop: Workshop) -> None:
    stack = shop.stack
    job = JobSubmit(
        command=["python", "-m", "gpu_client.training.byte_transformer"],
        parameters={"rounds": 2, "inner_steps": 10, "batch_size": 4, "context": 32, "width": 32, "layers": 1},
        nodes=NodesSpec(min=2, max=2),
        queue=shop.queue,
        outputs=["model.safetensors", "result.json"],
        policy=Policy(heartbeat_interval_s=2, backoff_s=0, avoid_machine_s=0, stop_grace_s=20),
    )
    job_id = stack.client.submit(job).id
    for number in range(2):
        # No process listens at this port.
        shop.agent(f"hidden-{number}", elastic_addresses="127.0.0.1:9")
    ended = stack.wait_for(job_id, JobState.COMPLETE, JobState.FAILED, timeout_s=START_S)
    assert ended.state is JobState.COMPLETE, ended.reason
    view = stack.client.world(job_id)
    assert view.nodes and all(one.relay for one in view.nodes)
    assert json.loads(stack.artifact(job_id, "result.json"))["rounds"] == 2
