"""Test the outcome of an attempt for every event."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from baton.contract.jobs.job import FailureClass
from gpu_client.agent.attempt import job_run, required_outputs
from gpu_client.agent.attempt.attempt_reporter import AttemptOutcome
from gpu_client.agent.io import checkpoint_collector
from gpu_client.agent.process.failures import ExitStatus
from gpu_client.agent.workspace.slots import DiskFullError, WorkspaceError
from gpu_client.checkpoints.local.directory_files import BadDirectory
from gpu_client.checkpoints.restore.checkpoint_restore import Restored, RestoreFailed
from gpu_client.transport.errors import (
    ChecksumMismatch,
    DiskFull,
    ObjectMissing,
    TransferCanceled,
    TransferError,
    UnexpectedAnswer,
    Unreachable,
    UnsafePath,
)
from gpu_client.transport.net.cancellation import CancelEvent
from tests.unit.agent.agent_kit import foreign, make_answer, refusal
from tests.unit.agent.job_kit import CLEAN, Stage, Trainer, checkpoint, exited

# The end of the training


def test_a_clean_end_is_complete_with_its_outputs_progress_and_log(stage: Stage) -> None:
    def act(trainer: Trainer, _looks: int) -> None:
        trainer.connect().report(10, 10, {"loss": 0.5})
        checkpoint(trainer, 10)
        (trainer.directory / "model.bin").write_text("weights")
        trainer.print("the last line")
        trainer.ends(CLEAN)

    stage.act = act
    assert stage.run(outputs=["model.bin"]) is AttemptOutcome.COMPLETE
    request = stage.last_report()
    assert (request.step, request.metrics) == (10, {"loss": 0.5})
    assert stage.phases == ["restoring", "fetching", "training", "uploading"]
    assert stage.client.kinds() == ["inputs", "commit", "logs", "complete"], "the log ends before the attempt does"
    assert stage.trainer.stops == [0], "only to be sure"


def test_parameters_reach_the_trainer(stage: Stage) -> None:
    seen: list[object] = []

    def act(trainer: Trainer, _looks: int) -> None:
        seen.append(json.loads(Path(trainer.env["BATON_PARAMS"]).read_text()))
        trainer.ends(CLEAN)

    stage.act = act
    assert stage.run(parameters={"prompt": "ein Bär"}) is AttemptOutcome.COMPLETE
    assert seen == [{"prompt": "ein Bär"}]


def test_a_missing_output_is_a_failure_and_says_which(stage: Stage) -> None:
    assert stage.run(outputs=["model.bin"]) is AttemptOutcome.FAILED
    request = stage.last_report()
    assert request.failure_class is FailureClass.MISSING_OUTPUT
    assert "model.bin" in request.message


def test_an_error_exit_is_a_failure_with_code_class_and_last_lines(stage: Stage) -> None:
    def act(trainer: Trainer, _looks: int) -> None:
        for number in range(60):
            trainer.print(f"line {number} " + "x" * 3000)
        trainer.print("ValueError: bad rate")
        trainer.ends(exited(1))

    stage.act = act
    assert stage.run() is AttemptOutcome.FAILED
    request = stage.last_report()
    assert (request.failure_class, request.exit_code, request.signal) == (FailureClass.SCRIPT_ERROR, 1, None)
    assert request.message == "ValueError: bad rate"
    assert len(request.log_tail) == 50
    assert request.log_tail[-1] == "ValueError: bad rate"
    assert max(map(len, request.log_tail)) == 2000
    assert stage.client.kinds().index("logs") < stage.client.kinds().index("fail")


def test_death_by_a_signal_is_a_failure(stage: Stage) -> None:
    """The successor of the original took it for a cancellation: such a job was handed out for ever."""
    stage.act = lambda trainer, _: trainer.ends(
        ExitStatus(code=None, signal=9, oom_suspected=True, stopped_by_us=False)
    )
    assert stage.run() is AttemptOutcome.FAILED
    assert (stage.last_report().failure_class, stage.last_report().signal) == (FailureClass.OUT_OF_MEMORY, 9)


def test_a_last_checkpoint_is_committed_before_a_failure_is_reported(stage: Stage) -> None:
    def act(trainer: Trainer, _looks: int) -> None:
        checkpoint(trainer, 7)
        trainer.ends(exited(1))

    stage.act = act
    assert stage.run() is AttemptOutcome.FAILED
    assert stage.committed == [7]
    assert stage.client.kinds().index("commit") < stage.client.kinds().index("fail")


def test_a_last_checkpoint_is_committed_before_missing_outputs_are_reported(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Missing outputs do not cost the last checkpoint, from which the job resumes once its output names are correct."""

    def slowly(*arguments: object, cancel: CancelEvent, **_: object) -> str:
        if cancel.wait(0.3):
            raise TransferCanceled("closed")
        stage.committed.append(7)
        return "ok"

    def act(trainer: Trainer, _looks: int) -> None:
        checkpoint(trainer, 7)
        trainer.ends(CLEAN)

    monkeypatch.setattr(checkpoint_collector, "commit_checkpoint", slowly)
    stage.act = act
    assert stage.run(outputs=["model.bin"]) is AttemptOutcome.FAILED
    assert stage.committed == [7]


def test_no_progress_for_too_long_is_a_failure(stage: Stage) -> None:
    stage.act = lambda _trainer, _looks: None
    assert stage.run(no_progress_timeout_s=0) is AttemptOutcome.FAILED
    assert stage.last_report().failure_class is FailureClass.NO_PROGRESS
    assert stage.trainer.stops[0] == 8


# Failures around the trainer


@pytest.mark.parametrize(
    ("error", "failure_class"),
    [
        (ObjectMissing("no object lies below x/"), FailureClass.BAD_INPUT),
        (UnsafePath("two inputs"), FailureClass.BAD_INPUT),
        (ChecksumMismatch("size"), FailureClass.TRANSFER_FAILED),
        (TransferError("403"), FailureClass.TRANSFER_FAILED),
        (Unreachable("the store"), FailureClass.TRANSFER_FAILED),
        (UnexpectedAnswer("?"), FailureClass.TRANSFER_FAILED),
        (DiskFull("no space"), FailureClass.DISK_FULL),
        (DiskFullError(Path("/w"), 5, 20), FailureClass.DISK_FULL),
        (OSError(errno.ENOSPC, "No space left on device"), FailureClass.DISK_FULL),
        (OSError(errno.EIO, "Input/output error"), FailureClass.NODE_FAULT),
        (WorkspaceError("something is mounted there"), FailureClass.NODE_FAULT),
        (RestoreFailed("cannot be fetched"), FailureClass.RESTORE_FAILED),
        (BadDirectory("a link"), FailureClass.MISSING_OUTPUT),
        (refusal("invalid_value", 422), FailureClass.BAD_INPUT),
        (refusal("conflict"), FailureClass.BAD_INPUT),
        (foreign(403), FailureClass.TRANSFER_FAILED),
        (WorkspaceError("a name that is no text: /w/\udcff"), FailureClass.NODE_FAULT),
        (KeyError("a bug of ours"), FailureClass.NODE_FAULT),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value.value,
)
def test_an_error_before_the_training_is_a_failure_with_its_class(
    stage: Stage, error: Exception, failure_class: FailureClass
) -> None:
    """Never a dead agent: the next one that is handed the job would die too, and no budget would count it."""
    stage.restored = error
    assert stage.run() is AttemptOutcome.FAILED
    request = stage.last_report()
    assert request.failure_class is failure_class
    assert request.message
    assert stage.trainers == []


@pytest.mark.parametrize(
    ("error", "failure_class"),
    [
        (OSError(errno.E2BIG, "Argument list too long"), FailureClass.COMMAND_NOT_FOUND),
        (ValueError("embedded null byte"), FailureClass.COMMAND_NOT_FOUND),
        (OSError(errno.EAGAIN, "Resource temporarily unavailable"), FailureClass.NODE_FAULT),
        (TimeoutError("the guardian did not start"), FailureClass.NODE_FAULT),
    ],
    ids=str,
)
def test_a_command_that_cannot_be_handed_over(stage: Stage, error: Exception, failure_class: FailureClass) -> None:
    stage.start_error = error
    assert stage.run() is AttemptOutcome.FAILED
    assert stage.last_report().failure_class is failure_class


def test_a_note_that_cannot_be_written_does_not_cost_the_job(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise DiskFullError(stage.workspace.slot, 0)

    monkeypatch.setattr(stage.workspace, "write_state", full)
    assert stage.run() is AttemptOutcome.COMPLETE


def test_a_workspace_that_cannot_be_cleared_ends_the_agent_after_the_report(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(**_: object) -> None:
        raise WorkspaceError("mounted")

    def act(trainer: Trainer, _looks: int) -> None:
        monkeypatch.setattr(stage.workspace, "purge", broken)
        trainer.ends(CLEAN)

    stage.act = act
    with pytest.raises(WorkspaceError):
        stage.run()
    assert stage.client.kinds()[-1] == "complete"


def test_a_restored_checkpoint_is_resumed_from_and_not_committed_again(stage: Stage, tmp_path: Path) -> None:
    slot = stage.workspace.slot

    def restore_into(output: Path) -> Restored:
        path = output / "checkpoint-5"
        path.mkdir()
        (path / "baton.json").write_text(json.dumps({"format": 2, "step": 5, "metrics": {}}))
        return Restored(step=5, epoch=2, path=path, total_bytes=1)

    def restore(*arguments: object, **_: object) -> Restored:
        return restore_into(slot / "jobs" / "146683a1-cb76-4702-9fef-fcccd32594f1.3" / "output")

    seen: list[str] = []

    def act(trainer: Trainer, _looks: int) -> None:
        seen.append(trainer.env["BATON_RESUME_FROM"])
        checkpoint(trainer, 6)
        trainer.ends(CLEAN)

    stage.act = act
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job_run, "restore", restore)
        assert stage.run() is AttemptOutcome.COMPLETE
    assert seen[0].endswith("/output/checkpoint-5")
    assert stage.committed == [6]


def test_the_checkpoint_comes_before_the_inputs(stage: Stage) -> None:
    """The agent restores the checkpoint before it fetches inputs: the URL from the claim lives 15 minutes."""
    fetched: list[bool] = []
    stage.client.before["inputs"] = lambda: fetched.append(bool(stage.phases[-2:] == ["restoring", "fetching"]))
    assert stage.run() is AttemptOutcome.COMPLETE
    assert fetched == [True]


# The report


def test_the_report_waits_for_the_control_plane(stage: Stage) -> None:
    stage.client.trouble["complete"] = [Unreachable("down")] * 7 + [refusal("lease_expired")]
    assert stage.run() is AttemptOutcome.COMPLETE
    assert len(stage.client.heart.requests) == 1, "the lease is proved again where it had run out"


@pytest.mark.parametrize("code", ["not_stored_yet", "digest_mismatch"])
def test_what_is_not_stored_is_uploaded_again_but_not_for_ever(stage: Stage, code: str) -> None:
    stage.client.trouble["complete"] = [refusal(code)] * (required_outputs.COMPLETE_TRIES - 1)
    assert stage.run() is AttemptOutcome.COMPLETE

    stage.client.said.clear()
    stage.client.trouble["complete"] = [refusal(code)] * 1000
    assert stage.run() is AttemptOutcome.FAILED
    assert stage.last_report().failure_class is FailureClass.TRANSFER_FAILED
    assert "the outputs are still refused" in stage.last_report().message
    assert len(stage.client.trouble["complete"]) == 1000 - required_outputs.COMPLETE_TRIES


def test_an_upload_is_tried_until_the_store_is_back(stage: Stage) -> None:
    """A failed upload that was only logged, then reported as done: the original's clients lost models that way."""
    stage.uploads = [Unreachable("the store"), Unreachable("the store"), None]
    assert stage.run() is AttemptOutcome.COMPLETE
    stage.client.said.clear()
    stage.uploads = [TransferError("403 of a proxy")] * (required_outputs.COMPLETE_TRIES - 1)
    assert stage.run() is AttemptOutcome.COMPLETE, "hours of training are not given up for one refusal"
    stage.client.said.clear()
    stage.uploads = [TransferError("403")] * required_outputs.COMPLETE_TRIES
    assert stage.run() is AttemptOutcome.FAILED
    assert "complete" not in stage.client.kinds()
    assert stage.last_report().failure_class is FailureClass.TRANSFER_FAILED


@pytest.mark.parametrize("kind", ["complete", "fail", "release"])
@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("lease_lost", AttemptOutcome.LOST),
        ("job_finished", AttemptOutcome.LOST),
        ("job_canceled", AttemptOutcome.CANCELED),
    ],
)
def test_a_report_that_comes_too_late(stage: Stage, kind: str, code: str, outcome: AttemptOutcome) -> None:
    stage.client.trouble[kind] = [refusal(code)]
    if kind == "fail":
        stage.act = lambda trainer, _: trainer.ends(exited(1))
    if kind == "release":
        stage.stop.request("SIGTERM")
    assert stage.run() is outcome
    assert not {"complete", "fail", "release"} & set(stage.client.kinds())


@pytest.mark.parametrize("code", ["invalid_value", "key_revoked", "illegal_transition"])
def test_a_failure_that_is_refused_does_not_end_the_agent(stage: Stage, code: str) -> None:
    stage.act = lambda trainer, _: trainer.ends(exited(1))
    stage.client.trouble["fail"] = [refusal(code, 422)] * 3
    assert stage.run() is AttemptOutcome.LOST


def test_each_answer_to_a_heartbeat_tells_how_long_the_lease_lasts(stage: Stage) -> None:
    attempt = stage.make()
    stage.client.heart.answers = [Unreachable("down"), make_answer(lease_duration_s=77)]
    assert [attempt._keeper.beat(), attempt._keeper.beat()] == [False, True]
    assert stage.renewed == [77]


def test_a_revoked_key_is_a_lost_lease(stage: Stage) -> None:
    stage.client.trouble["inputs"] = [refusal("key_revoked", 403)]
    assert stage.run() is AttemptOutcome.LOST
    assert stage.client.said == []
