"""Test the retention of ended jobs: by the worker's last call, or by the sweeper an hour later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from baton.contract.jobs.job import FailureClass, JobState, Reason
from baton.contract.jobs.policy import Policy
from baton.contract.worker.calls import AGENT_CRASHED, FailRequest
from functions.domain.checkpoints.packs import (
    DEAD_AFTER_S,
    FUNCTION_TIMEOUT_S,
    SWEEPER_TIMEOUT_S,
    PackSnapshot,
    needs_verification,
    release_plan,
)
from functions.domain.checkpoints.packs import released_record as after
from functions.domain.checkpoints.retention import next_try_at, schedule_retention
from functions.domain.jobs import transitions as rules
from functions.domain.jobs.attempt_end import LATE_AFTER_S
from functions.domain.jobs.transaction import Transaction
from functions.domain.records import Attempt, Job
from functions.settings import ControlPlaneSettings
from tests.kits.api.factories import (
    JOB_ID,
    NOW,
    make_attempt,
    make_ended,
    make_fence,
    make_job,
    make_lease,
    make_pack,
    make_spec,
)

ONE_CHANCE = Policy(max_failures=1, max_interruptions=1, max_node_faults=1, max_runtime_s=100)
End = Callable[[Job, Attempt], Transaction]

BY_THE_WORKER: dict[str, End] = {
    "complete": lambda job, a: rules.complete(job, a, make_fence(), artifacts=[], progress=None, now=NOW),
    "fail": lambda job, a: rules.fail(job, a, make_fence(), FailRequest(job_id=JOB_ID), progress=None, now=NOW),
    "fail, the machine's fault": lambda job, a: rules.fail(
        job,
        a,
        make_fence(),
        FailRequest(job_id=JOB_ID, failure_class=next(one for one in FailureClass if one.node_fault)),
        progress=None,
        now=NOW,
    ),
}
OTHERWISE: dict[str, End] = {
    "stop": lambda job, a: rules.cancel(job, a, message="", now=NOW),
    "stop, the attempt's item is lost": lambda job, _: rules.cancel(job, None, message="", now=NOW),
    "out of time": lambda job, _: rules.out_of_time(job, make_attempt(started_at=NOW - 100), now=NOW),
    "lost": lambda job, a: rules.interrupt(job, a, make_lease(expires_at=NOW), now=NOW),
    "agent crashed": lambda job, a: rules.release(
        job, a, make_fence(), reason=Reason(code=AGENT_CRASHED), progress=None, now=NOW
    ),
}


def running(**fields: Any) -> Job:
    return make_job(state=JobState.RUNNING, epoch=1, started_at=NOW, spec=make_spec(policy=ONE_CHANCE), **fields)


@pytest.mark.parametrize("how", BY_THE_WORKER)
def test_who_ends_a_job_himself_leaves_nothing_to_the_sweeper(how: str) -> None:
    ended = BY_THE_WORKER[how](running(), make_attempt()).job
    assert ended.state.terminal and ended.retention_at is None


@pytest.mark.parametrize("how", OTHERWISE)
def test_every_other_end_is_looked_after_once_nothing_is_under_way(how: str) -> None:
    ended = OTHERWISE[how](running(), make_attempt()).job
    assert ended.state.terminal and ended.retention_at == NOW + LATE_AFTER_S
    assert ended.timer_at is None, "no timer waits behind it"


@pytest.mark.parametrize("state", [JobState.PENDING, JobState.PAUSED])
def test_a_job_that_never_ran_leaves_nothing_behind(state: JobState) -> None:
    assert rules.cancel(make_job(state=state), None, message="", now=NOW).job.retention_at is None
    ran = make_job(state=state, epoch=1)
    assert rules.cancel(ran, None, message="", now=NOW).job.retention_at == NOW + LATE_AFTER_S


@pytest.mark.parametrize("how", OTHERWISE)
def test_a_job_that_goes_on_is_not_looked_after(how: str) -> None:
    ended = OTHERWISE[how](running(), make_attempt()).job
    retried = rules.retry(ended, chosen=None, keep_checkpoint=True, reset_counters=True, now=NOW + 9).job
    assert (retried.state, retried.retention_at) == (JobState.PENDING, None)


def test_no_url_outlives_the_wait() -> None:
    with pytest.raises(ValidationError):
        ControlPlaneSettings(url_life_s=LATE_AFTER_S)
    assert ControlPlaneSettings(url_life_s=LATE_AFTER_S - 60).url_life_s == 3600


def test_what_fails_is_tried_more_and_more_seldom() -> None:
    job = make_ended(JobState.CANCELED, canceled_at=NOW)
    tries = [NOW + LATE_AFTER_S]
    for _ in range(10):
        tries.append(next_try_at(job, tries[-1]))
    assert [(at - NOW) / LATE_AFTER_S for at in tries] == [2**power for power in range(11)]


def test_word_changes_nothing_else() -> None:
    job = make_ended(JobState.FAILED)
    for at in (NOW + 5, None):
        change = schedule_retention(job, at)
        assert (change.job.rev, change.events) == (job.rev + 1, ())
        assert change.job == job.model_copy(update={"rev": job.rev + 1, "retention_at": at})


@pytest.mark.parametrize("lives_s", [FUNCTION_TIMEOUT_S, SWEEPER_TIMEOUT_S])
def test_nobody_takes_over_what_a_living_function_has_condemned(lives_s: int) -> None:
    """The sweeper may live longer than DEAD_AFTER_S."""
    pack = make_pack("a")
    (write,) = release_plan(JOB_ID, [PackSnapshot(pack, None)], NOW + lives_s)
    condemned = PackSnapshot(pack, after("acme", JOB_ID, write, None, "v1"))
    taken_over = next(at for at in range(NOW, NOW + 1000) if not refused(condemned, at))
    assert taken_over == NOW + lives_s + DEAD_AFTER_S - FUNCTION_TIMEOUT_S


def refused(sighting: PackSnapshot, now: int) -> bool:
    try:
        assert needs_verification("another job", sighting, now)
    except rules.Refusal:
        return True
    return False
