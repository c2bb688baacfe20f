"""A node whose command takes no part in the elastic training is refused before it trains a model of its own."""

from __future__ import annotations

import errno
import json
import os
import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.contract.elastic.world import WorldSeat
from baton.contract.errors import ErrorCode
from baton.contract.jobs.job import FailureClass
from baton.contract.worker.control import MAX_DECISIONS, Directive
from gpu_client.agent.attempt import job_run
from gpu_client.agent.attempt.attempt_reporter import AttemptOutcome
from gpu_client.agent.control import world_relay
from gpu_client.agent.process.failures import ExitStatus
from gpu_client.transport.errors import Unreachable
from tests.kits.waiting import until
from tests.unit.agent.agent_kit import make_answer, refusal
from tests.unit.agent.job_kit import CLEAN, SIGTERMED, Stage, Trainer, checkpoint
from tests.unit.agent.test_job_run_rules import CONTROL, decision

SEAT = WorldSeat(job="146683a1-0000-4000-8000-000000000000", seat=1, min=2, max=4)


def join(trainer: Trainer) -> None:
    """Make the first world call of `session.elastic`, which the scripted control plane does not answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(json.loads(trainer.env["BATON_WORLD"])["socket"])
        program = {"torch": "2.0", "engine": "wire", "codec": "int8", "parameters": 1, "model_sha256": "0" * 64}
        body = {"node": "1.3.9f86d081", "program": program}
        connection.sendall(json.dumps({"call": "join", "body": body}).encode() + b"\n")
        connection.makefile("rb").readline()


@pytest.fixture
def elastic(stage: Stage) -> Stage:
    def refuse(*_: object) -> None:
        raise Unreachable("the control plane is away")

    for name in ("world", "join_world", "propose_epoch", "report_world"):
        setattr(stage.client, name, refuse)
    return stage


@pytest.mark.parametrize(
    "work",
    [lambda trainer: trainer.connect().report(1, 10, {}), lambda trainer: checkpoint(trainer, 10)],
    ids=["a report", "a checkpoint without the session"],
)
def test_a_command_that_trains_alone_is_stopped_at_its_first_sign(
    elastic: Stage, work: Callable[[Trainer], object]
) -> None:
    def act(trainer: Trainer, looks: int) -> None:
        if looks == 1:
            work(trainer)

    elastic.act = act
    assert elastic.run(world=SEAT) is AttemptOutcome.FAILED
    request = elastic.last_report()
    assert request.failure_class is FailureClass.BAD_INPUT
    assert "never called session.elastic" in request.message and "submit the job without nodes" in request.message
    assert elastic.trainer.stops[0] == 0 and elastic.committed == []


def test_a_silent_command_fails_at_its_end(elastic: Stage) -> None:
    assert elastic.run(world=SEAT) is AttemptOutcome.FAILED
    assert elastic.last_report().failure_class is FailureClass.BAD_INPUT


@pytest.mark.parametrize(
    ("module", "name"), [(world_relay, "SocketDirectory"), (world_relay, "_Server"), (job_run, "describe_world")]
)
def test_an_attempt_without_a_relay_leaves_no_thread_and_no_directory(
    elastic: Stage, monkeypatch: pytest.MonkeyPatch, module: object, name: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module, name, fail)
    with tempfile.TemporaryDirectory(prefix="agents-") as parent:
        monkeypatch.setattr(tempfile, "tempdir", parent)
        before = set(threading.enumerate())
        assert elastic.run(world=SEAT) is AttemptOutcome.FAILED
        # The attempt does not wait for the echo of the output, which a blocked terminal holds.
        until(lambda: set(threading.enumerate()) <= before, what="the end of the attempt's threads")
        assert list(Path(parent).iterdir()) == []
    assert "No space left" in elastic.last_report().message and elastic.trainers == []


def test_a_phase_before_the_join_is_no_training(elastic: Stage) -> None:
    def act(trainer: Trainer, looks: int) -> None:
        if looks == 1:
            trainer.connect().report(7, 10, {}, phase=("latents", 3, 9))
        if looks == 20:
            join(trainer)
            trainer.connect().report(8, 10, {})
            checkpoint(trainer, 8)
        if looks == 40:
            trainer.ends(CLEAN)

    elastic.act = act
    assert elastic.run(world=SEAT) is AttemptOutcome.COMPLETE
    assert elastic.committed == [8]


def test_a_decision_that_the_training_tells_after_the_end_of_the_job_is_reported(elastic: Stage) -> None:
    """Another node of the same round has completed the job first."""
    elastic.client.heart.answers = [make_answer(Directive.CANCEL)]

    def act(trainer: Trainer, looks: int) -> None:
        if looks == 1:
            join(trainer)
            trainer.on_stop = lambda: tell_decision(trainer)

    elastic.act = act
    assert elastic.run(world=SEAT, control=CONTROL, heartbeat_interval_s=1) is AttemptOutcome.CANCELED
    told = [one.control.decisions for one in elastic.client.heart.requests if one.control]
    assert [[one.type for one in decisions] for decisions in told if decisions] == [["rule.fired"]]
    assert not {"complete", "fail", "release"} & {name for name, _ in elastic.client.said}


def test_all_decisions_after_the_end_of_the_job_are_reported(elastic: Stage) -> None:
    """One report has room for ten."""
    elastic.client.heart.answers = [make_answer(Directive.CANCEL)]
    steps = range(7, 7 + 2 * MAX_DECISIONS + 1)

    def act(trainer: Trainer, looks: int) -> None:
        if looks == 1:
            join(trainer)
            trainer.on_stop = lambda: tell_decision(trainer, *steps)

    elastic.act = act
    assert elastic.run(world=SEAT, control=CONTROL, heartbeat_interval_s=1) is AttemptOutcome.CANCELED
    told = [one.control.decisions for one in elastic.client.heart.requests if one.control]
    assert [one.step for decisions in told for one in decisions] == [*steps]


def test_the_decisions_of_a_machine_that_was_frozen_are_reported(elastic: Stage) -> None:
    """The control plane has revoked the lease meanwhile, and another node has completed the job."""
    expired = refusal(ErrorCode.LEASE_EXPIRED)
    elastic.client.heart.answers = [expired]

    def act(trainer: Trainer, looks: int) -> None:
        if looks == 1:
            join(trainer)
            trainer.on_stop = lambda: tell_decision(trainer, 7)

    elastic.act = act
    assert elastic.run(world=SEAT, control=CONTROL, heartbeat_interval_s=1) is AttemptOutcome.LOST
    told = [one.control.decisions for one in elastic.client.heart.requests if one.control]
    assert [one.step for decisions in told for one in decisions] == [7]


def test_decisions_without_an_answer_end_with_the_attempt(elastic: Stage) -> None:
    def act(trainer: Trainer, looks: int) -> None:
        if looks == 1:
            join(trainer)
            elastic.client.heart.answers = [make_answer(Directive.CANCEL), Unreachable("the control plane is away")]
            trainer.on_stop = lambda: tell_decision(trainer, 7)

    elastic.act = act
    assert elastic.run(world=SEAT, control=CONTROL, heartbeat_interval_s=1) is AttemptOutcome.CANCELED
    assert [len(one.control.decisions) for one in elastic.client.heart.requests if one.control][-1] == 1


def tell_decision(trainer: Trainer, *steps: int) -> ExitStatus:
    for step in steps or (7,):
        trainer.connect().send_steering(decision(step))
    return SIGTERMED
