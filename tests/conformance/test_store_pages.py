"""Pages and cursors: the same on every store."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from baton.contract.errors import ErrorCode
from baton.contract.jobs.job import JobState, Reason
from functions.domain.errors import Refusal
from functions.domain.jobs import transitions as rules
from functions.domain.ports import ResultPage
from functions.domain.records import Attempt, CheckpointRecord, Event, Job
from tests.conformance.store_kit import NOW, TENANT, claim, commit, submit
from tests.kits.clouds.paging import all_pages
from tests.kits.clouds.store_sets import Cloud


def with_history(cloud: Cloud) -> str:
    """A job with 7 attempts, 15 events or more and 7 checkpoints."""
    job = submit(cloud)
    for step in range(7):
        held = commit(cloud, claim(cloud, job, token=f"t{step}"), step * 10)
        change = rules.release(
            held.job, held.attempt, held.fence(), reason=Reason(code="sigterm"), progress=None, now=NOW
        )
        cloud.jobs.apply(change)
        job = change.job
    return job.id


def paged(read: Any, limit: int) -> list[Any]:
    """Read all items in pages of `limit`; each page but the last must be full."""
    return all_pages(lambda cursor: read(limit=limit, cursor=cursor), full=limit)


@pytest.mark.parametrize("limit", [1, 3, 7, 100])
def test_pages_of_history_join_to_the_whole(cloud: Cloud, limit: int) -> None:
    job_id = with_history(cloud)
    attempts = paged(lambda **page: cloud.jobs.history(Attempt, job_id, **page), limit)
    assert [attempt.epoch for attempt in attempts] == list(range(1, 8))
    assert [attempt.checkpoint_step for attempt in attempts] == [step * 10 for step in range(7)]
    events = paged(lambda **page: cloud.jobs.history(Event, job_id, **page), limit)
    assert [event.seq for event in events] == list(range(1, 23))
    steps = [r.step for r in paged(lambda **page: cloud.jobs.history(CheckpointRecord, job_id, **page), limit)]
    assert steps == [60, 50, 40, 30, 20, 10, 0]
    bounded = paged(lambda **page: cloud.jobs.history(CheckpointRecord, job_id, up_to=35, **page), limit)
    assert [r.step for r in bounded] == [30, 20, 10, 0]
    assert cloud.jobs.read(CheckpointRecord, job_id, 30) == bounded[0]


@pytest.mark.parametrize("limit", [1, 2, 5, 6])
def test_pages_of_jobs_join_to_the_whole(cloud: Cloud, limit: int) -> None:
    # Several of one second: the id decides among them.
    jobs = [submit(cloud, now=NOW + n // 2, priority=40 + n % 2) for n in range(5)]
    by_age = sorted(jobs, key=lambda job: (job.created_at, job.id))
    assert paged(lambda **page: cloud.jobs.list_jobs(TENANT, state=None, **page), limit) == by_age
    assert paged(lambda **page: cloud.jobs.list_jobs(TENANT, state=JobState.PENDING, **page), limit) == by_age
    newest: dict[str, Any] = {"newest_first": True}
    assert paged(lambda **page: cloud.jobs.list_jobs(TENANT, state=None, **newest, **page), limit) == by_age[::-1]
    pending = paged(lambda **page: cloud.jobs.list_jobs(TENANT, state=JobState.PENDING, **newest, **page), limit)
    assert pending == by_age[::-1]
    by_rank = sorted(jobs, key=lambda job: job.ready_rank)
    assert paged(lambda **page: cloud.jobs.ready(TENANT, "default", 0, **page), limit) == by_rank


def test_a_page_goes_on_behind_its_cursor_when_the_job_there_is_gone(cloud: Cloud) -> None:
    jobs = [submit(cloud, now=NOW + n) for n in range(4)]
    page = cloud.jobs.ready(TENANT, "default", 0, limit=2)
    for job in jobs[1:3]:
        claim(cloud, job)
    rest = cloud.jobs.ready(TENANT, "default", 0, limit=2, cursor=page.cursor)
    assert (list(rest.items), rest.cursor) == ([jobs[3]], None)


def test_a_job_that_has_left_a_state_meanwhile_is_not_listed_there(
    ministack: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index may be behind: what is listed by state is looked at once more."""
    jobs = [submit(ministack, now=NOW + n) for n in range(3)]
    read_jobs = ministack.jobs._read_jobs

    def behind(job_ids: Sequence[str], **more: bool) -> list[Job]:
        if ministack.jobs.get(jobs[1].id) == jobs[1]:
            ministack.jobs.apply(rules.pause(jobs[1], message="", now=NOW + 9))
        return read_jobs(job_ids, **more)

    monkeypatch.setattr(ministack.jobs, "_read_jobs", behind)
    listed = ministack.jobs.list_jobs(TENANT, state=JobState.PENDING, limit=10)
    assert [job.id for job in listed.items] == [jobs[0].id, jobs[2].id]


def forged(content: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(content).encode()).decode().rstrip("=")


DAMAGED_CURSORS = [
    "",
    "!",
    "\u00e9",
    "AAAA",
    "=====",
    forged(1),
    forged([]),
    forged([["jobs", TENANT, ""], [NOW]]),
    forged([["jobs", TENANT, ""], ["1", "a"]]),
    forged([["jobs", TENANT, ""], [True, "a"]]),
    forged([["jobs", TENANT, ""], [-1, "a"]]),
    forged([["jobs", TENANT, ""], [10**30, "a"]]),
    forged([["jobs", TENANT, ""], [1, ""]]),
    forged([["jobs", TENANT, ""], [1, "\ud800"]]),
    forged([["jobs", TENANT, ""], [1, "a" * 2000]]),
    forged([["jobs", "other", ""], [1, "a"]]),
    "[" * 1000,
    base64.urlsafe_b64encode(b"[" * 100_000).decode(),
]


def test_a_damaged_cursor_is_refused(cloud: Cloud) -> None:
    for cursor in DAMAGED_CURSORS:
        with pytest.raises(Refusal) as refused:
            cloud.jobs.list_jobs(TENANT, state=None, limit=2, cursor=cursor)
        assert (refused.value.code, refused.value.field) == (ErrorCode.INVALID_CURSOR, "cursor"), cursor


def test_a_cursor_of_another_list_is_refused(cloud: Cloud) -> None:
    job_id = with_history(cloud)
    for _ in range(2):
        submit(cloud)
    jobs = cloud.jobs
    lists: dict[str, Callable[[str | None], ResultPage[Any]]] = {
        "jobs": lambda cursor: jobs.list_jobs(TENANT, state=None, limit=1, cursor=cursor),
        "pending": lambda cursor: jobs.list_jobs(TENANT, state=JobState.PENDING, limit=1, cursor=cursor),
        "newest": lambda cursor: jobs.list_jobs(TENANT, state=None, limit=1, cursor=cursor, newest_first=True),
        "ready": lambda cursor: jobs.ready(TENANT, "default", 0, limit=1, cursor=cursor),
        "events": lambda cursor: jobs.history(Event, job_id, limit=1, cursor=cursor),
        "attempts": lambda cursor: jobs.history(Attempt, job_id, limit=1, cursor=cursor),
        "checkpoints": lambda cursor: jobs.history(CheckpointRecord, job_id, limit=1, cursor=cursor),
        "up to": lambda cursor: jobs.history(CheckpointRecord, job_id, limit=1, cursor=cursor, up_to=50),
    }
    cursors = {name: read(None).cursor for name, read in lists.items()}
    assert None not in cursors.values()
    for of, cursor in cursors.items():
        for name, read in lists.items():
            if name == of:
                assert len(read(cursor).items) == 1
            else:
                with pytest.raises(Refusal):
                    read(cursor)
    with pytest.raises(Refusal):
        jobs.list_jobs("other", state=None, limit=1, cursor=cursors["jobs"])
    with pytest.raises(Refusal):
        jobs.history(Event, submit(cloud).id, limit=1, cursor=cursors["events"])
