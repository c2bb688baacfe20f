"""Cancel, pause, resume and retry, in every state."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from baton.contract.errors import ErrorCode
from tests.kits.api.harness import NOW, Api, Held


def pending(api: Api) -> str:
    return str(api.submit()["id"])


def waiting(api: Api) -> str:
    api.submit(policy={"backoff_s": 100})
    held = api.claim()
    held.fail().ok()
    return held.id


def running(api: Api) -> str:
    api.submit()
    return api.claim().id


def pausing(api: Api) -> str:
    job_id = running(api)
    api.post(f"/job/{job_id}/pause").ok()
    return job_id


def paused(api: Api) -> str:
    job_id = pending(api)
    api.post(f"/job/{job_id}/pause").ok()
    return job_id


def complete(api: Api) -> str:
    api.submit()
    held = api.claim()
    held.complete().ok()
    return held.id


def failed(api: Api) -> str:
    api.submit(policy={"max_failures": 1})
    held = api.claim()
    held.fail().ok()
    return held.id


def canceled(api: Api) -> str:
    job_id = pending(api)
    api.post(f"/job/{job_id}/stop").ok()
    return job_id


OUTCOMES: list[tuple[Callable[[Api], str], str, str | ErrorCode]] = [
    (pending, "stop", "canceled"),
    (waiting, "stop", "canceled"),
    (running, "stop", "canceled"),
    (pausing, "stop", "canceled"),
    (paused, "stop", "canceled"),
    (complete, "stop", ErrorCode.JOB_FINISHED),
    (failed, "stop", ErrorCode.JOB_FINISHED),
    (canceled, "stop", ErrorCode.JOB_CANCELED),
    (pending, "pause", "paused"),
    (waiting, "pause", "paused"),
    (running, "pause", "running"),
    (pausing, "pause", ErrorCode.ILLEGAL_TRANSITION),
    (paused, "pause", ErrorCode.ILLEGAL_TRANSITION),
    (complete, "pause", ErrorCode.JOB_FINISHED),
    (failed, "pause", ErrorCode.JOB_FINISHED),
    (canceled, "pause", ErrorCode.JOB_FINISHED),
    (pending, "resume", ErrorCode.ILLEGAL_TRANSITION),
    (waiting, "resume", ErrorCode.ILLEGAL_TRANSITION),
    (running, "resume", ErrorCode.ILLEGAL_TRANSITION),
    (pausing, "resume", "running"),
    (paused, "resume", "pending"),
    (complete, "resume", ErrorCode.JOB_FINISHED),
    (failed, "resume", ErrorCode.JOB_FINISHED),
    (canceled, "resume", ErrorCode.JOB_FINISHED),
    (pending, "retry", ErrorCode.ILLEGAL_TRANSITION),
    (waiting, "retry", ErrorCode.ILLEGAL_TRANSITION),
    (running, "retry", ErrorCode.ILLEGAL_TRANSITION),
    (pausing, "retry", ErrorCode.ILLEGAL_TRANSITION),
    (paused, "retry", ErrorCode.ILLEGAL_TRANSITION),
    (complete, "retry", "pending"),
    (failed, "retry", "pending"),
    (canceled, "retry", "pending"),
]


@pytest.mark.parametrize(
    ("state", "command", "outcome"), OUTCOMES, ids=[f"{command} {state.__name__}" for state, command, _ in OUTCOMES]
)
def test_every_command_in_every_state(
    api: Api, state: Callable[[Api], str], command: str, outcome: str | ErrorCode
) -> None:
    job_id = state(api)
    if isinstance(outcome, ErrorCode):
        with api.unchanged():
            api.post(f"/job/{job_id}/{command}").refused(outcome)
        return
    assert api.post(f"/job/{job_id}/{command}").ok()["state"] == outcome
    view = api.job(job_id)
    assert view["state"] == view["status"] == outcome
    if outcome == "canceled":
        assert view["canceled_at"] == NOW and view["reason"]["code"] == "canceled_by_user"
    if outcome in ("canceled", "paused"):
        api.clock.advance(10_000)
        api.no_work()


def test_a_canceled_job_stops_its_worker_at_the_next_heartbeat(api: Api) -> None:
    """A canceled job's worker gets the order at its next heartbeat, and every write of the worker is refused."""
    api.submit()
    held = api.claim()
    manifest = held.manifest(100, {"a": b"a"})
    (missing,) = held.post(f"/job/{held.id}/checkpoints", manifest).ok()["missing"]
    api.post(f"/job/{held.id}/stop", {"message": "wrong prompt"}).ok()
    answer = held.heartbeat().ok()
    assert answer["directive"] == "cancel"
    assert api.send("PUT", missing["url"], missing["headers"], b"a").status == 200
    held.post(f"/job/{held.id}/checkpoints", manifest).refused(ErrorCode.JOB_CANCELED)
    held.complete().refused(ErrorCode.JOB_CANCELED)
    view = api.job(held.id)
    assert view["state"] == "canceled" and view["reason"] == {"code": "canceled_by_user", "message": "wrong prompt"}
    assert view["checkpoint_step"] is None
    assert api.attempts(held.id)[0]["end"] == "canceled"
    assert api.events(held.id)[-1] == "job.canceled"


def test_a_running_job_pauses_behind_its_checkpoint(api: Api) -> None:
    api.submit()
    held = api.claim()
    api.post(f"/job/{held.id}/pause", {"message": "lunch"}).ok()
    assert held.heartbeat().ok()["directive"] == "pause"
    held.commit(120).ok()
    assert held.release(reason="pause").ok()["state"] == "paused"
    view = api.job(held.id)
    assert view["state"] == "paused" and view["reason"] == {"code": "paused_by_user", "message": "lunch"}
    api.no_work()
    api.post(f"/job/{held.id}/resume").ok()
    assert [ref["step"] for ref in api.claim().item["resume"]] == [120]
    assert api.events(held.id)[2:] == [
        "job.pause_requested",
        "checkpoint.committed",
        "attempt.released",
        "job.paused",
        "job.resumed",
        "job.started",
    ]


def test_a_withdrawn_pause(api: Api) -> None:
    api.submit()
    held = api.claim()
    api.post(f"/job/{held.id}/pause").ok()
    api.post(f"/job/{held.id}/resume").ok()
    assert held.heartbeat().ok()["directive"] == "continue"
    assert held.release().ok()["state"] == "pending"


@pytest.mark.parametrize("ending", ["fails", "is lost", "completes"])
def test_a_pause_outlives_an_attempt_that_does_not_hear_of_it(api: Api, ending: str) -> None:
    api.submit()
    held = api.claim()
    api.post(f"/job/{held.id}/pause").ok()
    if ending == "fails":
        held.fail().ok()
    elif ending == "completes":
        held.complete().ok()
    else:
        api.clock.advance(90)
        assert api.sweep().reclaimed == 1
    assert api.job(held.id)["state"] == ("complete" if ending == "completes" else "paused")
    api.clock.advance(10_000)
    api.no_work()


def finished(api: Api, *steps: int) -> Held:
    """A complete job with checkpoints."""
    api.submit()
    held = api.claim()
    for step in steps:
        held.commit(step).ok()
    held.complete({"model": b"x"}).ok()
    return held


@pytest.mark.parametrize(
    ("body", "resumed"), [({}, [300, 200, 100]), ({"from_step": 200}, [200, 100]), ({"from_step": 0}, [])]
)
def test_a_retry_keeps_the_id_and_begins_where_it_is_told(api: Api, body: dict[str, int], resumed: list[int]) -> None:
    held = finished(api, 100, 200, 300)
    api.post(f"/job/{held.id}/retry", body).ok()
    view = api.job(held.id)
    assert view["artifacts"] == [] and view["completed_at"] is None
    assert view["counters"]["attempts"] == 1 and view["counters"]["failures"] == 0
    second = api.claim()
    assert (second.id, second.epoch) == (held.id, 2)
    assert [ref["step"] for ref in second.item["resume"]] == resumed
    second.commit(resumed[0] + 50 if resumed else 50).ok()
    held.heartbeat().refused(ErrorCode.LEASE_LOST, "x-lease-token")


def test_a_retry_from_what_is_not_there(api: Api) -> None:
    held = finished(api, 100, 200)
    with api.unchanged():
        api.post(f"/job/{held.id}/retry", {"from_step": 150}).refused(ErrorCode.CHECKPOINT_NOT_FOUND, "from_step")
        api.post(f"/job/{held.id}/retry", {"from_step": -1}).refused(ErrorCode.INVALID_VALUE, "from_step")
    api.post(f"/job/{held.id}/retry").ok()
    second = api.claim()
    second.post(f"/job/{held.id}/checkpoints/200/damaged", {"epoch": 1}).ok()
    second.complete().ok()
    with api.unchanged():
        api.post(f"/job/{held.id}/retry", {"from_step": 200}).refused(ErrorCode.CHECKPOINT_NOT_FOUND, "from_step")


def test_a_retry_that_keeps_used_up_budgets_is_refused(api: Api) -> None:
    job_id = failed(api)
    with api.unchanged():
        api.post(f"/job/{job_id}/retry", {"reset_counters": False}).refused(ErrorCode.ILLEGAL_TRANSITION)
    api.post(f"/job/{job_id}/retry").ok()
    assert api.claim(machine_id="m-2").epoch == 2
