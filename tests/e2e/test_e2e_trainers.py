"""Test the agent with training scripts that die in all ways, hang, write slowly, rotate, print, look around."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.contract.jobs.job import AttemptEnd, FailureClass, JobState
from tests.kits.stack.stack import chain
from tests.kits.stack.workshop import Workshop
from tests.kits.waiting import until

pytestmark = [pytest.mark.processes, pytest.mark.emulator]

ENDS: dict[str, tuple[FailureClass, int | None, int | None]] = {
    "exit-3": (FailureClass.SCRIPT_ERROR, 3, None),
    "bad-input": (FailureClass.BAD_INPUT, 65, None),
    "killed": (FailureClass.OUT_OF_MEMORY, None, 9),
    "segfault": (FailureClass.SEGFAULT, None, 11),
    "no-output": (FailureClass.MISSING_OUTPUT, None, None),
    "link-outside": (FailureClass.MISSING_OUTPUT, None, None),
    "disk-full": (FailureClass.DISK_FULL, 1, None),
}


def test_every_kind_of_end_is_told_apart(shop: Workshop) -> None:
    """An agent reports every kind of end with its own class, and then trains the next job."""
    stack = shop.stack
    once: dict[str, Any] = {"max_failures": 1, "max_node_faults": 1, "heartbeat_interval_s": 5}
    jobs = {kind: shop.submit("misbehave.py", arguments=(kind,), **once) for kind in ENDS}
    unknown = shop.submit("", command=["no-such-program", "--help"], **once)
    no_inputs = shop.submit("chain.py", {"steps": 5}, inputs=("nothing/lies/here/",), **once)
    hangs = shop.submit("misbehave.py", arguments=("hangs",), **{**once, "stop_grace_s": 1}, no_progress_timeout_s=2)
    following = shop.submit("chain.py", {"steps": 5})
    agent = shop.agent("w1")
    for kind, (failure_class, exit_code, number) in ENDS.items():
        job = stack.wait_for(jobs[kind], JobState.FAILED, JobState.COMPLETE)
        assert job.state is JobState.FAILED, kind
        (attempt,) = stack.attempts(job.id)
        found = (attempt.end, attempt.failure_class, attempt.exit_code, attempt.signal)
        assert found == (AttemptEnd.FAILED, failure_class, exit_code, number), kind
        assert attempt.log_tail[:2] == [f"I am {kind}", "these are the last words"], kind
        assert stack.log_lines(job.id)[:2] == [f"I am {kind}", "these are the last words"], kind
        assert attempt.reason
        assert attempt.reason.message
        charged = (job.counters.failures, job.counters.node_faults)
        assert charged == ((0, 1) if failure_class.node_fault else (1, 0)), kind
    for job_id, failure_class in (
        (unknown, FailureClass.COMMAND_NOT_FOUND),
        (no_inputs, FailureClass.BAD_INPUT),
        (hangs, FailureClass.NO_PROGRESS),
    ):
        stack.wait_for(job_id, JobState.FAILED)
        assert [attempt.failure_class for attempt in stack.attempts(job_id)] == [failure_class]
    assert stack.wait_for(following, JobState.COMPLETE)
    assert agent.process.poll() is None
    assert not shop.trainers()
    until(lambda: not list(shop.tmp_path.glob("workspace/slot-*/jobs/*")), what="the clearing of the workspace")


def test_a_script_that_knows_nothing_of_us_and_writes_slowly(shop: Workshop) -> None:
    """The agent commits only whole checkpoints of a script whose writes take longer than `stable_s`."""
    stack = shop.stack
    parameters = {"steps": 12, "every": 4, "write_s": 2.0}
    gate = shop.gate(10)
    job_id = shop.submit("plain.py", parameters, environment=gate.environment, heartbeat_interval_s=60)
    agent = shop.agent("w1", stable_s=0.5)
    stack.wait_for_commit(job_id)
    agent.kill_group()
    committed = stack.job(job_id).checkpoint_step
    gate.open()
    shop.agent("w1", stable_s=0.5)
    stack.wait_for(job_id, JobState.COMPLETE)
    assert stack.artifact(job_id) == str(sum(range(13))).encode()
    assert f"starting at {committed}" in stack.log_lines(job_id)
    for checkpoint in stack.client.checkpoints(job_id).checkpoints:
        files = stack.files_of(stack.manifest(checkpoint.manifest_key))
        assert list(files) == ["state.json"]
        state = json.loads(files["state.json"])
        assert state["total"] == sum(range(checkpoint.step + 1))
    assert stack.steps(job_id)[-1] == 12, "what lies there at a clean end is committed without waiting"


def test_a_script_that_rotates_its_checkpoints_away_and_one_that_writes_none(shop: Workshop) -> None:
    stack = shop.stack
    rotating = shop.submit("plain.py", {"steps": 60, "every": 2, "step_s": 0.03, "keep": 1})
    none = shop.submit("plain.py", {"steps": 3, "every": 100})
    agent = shop.agent("w1", stable_s=0.2)
    stack.wait_for(rotating, JobState.COMPLETE)
    stack.wait_for(none, JobState.COMPLETE)
    assert stack.artifact(rotating) == str(sum(range(61))).encode()
    assert stack.steps(rotating)[-1] == 60
    assert stack.artifact(none) == b"6"
    assert stack.steps(none) == []
    assert agent.process.poll() is None


def test_the_trainer_sees_what_it_should_and_no_key(shop: Workshop) -> None:
    stack = shop.stack
    job_id = shop.submit("misbehave.py", arguments=("environment",), environment={"MY_OWN": "value"})
    shop.agent("w1")
    stack.wait_for(job_id, JobState.COMPLETE)
    environment: dict[str, str] = json.loads(stack.artifact(job_id))
    secret = stack.keys["worker"].split("_", 2)[2]
    assert not [name for name, value in environment.items() if secret in value]
    ours = {name for name in environment if name.startswith("BATON_")} - {"BATON_WARDEN"}
    assert ours == {
        "BATON_JOB_ID",
        "BATON_EPOCH",
        "BATON_RECIPE",
        "BATON_DATA_DIR",
        "BATON_OUTPUT_DIR",
        "BATON_RESUME_FROM",
        "BATON_PARAMS",
        "BATON_CHANNEL",
        "BATON_ARENA",
        "BATON_CONTROL",
    }
    assert (environment["BATON_JOB_ID"], environment["BATON_EPOCH"]) == (job_id, "1")
    assert environment["MY_OWN"] == "value"
    assert environment["WANDB_RUN_ID"] == job_id


def test_two_agents_share_a_machine_and_two_want_one_job(shop: Workshop) -> None:
    stack = shop.stack
    first, second = (shop.agent(name) for name in ("w1", "w2"))
    until(lambda: len(list(shop.tmp_path.glob("workspace/slot-*.lock"))) == 2, what="both agents' start")
    gate, parameters = shop.gate(30), {"steps": 60, "step_s": 0.05}
    jobs = [shop.submit("chain.py", parameters, environment=gate.environment, heartbeat_interval_s=5) for _ in range(2)]
    until(lambda: [stack.job(job_id).state for job_id in jobs] == [JobState.RUNNING] * 2, what="both at work")
    gate.open()
    for job_id in jobs:
        stack.wait_for(job_id, JobState.COMPLETE)
        assert len(stack.attempts(job_id)) == 1
        assert stack.artifact(job_id) == chain(60)
    assert {stack.attempts(job_id)[0].worker_id for job_id in jobs} == {"w1", "w2"}

    wanted = [shop.submit("chain.py", {"steps": 2}) for _ in range(5)]
    for job_id in wanted:
        stack.wait_for(job_id, JobState.COMPLETE)
        assert [attempt.epoch for attempt in stack.attempts(job_id)] == [1], "exactly one worker got it"
    claims = sum(agent.log().count(", attempt 1: claimed") for agent in (first, second))
    assert claims == len(jobs) + len(wanted)


def test_an_output_may_be_a_directory(shop: Workshop) -> None:
    stack = shop.stack
    job_id = shop.submit(
        "misbehave.py", arguments=("directory",), outputs=("model",), max_node_faults=1, heartbeat_interval_s=5
    )
    shop.agent("w1")
    job = stack.wait_for(job_id, JobState.COMPLETE, JobState.FAILED)
    assert sorted(artifact.path for artifact in job.artifacts) == ["model/a.bin", "model/b.bin"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system may be mounted here")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def assert_inputs_do_not_fit(shop: Workshop, **agent: Any) -> None:
    stack = shop.stack
    stack.write(f"{shop.queue}/large.bin", bytes(3_000_000), bucket="training-data")
    job_id = shop.submit(
        "chain.py", {"steps": 5}, inputs=(f"{shop.queue}/",), max_node_faults=1, heartbeat_interval_s=5
    )
    shop.agent("w1", **agent)
    stack.wait_for(job_id, JobState.FAILED)
    (attempt,) = stack.attempts(job_id)
    assert attempt.failure_class is FailureClass.DISK_FULL
    assert attempt.reason
    assert "3000000 needed" in attempt.reason.message
    assert stack.job(job_id).counters.node_faults == 1


def test_a_disk_too_small_for_the_inputs_is_said_so_before_the_download(shop: Workshop) -> None:
    assert_inputs_do_not_fit(shop, wrapper=Path(__file__).parent / "full_disk_agent.py")
    assert not shop.stack.s3.requests(f"GET /training-data/.*{shop.queue}")


def test_a_full_disk_is_the_machine_s_fault_and_is_cleared_for_the_next_job(shop: Workshop, small_disk: Path) -> None:
    stack = shop.stack
    assert_inputs_do_not_fit(shop, workspace=small_disk / "workspace")
    # In between one that fits: after two failures in a row the agent would pause.
    stack.wait_for(shop.submit("chain.py", {"steps": 5}), JobState.COMPLETE)
    # The inputs fit, the training itself needs too much.
    greedy = shop.submit(
        "",
        command=["sh", "-c", "head -c 3000000 /dev/zero > $BATON_OUTPUT_DIR/model.bin"],
        max_node_faults=1,
        heartbeat_interval_s=5,
    )
    stack.wait_for(greedy, JobState.FAILED)
    assert [attempt.failure_class for attempt in stack.attempts(greedy)] == [FailureClass.DISK_FULL]
    modest = shop.submit("chain.py", {"steps": 5})
    stack.wait_for(modest, JobState.COMPLETE)
