"""Repeated retries from chosen checkpoints: the history of a run, and the checkpoints a run must not resume from."""

from __future__ import annotations

from typing import Any

import pytest

from functions.domain.records import CheckpointRecord
from tests.kits.api.harness import Api, Held


def resumed(held: Held) -> list[int]:
    """The steps that a claim offers to resume from, best first."""
    return [ref["step"] for ref in held.item["resume"]]


def stop(api: Api, job_id: str) -> None:
    api.post(f"/job/{job_id}/stop").ok()


def retry(api: Api, job_id: str, from_step: int) -> None:
    """Retry the job from a checkpoint; 0 means from nothing."""
    api.post(f"/job/{job_id}/retry", {"from_step": from_step}).ok()


def two_branches(api: Api, second_from: int) -> str:
    """An ended job of two branches: 100 and 150, and from `second_from` on 200. Somebody reads 150, so it stays."""
    job_id: str = api.submit(policy={"retention": {"keep_last": 5}})["id"]
    first = api.claim()
    first.commit(100).ok()
    first.commit(150).ok()
    api.post(f"/job/{job_id}/checkpoints/150/urls", key="submit").ok()
    stop(api, job_id)
    retry(api, job_id, second_from)
    second = api.claim()
    second.commit(200).ok()
    stop(api, job_id)
    return job_id


FROM = [(100, [100]), (0, [])]
"""Step at which the second branch begins, and the checkpoints that 200 then continues."""


@pytest.mark.parametrize(("second_from", "behind"), FROM)
def test_back_on_a_branch_that_was_left_behind(api: Api, second_from: int, behind: list[int]) -> None:
    """A retry from 150 and then from 200 adds 150 neither to the history of 200 nor to its fallbacks."""
    job_id = two_branches(api, second_from)
    retry(api, job_id, 150)
    stop(api, job_id)
    retry(api, job_id, 200)
    held = api.claim()
    assert resumed(held) == [200, *behind]
    held.post(f"/job/{job_id}/checkpoints/200/damaged", {"epoch": 2}).ok()
    assert api.job(job_id)["checkpoint_step"] == (behind[0] if behind else None)
    held.commit(170).ok()
    held.release().ok()
    assert resumed(api.claim()) == [170, *behind]
    assert 150 in api.checkpoints(job_id), "somebody reads it"


@pytest.mark.parametrize(("second_from", "behind"), FROM)
def test_retention_lets_go_of_the_other_branch(api: Api, second_from: int, behind: list[int]) -> None:
    job_id = two_branches(api, second_from)
    retry(api, job_id, 150)
    stop(api, job_id)
    retry(api, job_id, 200)
    api.clock.advance(api.context.settings.read_protection_s)
    api.claim().commit(300).ok()
    assert sorted(api.checkpoints(job_id)) == [*behind, 200, 300]


def test_each_branch_has_its_own_history_however_often_they_change(api: Api) -> None:
    job_id = two_branches(api, 100)
    for _ in range(3):
        retry(api, job_id, 150)
        held = api.claim()
        assert resumed(held) == [150, 100]
        stop(api, job_id)
        retry(api, job_id, 200)
        held = api.claim()
        assert resumed(held) == [200, 100]
        stop(api, job_id)


def test_a_retry_goes_on_from_what_is_there_when_it_is_written(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at the checkpoint and the write another retry leads to another checkpoint of the same step."""
    job_id: str = api.submit(policy={"retention": {"keep_last": 5}})["id"]
    first = api.claim()
    first.commit(100).ok()
    first.commit(200).ok()
    stop(api, job_id)
    retry(api, job_id, 100)
    stop(api, job_id)
    protect = api.context.jobs.protect_checkpoint
    overtaken: list[CheckpointRecord | None] = []

    def overtaking(*seen: Any) -> CheckpointRecord | None:
        record = protect(*seen)
        if not overtaken:
            overtaken.append(record)
            retry(api, job_id, 0)
            api.claim().commit(200).ok()
            stop(api, job_id)
        return record

    with monkeypatch.context() as patched:
        patched.setattr(api.context.jobs, "protect_checkpoint", overtaking)
        retry(api, job_id, 200)
    assert overtaken, "nobody came in between"
    held = api.claim()
    assert [(ref["step"], ref["epoch"]) for ref in held.item["resume"]] == [(200, 2)]
