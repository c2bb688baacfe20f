"""Goodput of attempts: reported with heartbeats and at the end, stored with the attempt."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kits.api.harness import Api, Held

GOODPUT = {"productive_s": 80.5, "repeated_s": 10.0, "idle_s": 4.0, "checkpoints_committed": 2, "uploaded_bytes": 4096}


def told(api: Api, job_id: str, epoch: int = 1) -> dict[str, Any] | None:
    attempts = api.get(f"/job/{job_id}/attempts").ok()["attempts"]
    progress = next(one for one in attempts if one["epoch"] == epoch)["progress"]
    goodput = progress and progress["goodput"]
    return goodput and {name: value for name, value in goodput.items() if value}


def running(api: Api) -> Held:
    api.submit()
    return api.claim()


def test_a_heartbeat_tells_it(api: Api) -> None:
    worker = running(api)
    worker.heartbeat(step=5, goodput=GOODPUT).ok()
    assert told(api, worker.id) == GOODPUT


@pytest.mark.parametrize("end", ["complete", "fail", "release"])
def test_the_last_word_tells_it_anew(api: Api, end: str) -> None:
    worker = running(api)
    worker.heartbeat(step=5, goodput={"idle_s": 1.0}).ok()
    getattr(worker, end)(goodput=GOODPUT).ok()
    assert told(api, worker.id) == GOODPUT


def test_a_machine_that_is_lost_has_told_until_its_last_heartbeat(api: Api) -> None:
    worker = running(api)
    worker.heartbeat(step=5, goodput=GOODPUT).ok()
    api.clock.advance(1000)
    api.sweep()
    assert told(api, worker.id) == GOODPUT


@pytest.mark.parametrize("end", ["fail", "release"])
def test_an_attempt_that_ended_before_its_first_report_is_as_far_as_its_job(api: Api, end: str) -> None:
    worker = running(api)
    worker.heartbeat(step=5, total_steps=9).ok()
    worker.release().ok()
    api.clock.advance(60)
    worker = api.claim()
    getattr(worker, end)(goodput={"idle_s": 3.0}).ok()
    assert told(api, worker.id, 2) == {"idle_s": 3.0}
    job = api.get(f"/job/{worker.id}").ok()
    assert (job["progress"]["step"], job["progress"]["total_steps"]) == (5, 9)


def test_a_job_that_never_reported_anything_has_no_progress(api: Api) -> None:
    worker = running(api)
    worker.release(goodput=GOODPUT).ok()
    assert told(api, worker.id) is None


def test_what_a_later_worker_tells_besides_costs_it_no_heartbeat(api: Api) -> None:
    worker = running(api)
    worker.heartbeat(step=5, goodput={"idle_s": 1.0, "invented_s": 2.0}).ok()
    assert told(api, worker.id) == {"idle_s": 1.0}


@pytest.mark.parametrize("wrong", [{"idle_s": -1}, {"productive_s": "NaN"}, {"raw_bytes": 1.5}])
def test_numbers_that_cannot_be(api: Api, wrong: dict[str, Any]) -> None:
    worker = running(api)
    assert worker.heartbeat(step=5, goodput=wrong).status in (400, 422)
    assert told(api, worker.id) is None
