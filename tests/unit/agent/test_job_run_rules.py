"""Test the end of an attempt by a rule or command: the report, and the precedence of other ends."""

from __future__ import annotations

from typing import Any

import pytest

from baton.contract.jobs.job import FailureClass
from baton.contract.worker.control import Directive
from gpu_client.agent.attempt.attempt_reporter import AttemptOutcome
from tests.unit.agent.agent_kit import make_answer, refusal
from tests.unit.agent.job_kit import CLEAN, SIGTERMED, Stage, Trainer, checkpoint, exited

CONTROL = {"rules": {"revision": 1, "text": "rules: []"}, "commands": [], "ran_s": 5}


def leaving(kind: str, rule: str = "spike", **arguments: Any) -> dict[str, Any]:
    ended_by = {"rule": rule, "revision": 1, "step": 7, "message": "loss = nan"}
    return {"type": "leaving", "kind": kind, "ended_by": ended_by, "arguments": {"before_step": 6, **arguments}}


def decision(step: int) -> dict[str, Any]:
    return {"type": "decision", "decision": "rule.fired", "rule": "spike", "revision": 1, "step": step}


def says(*messages: dict[str, Any], status: Any = CLEAN, save: int | None = None) -> Any:
    """Make a trainer that sends messages and ends at once, before any is read."""

    def act(trainer: Trainer, looks: int) -> None:
        channel = trainer.connect()
        for message in messages:
            channel.send_steering(message)
        if save is not None:
            checkpoint(trainer, save)
        trainer.ends(status)

    return act


def test_a_stop_as_failed_fails_the_job_though_the_process_ended_well(stage: Stage) -> None:
    stage.act = says(decision(7), leaving("stop", outcome="failed"), save=7)
    assert stage.run(control=CONTROL) is AttemptOutcome.FAILED
    request = stage.last_report()
    assert request.failure_class is FailureClass.STOPPED_BY_RULE
    assert request.ended_by.rule == "spike" and request.ended_by.step == 7
    assert "spike" in request.message and "loss = nan" in request.message
    assert [one.step for one in request.control.decisions] == [7]
    assert stage.committed == [7], "its last checkpoint is kept"


def test_a_stop_as_complete_completes_it_and_says_by_what(stage: Stage) -> None:
    stage.act = says(leaving("stop", outcome="complete"))
    assert stage.run(control=CONTROL) is AttemptOutcome.COMPLETE
    assert stage.last_report().ended_by.rule == "spike"


def test_an_end_without_a_rule_names_none(stage: Stage) -> None:
    assert stage.run(control=CONTROL) is AttemptOutcome.COMPLETE
    assert stage.last_report().ended_by is None and stage.last_report().control.decisions == []


@pytest.mark.parametrize("kind", ["rollback", "pause", "requeue"])
def test_what_goes_on_otherwise_is_handed_back(stage: Stage, kind: str) -> None:
    more = {"to": "best", "skip": 3, "lr_factor": 0.5, "budget": 2} if kind == "rollback" else {"exclude_host": True}
    stage.act = says(decision(7), leaving(kind, **more), save=5)
    assert stage.run(control=CONTROL) is AttemptOutcome.RELEASED
    request = stage.last_report()
    assert (request.reason, request.by_rule.kind, request.by_rule.ended_by.rule) == (kind, kind, "spike")
    assert (request.by_rule.rollback is not None) == (kind == "rollback")
    assert request.by_rule.exclude_host == (kind == "requeue")
    assert [one.step for one in request.control.decisions] == [7] and stage.committed == [5]
    if kind == "rollback":
        assert request.by_rule.rollback.before_step == 6 and request.by_rule.rollback.skip == 3


@pytest.mark.parametrize("code", ["rollback_budget_spent", "rollback_not_kept"])
def test_a_rollback_that_may_not_be_fails_the_job_and_says_by_whom(stage: Stage, code: str) -> None:
    stage.client.trouble["release"] = [refusal(code)]
    stage.act = says(leaving("rollback"))
    assert stage.run(control=CONTROL) is AttemptOutcome.FAILED
    request = stage.last_report()
    assert request.failure_class is FailureClass.STOPPED_BY_RULE and "spike" in request.message
    assert request.ended_by is not None and (request.ended_by.rule, request.ended_by.step) == ("spike", 7)


@pytest.mark.parametrize("code", ["lease_lost", "job_canceled"])
def test_a_lease_that_is_lost_meanwhile_wins(stage: Stage, code: str) -> None:
    stage.client.trouble["release"] = [refusal(code)]
    stage.act = says(leaving("rollback"))
    assert stage.run(control=CONTROL) is (AttemptOutcome.CANCELED if code == "job_canceled" else AttemptOutcome.LOST)
    assert stage.client.kinds() == ["inputs"]


HANDED_BACK = ["rollback", "pause", "requeue"]


def announces(stage: Stage, message: dict[str, Any], *, before: bool, then: Any) -> Any:
    """Make a trainer that announces its end just before or just after a stop request; `then` is its behavior."""

    def act(trainer: Trainer, looks: int) -> None:
        channel = trainer.connect()
        if looks == 1:
            channel.report(7, 100, {})
            if before:
                channel.send_steering(decision(7))
                channel.send_steering(message)
        if looks == 2:
            stage.stop.request("SIGTERM")
        if looks > 2 and trainer.directives:
            if not before:
                channel.send_steering(decision(7))
                channel.send_steering(message)
            then(trainer)

    return act


def well(trainer: Trainer) -> None:
    checkpoint(trainer, 7)
    trainer.ends(CLEAN)


def broken(trainer: Trainer) -> None:
    trainer.ends(exited(1))


def hangs(trainer: Trainer) -> None:
    """Wait until the agent ends the trainer at its deadline."""


ENDS = pytest.mark.parametrize("then", [well, broken, hangs])


def grace_s(then: Any) -> int:
    """Return a grace in real seconds: more than enough for a trainer that leaves."""
    return 1 if then is hangs else 60


@pytest.mark.parametrize("before", [True, False], ids=["said-before", "said-after"])
@ENDS
def test_a_stop_as_failed_wins_over_a_machine_that_leaves(stage: Stage, before: bool, then: Any) -> None:
    """The machine's leaving won, and the rule, which its checkpoint counts as fired, never fired again."""
    stage.act = announces(stage, leaving("stop", outcome="failed"), before=before, then=then)
    if then is hangs and not before:
        stage.act = hangs_at_the_end(stage, leaving("stop", outcome="failed"))
    assert stage.run(control=CONTROL, stop_grace_s=grace_s(then)) is AttemptOutcome.FAILED
    request = stage.last_report()
    assert request.failure_class is FailureClass.STOPPED_BY_RULE and request.ended_by.rule == "spike"
    assert [one.step for one in request.control.decisions] == [7]
    assert stage.committed == ([7] if then is well else [])


def hangs_at_the_end(stage: Stage, message: dict[str, Any]) -> Any:
    """Announce the end after the stop request, and do not leave."""
    said: list[Trainer] = []

    def say(trainer: Trainer) -> None:
        if not said:
            said.append(trainer)
            trainer.connect().send_steering(decision(7))
            trainer.connect().send_steering(message)

    def act(trainer: Trainer, looks: int) -> None:
        trainer.connect()
        if looks == 2:
            stage.stop.request("SIGTERM")
        if trainer.directives:
            say(trainer)

        def made_to() -> Any:
            say(trainer)  # on a busy machine its time is over before it has heard that it is to leave
            return SIGTERMED

        trainer.on_stop = made_to

    return act


@pytest.mark.parametrize("kind", HANDED_BACK)
@pytest.mark.parametrize("before", [True, False], ids=["said-before", "said-after"])
@ENDS
def test_what_is_handed_back_by_a_rule_is_so_though_the_machine_leaves(
    stage: Stage, kind: str, before: bool, then: Any
) -> None:
    stage.act = announces(stage, leaving(kind), before=before, then=then)
    if then is hangs and not before:
        stage.act = hangs_at_the_end(stage, leaving(kind))
    assert stage.run(control=CONTROL, stop_grace_s=grace_s(then)) is AttemptOutcome.RELEASED
    request = stage.last_report()
    assert (request.reason, request.by_rule.kind, request.by_rule.ended_by.rule) == (kind, kind, "spike")
    assert [one.step for one in request.control.decisions] == [7]


@pytest.mark.parametrize("before", [True, False], ids=["said-before", "said-after"])
def test_a_stop_as_complete_completes_though_the_machine_leaves(stage: Stage, before: bool) -> None:
    """A training that leaves before its last step was taken for one that had only obeyed the machine."""
    stage.act = announces(stage, leaving("stop", outcome="complete"), before=before, then=well)
    assert stage.run(control=CONTROL) is AttemptOutcome.COMPLETE
    assert stage.last_report().ended_by.rule == "spike"


@pytest.mark.parametrize("then", [broken, hangs, well])
def test_one_that_could_not_write_its_outputs_any_more_is_handed_back(stage: Stage, then: Any) -> None:
    """A job that a rule ends, but whose outputs are missing, goes back: its checkpoint lets the next machine end it."""
    stage.act = announces(stage, leaving("stop", outcome="complete"), before=True, then=then)
    plan = {"steps": [{"name": "train", "command": ["train"], "outputs": [{"path": "model"}]}]}
    assert stage.run(control=CONTROL, plan=plan, stop_grace_s=1) is AttemptOutcome.RELEASED
    assert (stage.last_report().reason, stage.last_report().by_rule) == ("sigterm", None)


@pytest.mark.parametrize("kind", ["stop", "rollback", "pause"])
def test_a_step_that_a_rule_ends_is_not_tried_again(stage: Stage, kind: str) -> None:
    """A step with retries was run again, and the rule forgotten."""
    stage.act = says(leaving(kind, outcome="failed"))
    plan = {"steps": [{"name": "train", "command": ["train"], "retries": 3, "retry_wait_s": 0}]}
    assert stage.run(control=CONTROL, plan=plan) is (
        AttemptOutcome.FAILED if kind == "stop" else AttemptOutcome.RELEASED
    )
    assert len(stage.trainers) == 1


def test_what_a_try_that_broke_had_announced_is_not_said_of_the_next_one(stage: Stage) -> None:
    def act(trainer: Trainer, looks: int) -> None:
        if len(stage.trainers) == 1:
            says(leaving("stop", outcome="failed"), status=exited(1))(trainer, looks)
        else:
            trainer.ends(CLEAN)

    stage.act = act
    plan = {"steps": [{"name": "train", "command": ["train"], "retries": 3, "retry_wait_s": 0}]}
    assert stage.run(control=CONTROL, plan=plan) is AttemptOutcome.COMPLETE
    assert stage.last_report().ended_by is None


@pytest.mark.parametrize("kind", ["stop", "rollback"])
def test_a_script_that_breaks_while_it_leaves_has_failed_by_itself(stage: Stage, kind: str) -> None:
    stage.act = says(leaving(kind, outcome="failed"), status=exited(1))
    assert stage.run(control=CONTROL) is AttemptOutcome.FAILED
    assert stage.last_report().failure_class is FailureClass.SCRIPT_ERROR


def test_what_one_request_has_no_room_for_goes_ahead_of_the_last_word(stage: Stage) -> None:
    """The last word was made before the heartbeats: it repeated what they had said, and the rest was lost."""
    stage.act = says(*(decision(step) for step in range(1, 36)), leaving("stop", outcome="failed"))
    assert stage.run(control=CONTROL) is AttemptOutcome.FAILED
    reports = [request.control for request in stage.client.heart.requests if request.control is not None]
    told = {one.number: one.step for report in (*reports, stage.last_report().control) for one in report.decisions}
    assert told == {number: number for number in range(1, 36)}


def test_a_command_of_a_heartbeat_reaches_the_trainer_and_its_result_the_next_one(stage: Stage) -> None:
    run = stage.make(control=CONTROL)
    command = {"seq": 3, "kind": "save", "issued_at": 1_790_000_000, "expires_at": 1_790_000_600}
    heard: list[dict[str, Any]] = []

    def act(trainer: Trainer, looks: int) -> None:
        channel = trainer.connect()
        channel._on_steering = lambda message: heard.append(dict(message))
        if looks == 1:
            stage.client.heart.answers = [make_answer(commands=[command], commands_seq=3), make_answer()]
            assert run._keeper.beat()
        if heard:
            channel.send_steering({"type": "command_result", "seq": 3, "status": "applied", "step": 4, "message": ""})
            trainer.ends(CLEAN)

    stage.act = act
    assert run.run() is AttemptOutcome.COMPLETE
    assert heard[0]["seq"] == 3 and 0 < heard[0]["expires_in_s"] <= 600
    assert [(one.seq, one.status) for one in stage.last_report().control.results] == [(3, "applied")]
    assert stage.last_report().control.commands_seq == 3


def test_hostile_last_words_of_a_training_are_none(stage: Stage) -> None:
    stage.act = says(leaving("explode"), {"type": "leaving"}, leaving("rollback", before_step=-4))
    assert stage.run(control=CONTROL) is AttemptOutcome.COMPLETE
    assert stage.last_report().ended_by is None


def test_a_pause_of_the_user_at_the_same_moment_leaves_the_rule_its_end(stage: Stage) -> None:
    """The control plane pauses the job however it is handed back."""
    run = stage.make(control=CONTROL)

    def act(trainer: Trainer, looks: int) -> None:
        channel = trainer.connect()
        if looks == 1:
            channel.send_steering(leaving("requeue"))
            stage.client.heart.answers = [make_answer(Directive.PAUSE, reason="paused_by_user")]
            assert run._keeper.beat()
        if trainer.directives:
            trainer.ends(CLEAN)

    stage.act = act
    assert run.run() is AttemptOutcome.RELEASED
    assert (stage.last_report().reason, stage.last_report().by_rule.kind) == ("requeue", "requeue")


def test_a_later_step_of_the_plan_may_end_otherwise(stage: Stage) -> None:
    first, second = leaving("stop", "early", outcome="complete"), leaving("stop", "late", outcome="failed")

    def act(trainer: Trainer, looks: int) -> None:
        says(first if len(stage.trainers) == 1 else second)(trainer, looks)

    stage.act = act
    plan = {"steps": [{"name": name, "command": [name]} for name in ("warm", "train")], "outputs": []}
    assert stage.run(control=CONTROL, plan=plan) is AttemptOutcome.FAILED
    assert len(stage.trainers) == 2 and stage.last_report().ended_by.rule == "late"
