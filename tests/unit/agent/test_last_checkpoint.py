"""Test the goodput at the end of an attempt, and the time for a last checkpoint."""

from __future__ import annotations

import pytest

from gpu_client.agent.attempt.attempt_reporter import AttemptOutcome
from tests.unit.agent.job_kit import CLEAN, Stage, Trainer, checkpoint, exited


@pytest.mark.parametrize("end", ["complete", "fail", "release"])
def test_the_last_word_says_where_the_time_went(stage: Stage, end: str) -> None:
    """The last call of an attempt contains the goodput with the checkpoint that was committed after the training."""

    def act(trainer: Trainer, looks: int) -> None:
        if looks == 1:
            trainer.connect().report(3, 10, {})
            checkpoint(trainer, 3)
        if not stage.committed:
            return
        if end == "release":
            stage.stop.request("SIGTERM")
        trainer.ends(exited(1) if end != "complete" else CLEAN)

    stage.act = act
    stage.run()
    assert stage.client.kinds()[-1] == end
    goodput = stage.last_report().goodput
    assert goodput is not None
    assert (goodput.checkpoints_committed, goodput.raw_bytes, goodput.reused_bytes) == (1, 100, 40)
    assert (goodput.encoded_bytes, goodput.uploaded_bytes) == (50, 30)


class Noticed:
    """Trainer whose first checkpoint took `commit_s` to store, on a machine that then has 50 seconds left."""

    def __init__(self, stage: Stage, commit_s: float) -> None:
        stage.commit_s = commit_s
        stage.act = self.act
        self.stop = stage.stop
        self.run = stage.make()

    def act(self, trainer: Trainer, looks: int) -> None:
        if looks == 1:
            trainer.connect().report(3, 10, {})
            checkpoint(trainer, 3)
        if self.run._scheduler.goodput().checkpoints_committed and not self.stop.is_set():
            self.stop.announce("spot notice", 50.0)
        if trainer.directives:
            if trainer.directives[0].checkpoint:
                checkpoint(trainer, 4)
            trainer.ends(CLEAN)


def test_a_last_checkpoint_that_would_not_be_stored_in_time_is_not_asked_for_and_the_report_says_so(
    stage: Stage,
) -> None:
    assert Noticed(stage, 100.0).run.run() is AttemptOutcome.RELEASED
    assert [(wish.kind, wish.checkpoint) for wish in stage.trainer.directives] == [("stop", False)]
    request = stage.last_report()
    assert request.reason == "sigterm"
    assert request.message.startswith("spot notice; no last checkpoint: a checkpoint takes about 130 s, and ")
    assert request.message.endswith(" s are left")


def test_a_last_checkpoint_that_can_be_stored_in_time_is_asked_for(stage: Stage) -> None:
    assert Noticed(stage, 10.0).run.run() is AttemptOutcome.RELEASED
    assert [(wish.kind, wish.checkpoint) for wish in stage.trainer.directives] == [("stop", True)]
    assert stage.committed == [3, 4]
    assert stage.last_report().message == "spot notice"
