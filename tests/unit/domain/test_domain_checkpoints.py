"""Committing checkpoints, damaged ones, and which of them stay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from baton.contract.errors import ErrorCode
from baton.contract.jobs.history import EventType
from baton.contract.jobs.job import JobState, Reason
from baton.contract.jobs.policy import Retention
from baton.contract.worker.calls import WorkQuery
from functions.domain.checkpoints import commit as rules
from functions.domain.checkpoints import object_keys
from functions.domain.checkpoints.retention import surplus
from functions.domain.errors import Refusal
from functions.domain.jobs.transaction import CheckLease
from functions.domain.jobs.transitions import claim, complete, release
from functions.domain.records import CheckpointRecord, Job
from tests.kits.api.factories import (
    JOB_ID,
    NOW,
    Held,
    digest,
    make_ended,
    make_held,
    make_job,
    make_manifest,
    make_record,
)

SAME = digest("100-1")


def held(**fields: Any) -> Held:
    return make_held(make_job(**fields))


@contextmanager
def refused(code: ErrorCode, field: str | None = None) -> Iterator[None]:
    with pytest.raises(Refusal) as caught:
        yield
    assert (caught.value.code, caught.value.field) == (code, field)


def test_a_commit_moves_the_place_to_resume_from() -> None:
    h = held(checkpoint_step=50, checkpoint_epoch=0, fruitless_interruptions=2)
    record = make_record(100, metrics={"loss": 0.4})
    change = rules.commit(h.job, h.fence, record, now=NOW + 5)
    assert (change.job.checkpoint_step, change.job.checkpoint_epoch) == (100, 1)
    assert change.job.state is JobState.RUNNING
    assert change.records(CheckpointRecord) == (record,)
    # The attempt's item is written when it ends.
    assert (change.attempt, change.job.attempt_step) == (None, 100)
    # The lease is proved at the very moment of writing, or was behind the job.
    assert change.lease == CheckLease(fence=h.fence)
    assert rules.commit(h.job, None, record, now=NOW + 5).lease is None
    assert [event.type for event in change.events] == [EventType.CHECKPOINT_COMMITTED]


@pytest.mark.parametrize("step", [0, 99, 100])
def test_steps_only_rise(step: int) -> None:
    h = held(checkpoint_step=100, checkpoint_epoch=0)
    with refused(ErrorCode.STEP_NOT_NEWER, "step"):
        rules.commit(h.job, h.fence, make_record(step), now=NOW)
    with refused(ErrorCode.STEP_NOT_NEWER, "step"):
        rules.is_committed(h.job, None, make_manifest(step), "d")


def test_step_zero_is_a_checkpoint_like_any_other() -> None:
    h = held()
    assert rules.commit(h.job, h.fence, make_record(0), now=NOW).job.checkpoint_step == 0


def test_a_record_of_another_attempt_is_not_committed() -> None:
    """The job changed hands between the look at storage and the write."""
    h = held(epoch=3)
    for epoch in (3, 5):
        with refused(ErrorCode.LEASE_LOST, "epoch"):
            rules.commit(h.job, h.fence, make_record(epoch=epoch), now=NOW)


def test_the_same_commit_twice_is_one() -> None:
    job = held(checkpoint_step=None).job.model_copy(update={"checkpoint_step": 100, "checkpoint_epoch": 1})
    assert rules.is_committed(job, make_record(100), make_manifest(100), SAME)
    # Also when a later one was committed meanwhile.
    later = job.model_copy(update={"checkpoint_step": 300})
    assert rules.is_committed(later, make_record(100), make_manifest(100), SAME)


def test_a_new_step_is_not_committed_yet() -> None:
    job = held().job
    assert not rules.is_committed(job, None, make_manifest(100), SAME)


def test_other_contents_for_a_committed_step_are_refused() -> None:
    job = held().job.model_copy(update={"checkpoint_step": 100, "checkpoint_epoch": 1})
    with refused(ErrorCode.CHECKPOINT_CONFLICT, "step"):
        rules.is_committed(job, make_record(100), make_manifest(100), digest("other"))


def test_a_step_of_an_earlier_attempt_can_be_committed_anew_after_a_retry_from_before_it() -> None:
    job = held(checkpoint_step=50, checkpoint_epoch=1, epoch=1).job
    assert not rules.is_committed(job, make_record(100, epoch=1), make_manifest(100, epoch=2), "new")


def test_a_damaged_step_can_be_committed_anew() -> None:
    job = held(checkpoint_step=50).job
    assert not rules.is_committed(job, make_record(100, damaged=True), make_manifest(100), SAME)


@pytest.mark.parametrize("epoch", [0, 2])
def test_a_manifest_of_another_attempt(epoch: int) -> None:
    with refused(ErrorCode.LEASE_LOST, "epoch"):
        rules.is_committed(held().job, None, make_manifest(100, epoch=epoch), SAME)


def test_a_manifest_of_another_job() -> None:
    manifest = make_manifest(100, job_id=JOB_ID.replace("1", "2"))
    with refused(ErrorCode.INVALID_VALUE, "job_id"):
        rules.is_committed(held().job, None, manifest, SAME)


def committed(*steps: int, epoch: int = 1, **fields: Any) -> list[CheckpointRecord]:
    return [make_record(step, epoch, **fields) for step in steps]


def running(step: int) -> Held:
    return held(checkpoint_step=step, checkpoint_epoch=1, epoch=1)


def test_a_damaged_checkpoint_gives_way_to_the_one_before_it() -> None:
    h = running(300)
    last, before = make_record(300), make_record(200)
    change = rules.mark_damaged(h.job, h.attempt, h.fence, last, before, message="bad bytes", now=NOW)
    assert (change.job.checkpoint_step, change.job.checkpoint_epoch) == (200, 1)
    assert change.records(CheckpointRecord) == (last.model_copy(update={"damaged": True}),)
    assert change.lease == CheckLease(fence=h.fence)
    assert change.events[0].data == {"step": 300, "fallback_step": 200, "message": "bad bytes"}
    # From there steps go on, those of the damaged one included.
    again = rules.commit(change.job, h.fence, make_record(250, epoch=2), now=NOW)
    assert again.job.checkpoint_step == 250


def test_the_last_one_damaged_means_from_the_start() -> None:
    h = running(300)
    job = rules.mark_damaged(h.job, h.attempt, h.fence, make_record(300), None, message="", now=NOW).job
    assert (job.checkpoint_step, job.checkpoint_epoch) == (None, None)


@pytest.mark.parametrize("record", [make_record(200), make_record(300, epoch=0), make_record(400)])
def test_damage_to_another_one_changes_nothing_for_the_job(record: CheckpointRecord) -> None:
    h = running(300)
    change = rules.mark_damaged(h.job, h.attempt, h.fence, record, make_record(100), message="", now=NOW)
    assert change.job.checkpoint_step == 300
    assert change.records(CheckpointRecord)[0].damaged


def test_resumable_are_the_sound_ones_of_the_history_newest_first() -> None:
    job = running(300).job
    records = [make_record(100), make_record(400), make_record(300), make_record(200, damaged=True), make_record(50)]
    assert [record.step for record in rules.resumable(job, records)] == [300, 100, 50]
    assert rules.resumable(make_job(), records) == []


def test_keys_carry_what_keeps_attempts_apart() -> None:
    job, name = make_job(epoch=2, rev=9), digest("manifest")
    assert object_keys.manifest_key(job, 100, 2, name) == f"jobs/{JOB_ID}/manifests/100-2-{name}.json"
    assert object_keys.artifact_key(JOB_ID, 2, "a/b") == f"jobs/{JOB_ID}/artifacts/2/a/b"
    assert object_keys.pack_key("ff") == "packs/ff"


def test_what_a_damaged_one_was_called_no_other_is_ever_called() -> None:
    """An attempt that goes back behind its commits may write a manifest again while retention deletes the first."""
    h, name = held(), digest("manifest")
    job = h.job
    for step in (10, 20):
        job = rules.commit(job, h.fence, make_record(step), now=NOW).job
    job = rules.mark_damaged(job, h.attempt, h.fence, make_record(20), make_record(10), message="", now=NOW).job
    assert (job.checkpoint_step, job.attempt_step, job.lapsed_step) == (10, 10, 20)
    named = [object_keys.manifest_key(job, step, job.epoch, name) for step in (15, 20, 21)]
    assert [key.rpartition("/")[2] for key in named] == [
        f"15-1-{job.rev}-{name}.json",
        f"20-1-{job.rev}-{name}.json",
        f"21-1-{name}.json",
    ]
    job = rules.commit(job, h.fence, make_record(15), now=NOW).job
    assert f"20-1-{job.rev}-" in object_keys.manifest_key(job, 20, job.epoch, name), (
        "also once something else has been committed"
    )
    job = rules.mark_damaged(job, h.attempt, h.fence, make_record(15), None, message="", now=NOW).job
    assert (job.checkpoint_step, job.attempt_step, job.lapsed_step) == (None, 20, 20)


def test_the_next_attempt_begins_with_nothing_committed() -> None:
    h = held()
    job = rules.commit(h.job, h.fence, make_record(10), now=NOW).job
    job = rules.mark_damaged(job, h.attempt, h.fence, make_record(10), None, message="", now=NOW).job
    change = release(job, h.attempt, h.fence, reason=Reason(code="x"), progress=None, now=NOW)
    assert change.attempt is not None and change.attempt.checkpoint_step == 10
    job = claim(change.job, WorkQuery(), token_sha256="0" * 64, key_id=None, now=NOW).job
    assert (job.attempt_step, job.lapsed_step) == (None, None)


def test_the_end_of_an_attempt_says_what_it_had_committed() -> None:
    h = held(checkpoint_step=50, checkpoint_epoch=0)
    ended = complete(h.job, h.attempt, h.fence, artifacts=[], progress=None, now=NOW)
    assert ended.attempt is not None and ended.attempt.checkpoint_step is None, "that was an earlier one"
    job = rules.commit(h.job, h.fence, make_record(100), now=NOW).job
    ended = complete(job, h.attempt, h.fence, artifacts=[], progress=None, now=NOW)
    assert ended.attempt is not None and ended.attempt.checkpoint_step == 100
    earlier = h.attempt.model_copy(update={"checkpoint_step": 30})
    ended = complete(h.job, earlier, h.fence, artifacts=[], progress=None, now=NOW)
    assert ended.attempt is not None and ended.attempt.checkpoint_step == 30, "written by an earlier version"


def test_what_the_key_of_a_manifest_says() -> None:
    name = digest("manifest")
    below = f"jobs/{JOB_ID}/manifests/"
    assert object_keys.parse_manifest_key(JOB_ID, f"{below}100-2-{name}.json") == (100, 2)
    assert object_keys.parse_manifest_key(JOB_ID, f"{below}100-2-9-{name}.json") == (100, 2)
    for other in (
        f"{below}100-2.json",
        f"{below}x-2-{name}.json",
        f"{below}100-2-{name}",
        f"jobs/x/manifests/1-2-{name}.json",
    ):
        assert object_keys.parse_manifest_key(JOB_ID, other) is None


@pytest.mark.parametrize(
    ("step", "epoch", "over"),
    [(100, 2, True), (99, 2, True), (101, 2, False), (10**9, 1, True), (1, 3, False)],
)
def test_of_which_manifests_nothing_can_become_a_checkpoint_any_more(step: int, epoch: int, over: bool) -> None:
    job = make_job(state=JobState.RUNNING, epoch=2, checkpoint_step=100, checkpoint_epoch=1)
    assert rules.past(job, step, epoch) == over
    assert rules.past(make_ended(JobState.COMPLETE, epoch=2), step, epoch)
    assert rules.past(make_job(state=JobState.RUNNING, epoch=2), step, epoch) == (epoch < 2)


def let_go(records: list[CheckpointRecord], current: int | None, **policy: Any) -> list[int]:
    going = surplus(records, Retention(**policy), current_step=current)
    return sorted(record.step for record in going)


TEN = committed(*range(100, 1001, 100))


@pytest.mark.parametrize(
    ("current", "policy", "kept"),
    [
        (1000, {"keep_last": 1}, {1000}),
        (1000, {"keep_last": 3}, {800, 900, 1000}),
        (1000, {"keep_last": 1, "keep_every_steps": 300}, {300, 600, 900, 1000}),
        (1000, {"keep_last": 100}, set(range(100, 1001, 100))),
        # After a retry or damage the current one is an older one: what lies above it counts for nothing.
        (500, {"keep_last": 2}, {400, 500}),
        (100, {"keep_last": 1}, {100}),
    ],
)
def test_what_stays(current: int, policy: dict[str, int], kept: set[int]) -> None:
    assert set(let_go(TEN, current, **policy)) == {record.step for record in TEN} - kept


@pytest.mark.parametrize(("mode", "best"), [("min", 100), ("max", 300)])
def test_the_best_by_metric_stays(mode: str, best: int) -> None:
    records = [
        make_record(100, metrics={"loss": -1.0}),
        make_record(200),
        make_record(300, metrics={"loss": 9.0}),
        make_record(400, metrics={"accuracy": 1.0}),
        make_record(500, metrics={"loss": 0.0}),
    ]
    going = let_go(records, 500, keep_last=1, keep_best_metric="loss", keep_best_mode=mode)
    assert going == sorted({100, 200, 300, 400} - {best})


def test_a_metric_that_nobody_reported_keeps_nothing() -> None:
    assert let_go(TEN, 1000, keep_last=1, keep_best_metric="loss") == list(range(100, 1000, 100))


def test_pinned_ones_stay_whatever_the_rest() -> None:
    records = [
        make_record(100, pinned=True),
        make_record(300),
        make_record(400, damaged=True, pinned=True),
        make_record(600),
    ]
    assert let_go(records, 600, keep_last=1) == [300]


def test_damaged_ones_go_and_do_not_count() -> None:
    records = [*committed(100, 200, 300), *committed(400, 500, damaged=True), *committed(600)]
    assert let_go(records, 600, keep_last=3) == [100, 400, 500]


def test_the_current_one_is_always_kept() -> None:
    """Retention keeps the current checkpoint even if it is damaged, and goes by step, not by order of upload."""
    records = [*committed(300), *committed(100), *committed(200)]
    assert let_go(records, 100, keep_last=1) == [200, 300]
    assert 100 not in let_go(committed(100, damaged=True), 100, keep_last=1)


def test_without_a_current_one_the_newest_are_kept() -> None:
    assert let_go(TEN, None, keep_last=2) == list(range(100, 900, 100))


def test_what_a_retry_left_behind_goes_though_the_new_run_has_passed_it() -> None:
    """Retention removes checkpoints that a retry left behind: 300 of the old run would displace 100 of the new one."""
    job = make_job(
        epoch=2,
        checkpoint_step=350,
        checkpoint_epoch=2,
        branches=[{"step": 100, "epoch": 1, "before": 2}],
    )
    assert isinstance(job, Job)
    records = [*committed(100, 200, 300), make_record(350, 2)]
    policy = Retention(keep_last=3, keep_every_steps=100)
    going = surplus(records, policy, current_step=350, in_history=job.in_history)
    assert [record.step for record in going] == [200, 300]
    assert [record.step for record in rules.resumable(job, records)] == [350, 100]
