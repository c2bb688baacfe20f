"""Test requests to an attempt: a lost lease, a cancel, a pause, a SIGTERM, a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.contract.worker.control import Directive
from gpu_client.agent.app.shutdown import ShutdownLevel
from gpu_client.agent.attempt import job_run, trainer_run
from gpu_client.agent.attempt.attempt_reporter import AttemptOutcome
from gpu_client.agent.polled_event import PolledEvent
from gpu_client.agent.process.failures import ExitStatus
from gpu_client.transport.errors import (
    Unreachable,
)
from tests.unit.agent.agent_kit import make_answer, refusal
from tests.unit.agent.job_kit import CLEAN, SIGTERMED, Stage, Trainer, checkpoint, exited


@pytest.mark.parametrize("code", ["lease_lost", "job_canceled"])
def test_a_lease_that_is_lost_before_the_training_starts_nothing(stage: Stage, code: str) -> None:
    stage.client.trouble["inputs"] = [refusal(code)]
    assert stage.run() is (AttemptOutcome.CANCELED if code == "job_canceled" else AttemptOutcome.LOST)
    assert (stage.trainers, stage.client.said) == ([], [])


def test_a_cancel_before_the_training_starts_nothing(stage: Stage) -> None:
    stage.client.heart.answers = [make_answer(Directive.CANCEL)]
    stage.client.trouble["inputs"] = [refusal("lease_expired")]
    assert stage.run() is AttemptOutcome.CANCELED
    assert (stage.trainers, stage.client.said) == ([], [])


def test_a_cancel_during_the_training_tells_the_session_and_ends_it(stage: Stage) -> None:
    run = stage.make()
    stage.client.heart.answers = [make_answer(Directive.CANCEL)]

    def act(trainer: Trainer, looks: int) -> None:
        trainer.connect()
        if looks == 3:
            run._keeper.beat()

    def on_stop() -> ExitStatus:
        (trainer,) = stage.trainers
        assert PolledEvent(lambda: bool(trainer.directives)).wait(20), "the session hears why before the signal comes"
        (trainer.directory / "model.bin").write_text("half")
        return ExitStatus(code=0, signal=None, oom_suspected=False, stopped_by_us=True)

    def started(trainer: Trainer, looks: int) -> None:
        trainer.on_stop = on_stop
        act(trainer, looks)

    stage.act = started
    assert run.run() is AttemptOutcome.CANCELED, "a trainer that ends well after a cancel has not completed"
    assert [(wish.kind, wish.reason, wish.checkpoint) for wish in stage.trainer.directives] == [
        ("stop", "cancel", False)
    ]
    assert stage.trainer.stops[0] == trainer_run.LOST_GRACE_S
    assert stage.client.kinds() == ["inputs"]


@pytest.mark.parametrize("wish", ["release", "pause"])
def test_asked_to_leave_a_session_writes_a_checkpoint_and_the_job_is_handed_back(stage: Stage, wish: str) -> None:
    run = stage.make()

    def act(trainer: Trainer, looks: int) -> None:
        channel = trainer.connect()
        if looks == 1:
            channel.report(5, 10, {})
        if looks == 3:
            if wish == "release":
                stage.stop.request("SIGTERM")
            else:
                stage.client.heart.answers = [make_answer(Directive.PAUSE, reason="paused_by_user")]
                assert run._keeper.beat()
        if trainer.directives:
            checkpoint(trainer, 6)
            trainer.ends(CLEAN)

    stage.act = act
    assert run.run() is AttemptOutcome.RELEASED
    (directive,) = stage.trainer.directives
    assert (directive.reason, directive.checkpoint) == (wish, True)
    request = stage.last_report()
    expected = ("sigterm", "SIGTERM") if wish == "release" else ("pause", "paused_by_user")
    assert (request.reason, request.message) == expected
    assert stage.client.kinds().index("commit") < stage.client.kinds().index("release")


@pytest.mark.parametrize("ends", ["told to leave", "fails"])
def test_what_was_shown_last_is_stored_before_the_job_is_handed_back(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """The agent stores the last artifact before it hands back the job: the next attempt continues from the artifact."""

    def upload(_client: object, _transfer: object, _item: object, files: dict[str, Path], **_: object) -> list[object]:
        stage.client.said.append(("stored", sorted(files)))
        return []

    def on_stop() -> ExitStatus:
        (stage.trainer.directory / "part.zip").write_bytes(b"images")
        stage.trainer.connect().artifact_written(str(stage.trainer.directory / "part.zip"))
        return exited(1) if ends == "fails" else SIGTERMED

    def act(trainer: Trainer, looks: int) -> None:
        trainer.on_stop = on_stop
        if ends == "fails":
            trainer.ends(on_stop())
        elif looks == 2:
            stage.stop.request("SIGTERM")

    monkeypatch.setattr(job_run, "upload_artifacts", upload)
    stage.act = act
    assert stage.run() is (AttemptOutcome.FAILED if ends == "fails" else AttemptOutcome.RELEASED)
    assert [said for said in stage.client.said if said[0] == "stored"] == [("stored", ["part.zip"])]
    assert stage.client.kinds().index("stored") < stage.client.kinds().index("fail" if ends == "fails" else "release")


def test_a_session_that_was_at_its_end_when_asked_to_leave_has_completed(stage: Stage) -> None:
    def act(trainer: Trainer, looks: int) -> None:
        trainer.connect().report(10, 10, {})
        if looks == 5:
            stage.stop.request("SIGTERM")
        if trainer.directives:
            trainer.ends(CLEAN)

    stage.act = act
    assert stage.run() is AttemptOutcome.COMPLETE


def test_a_script_that_ended_well_just_before_it_was_asked_to_leave_has_completed(stage: Stage) -> None:
    def act(trainer: Trainer, _looks: int) -> None:
        stage.stop.request("SIGTERM")
        trainer.ends(CLEAN)

    stage.act = act
    assert stage.run() is AttemptOutcome.COMPLETE


def test_asked_to_leave_before_the_training_it_hands_the_job_back_untouched(stage: Stage) -> None:
    stage.stop.request("SIGTERM")
    assert stage.run() is AttemptOutcome.RELEASED
    assert stage.trainers == []
    assert stage.last_report().reason == "sigterm"


def test_asked_to_leave_while_the_outputs_are_uploaded_it_finishes_first(stage: Stage) -> None:
    def act(trainer: Trainer, _looks: int) -> None:
        trainer.ends(CLEAN)
        stage.client.before["logs"] = lambda: stage.stop.request("SIGTERM")
        trainer.print("done")

    stage.act = act
    assert stage.run() is AttemptOutcome.COMPLETE
    assert stage.stop.is_set()


def test_a_script_without_our_session_gets_a_sigterm_at_once(stage: Stage) -> None:
    def act(trainer: Trainer, looks: int) -> None:
        if looks == 3:
            stage.stop.request("SIGTERM")

    stage.act = act
    assert stage.run() is AttemptOutcome.RELEASED
    assert 7 < stage.trainer.stops[0] <= 8
    assert stage.trainer.status == SIGTERMED


def test_a_failure_while_leaving_is_an_interruption(stage: Stage) -> None:
    """A trainer that fails while the agent leaves counts as interrupted: the same cause often ends both."""

    def act(trainer: Trainer, _looks: int) -> None:
        stage.stop.request("SIGTERM")
        trainer.ends(exited(143))

    stage.act = act
    assert stage.run() is AttemptOutcome.RELEASED


def test_a_second_signal_cuts_the_grace_short(stage: Stage) -> None:
    def act(trainer: Trainer, looks: int) -> None:
        if looks == 3:
            stage.stop.request("SIGTERM")
            assert stage.stop.request("SIGTERM") is ShutdownLevel.NOW

    stage.act = act
    stage.client.trouble["release"] = [Unreachable("down")]
    assert stage.run(stop_grace_s=3000) is AttemptOutcome.LOST, "one try, then it leaves"
    assert stage.trainer.stops[0] == 0


def test_a_checkpoint_directive_is_passed_on_once_somebody_hears_it(stage: Stage) -> None:
    run = stage.make()
    stage.client.heart.answers = [make_answer(Directive.CHECKPOINT)]

    def act(trainer: Trainer, looks: int) -> None:
        if looks in (1, 2, 60, 70):
            assert run._keeper.beat()
        if looks == 3:
            trainer.connect()
        if looks >= 70 and trainer.directives:
            trainer.ends(CLEAN)
        assert looks < 5000

    stage.act = act
    assert run.run() is AttemptOutcome.COMPLETE
    assert [directive.kind for directive in stage.trainer.directives] == ["checkpoint"]


def test_heartbeats_carry_phase_progress_and_place(stage: Stage) -> None:
    run = stage.make()

    def act(trainer: Trainer, looks: int) -> None:
        if looks == 1:
            run._keeper.beat()
            trainer.connect().report(4, 10, {"loss": 0.25})
        if run._progress():
            run._keeper.beat()
            trainer.ends(CLEAN)

    stage.act = act
    assert run.run() is AttemptOutcome.COMPLETE
    first, second = stage.client.heart.requests
    assert (first.phase, first.step) == ("training", None)
    assert (second.step, second.total_steps, second.metrics) == (4, 10, {"loss": 0.25})
    assert second.machine_id
