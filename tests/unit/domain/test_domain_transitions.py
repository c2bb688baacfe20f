"""Every pair of situation and command: where it leads, or the code it is refused with."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from baton.contract.errors import ErrorCode as E
from baton.contract.jobs.job import FailureClass, Reason, ReasonCode
from baton.contract.jobs.job import JobState as S
from baton.contract.worker.calls import FailRequest
from functions.domain.checkpoints import commit
from functions.domain.errors import Refusal
from functions.domain.jobs import transitions as rules
from functions.domain.jobs.transaction import Transaction
from functions.domain.records import Attempt, Job
from tests.kits.api.factories import (
    JOB_ID,
    NOW,
    make_attempt,
    make_ended,
    make_fence,
    make_job,
    make_lease,
    make_record,
    make_worker,
)

RUNNING = {"state": S.RUNNING, "epoch": 1, "started_at": NOW}

SITUATIONS: dict[str, Callable[[], Job]] = {
    "pending": make_job,
    "waiting": lambda: make_job(not_before=NOW + 60, epoch=1),
    "running": lambda: make_job(**RUNNING),
    "pausing": lambda: make_job(**RUNNING, pause_requested=True, reason=Reason(code="paused_by_user", message="later")),
    "paused": lambda: make_job(state=S.PAUSED, epoch=1, reason=Reason(code="paused_by_user")),
    "complete": lambda: make_ended(S.COMPLETE),
    "failed": lambda: make_ended(S.FAILED),
    "canceled": lambda: make_ended(S.CANCELED),
}

Command = Callable[[Job, Attempt | None], Transaction | None]

COMMANDS: dict[str, Command] = {
    "claim": lambda job, _: rules.claim(job, make_worker(), token_sha256="t", key_id="k", now=NOW),
    "complete": lambda job, a: rules.complete(job, _of(a), make_fence(), artifacts=[], progress=None, now=NOW),
    "fail": lambda job, a: rules.fail(job, _of(a), make_fence(), FailRequest(job_id=JOB_ID), progress=None, now=NOW),
    "release": lambda job, a: rules.release(
        job, _of(a), make_fence(), reason=Reason(code="sigterm"), progress=None, now=NOW
    ),
    "interrupt": lambda job, a: rules.interrupt(job, _of(a), make_lease(expires_at=NOW), now=NOW),
    "cancel": lambda job, a: rules.cancel(job, a, message="", now=NOW),
    "pause": lambda job, _: rules.pause(job, message="", now=NOW),
    "resume": lambda job, _: rules.resume(job, now=NOW),
    "retry": lambda job, _: rules.retry(job, chosen=None, keep_checkpoint=True, reset_counters=True, now=NOW),
    "timer": lambda job, a: rules.timer(job, a, now=NOW),
    "out_of_time": lambda job, a: rules.out_of_time(job, a, now=NOW),
    "commit": lambda job, _: commit.commit(job, make_fence(), make_record(), now=NOW),
    "damaged": lambda job, attempt: commit.mark_damaged(
        job, attempt, make_fence(), make_record(), None, message="", now=NOW
    ),
}

ENDED = {
    "complete": E.JOB_FINISHED,
    "fail": E.JOB_FINISHED,
    "release": E.JOB_FINISHED,
    "interrupt": E.JOB_FINISHED,
    "commit": E.JOB_FINISHED,
    "damaged": E.JOB_FINISHED,
    "claim": E.ILLEGAL_TRANSITION,
    "cancel": E.JOB_FINISHED,
    "pause": E.JOB_FINISHED,
    "resume": E.JOB_FINISHED,
    "out_of_time": E.JOB_FINISHED,
    "retry": S.PENDING,
    "timer": None,
}
UNHELD = dict.fromkeys(("complete", "fail", "release", "interrupt", "commit", "damaged"), E.LEASE_LOST) | {
    "retry": E.ILLEGAL_TRANSITION,
    "out_of_time": E.ILLEGAL_TRANSITION,
    "timer": None,
    "cancel": S.CANCELED,
}
HELD = {
    "claim": E.ILLEGAL_TRANSITION,
    "complete": S.COMPLETE,
    "cancel": S.CANCELED,
    "retry": E.ILLEGAL_TRANSITION,
    "out_of_time": E.ILLEGAL_TRANSITION,
    "timer": None,
    "commit": S.RUNNING,
    "damaged": S.RUNNING,
}

# A worker whose job waits may take its revoked attempt back: a heartbeat says so.
REVOCABLE = UNHELD | dict.fromkeys(("complete", "fail", "release", "interrupt", "commit", "damaged"), E.LEASE_EXPIRED)

OUTCOMES: dict[str, dict[str, S | E | None]] = {
    "pending": {**REVOCABLE, "claim": S.RUNNING, "pause": S.PAUSED, "resume": E.ILLEGAL_TRANSITION},
    "waiting": {**REVOCABLE, "claim": E.ILLEGAL_TRANSITION, "pause": S.PAUSED, "resume": E.ILLEGAL_TRANSITION},
    "paused": {**UNHELD, "claim": E.ILLEGAL_TRANSITION, "pause": E.ILLEGAL_TRANSITION, "resume": S.PENDING},
    "running": {
        **HELD,
        **dict.fromkeys(("fail", "release", "interrupt"), S.PENDING),
        "pause": S.RUNNING,
        "resume": E.ILLEGAL_TRANSITION,
    },
    "pausing": {
        **HELD,
        **dict.fromkeys(("fail", "release", "interrupt"), S.PAUSED),
        "pause": E.ILLEGAL_TRANSITION,
        "resume": S.RUNNING,
    },
    "complete": ENDED,
    "failed": ENDED,
    "canceled": ENDED
    | {n: E.JOB_CANCELED for n, to in ENDED.items() if to is E.JOB_FINISHED and n not in ("pause", "resume")},
}


def _of(attempt: Attempt | None) -> Attempt:
    return attempt or make_attempt(ended_at=NOW)


def test_the_table_is_complete() -> None:
    assert {name: set(row) for name, row in OUTCOMES.items()} == {name: set(COMMANDS) for name in SITUATIONS}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("situation", SITUATIONS)
def test_transition(situation: str, command: str) -> None:
    job = SITUATIONS[situation]()
    attempt = make_attempt() if job.state is S.RUNNING else None
    expected = OUTCOMES[situation][command]
    if isinstance(expected, E):
        with pytest.raises(Refusal) as caught:
            COMMANDS[command](job, attempt)
        assert caught.value.code is expected
        assert caught.value.message.endswith(expected.remedy)
        return
    change = COMMANDS[command](job, attempt)
    if expected is None:
        assert change is None
        return
    assert change is not None
    after = change.job
    assert after.state is expected
    # Every change is based on this rev, writes the next one, and numbers its events without a gap.
    assert after.rev == job.rev + 1
    assert after.updated_at == NOW
    assert [event.seq for event in change.events] == list(range(job.event_seq + 1, after.event_seq + 1))
    assert change.events
    assert after.epoch == job.epoch + (command == "claim")
    for reason in (after.reason, change.attempt.reason if change.attempt else None):
        assert reason is None or reason.code in {*ReasonCode, *FailureClass, "sigterm"}
    if after.state is not S.RUNNING:
        assert not after.pause_requested
    if job.state is S.RUNNING and after.state is not S.RUNNING:
        assert change.attempt is not None
        assert change.attempt.ended_at == NOW
        assert change.attempt.end is not None


@pytest.mark.parametrize(("state", "stamp"), [("canceled", "canceled_at"), ("complete", "completed_at")])
def test_instants_of_the_end(state: str, stamp: str) -> None:
    job = SITUATIONS["running"]()
    change = COMMANDS[{"canceled": "cancel", "complete": "complete"}[state]](job, make_attempt())
    assert change is not None
    stamps = {name: getattr(change.job, name) for name in ("canceled_at", "completed_at", "failed_at")}
    assert stamps == {**dict.fromkeys(stamps), stamp: NOW}


def test_a_terminal_job_needs_no_timer_and_is_not_claimable() -> None:
    for situation in ("complete", "failed", "canceled"):
        job = SITUATIONS[situation]()
        assert job.timer_at is None
        assert not job.claimable


def test_only_pending_jobs_that_wait_for_nothing_are_claimable() -> None:
    assert [name for name, make in SITUATIONS.items() if make().claimable] == ["pending"]
