"""Fences: every call of a worker against every way to have lost the job."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from baton.contract.errors import ErrorCode
from baton.contract.worker.control import Directive
from functions.domain.jobs.lease_fence import REPROOF_WINDOW_S
from tests.kits.api.harness import NOW, Answer, Api, Held
from tests.kits.files.declared_files import described

FILE = described("model.bin", b"weights")
Write = Callable[[Held], Answer]

WRITES: dict[str, Write] = {
    "commit": lambda held: held.post(f"/job/{held.id}/checkpoints", held.manifest(200, {"a": b"b"})),
    "complete": lambda held: held.post("/complete", {"job_id": held.id}),
    "fail": lambda held: held.post("/fail", {"job_id": held.id}),
    "release": lambda held: held.post("/release", {"job_id": held.id}),
    "artifacts": lambda held: held.post(f"/job/{held.id}/artifacts", {"artifacts": [FILE]}),
    "logs": lambda held: held.post(f"/job/{held.id}/logs", {"first_line": 0, "lines": ["x"]}),
    "damaged": lambda held: held.post(f"/job/{held.id}/checkpoints/100/damaged", {"epoch": 1}),
    "inputs": lambda held: held.api.get(f"/job/{held.id}/inputs", headers=held.headers),
    "progress": lambda held: held.post(
        "/progress",
        {
            "job_id": held.id,
            "bucket_name": "training-checkpoints",
            "key": f"jobs/{held.id}/attempt-1/checkpoint-200.zip",
        },
    ),
}
EVERY_WRITE = pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())


@pytest.fixture
def held(api: Api) -> Held:
    """A held job with one checkpoint."""
    api.submit()
    held = api.claim()
    held.commit(100).ok()
    return held


def with_token(held: Held, token: str) -> Held:
    return Held(held.api, {**held.item, "lease_token": token})


@EVERY_WRITE
def test_the_bearer_is_admitted(held: Held, write: Write) -> None:
    answer = write(held)
    assert answer.status == 200 or answer.error["code"] == "not_stored_yet", answer.text


@EVERY_WRITE
def test_a_wrong_token(api: Api, held: Held, write: Write) -> None:
    with api.unchanged():
        write(with_token(held, "x" * 43)).refused(ErrorCode.LEASE_LOST, "x-lease-token")


@EVERY_WRITE
def test_the_token_of_another_job(api: Api, held: Held, write: Write) -> None:
    api.submit()
    other = api.claim()
    with api.unchanged():
        write(with_token(held, other.token)).refused(ErrorCode.LEASE_LOST, "x-lease-token")


@EVERY_WRITE
def test_a_missing_token(api: Api, held: Held, write: Write) -> None:
    class Tokenless(Held):
        headers = {}  # type: ignore[assignment]

        def post(self, target: str, body: object = None, *, token: str | None = "", key: str = "worker") -> Answer:
            return super().post(target, body, token=None, key=key)

    with api.unchanged():
        write(Tokenless(api, held.item)).refused(ErrorCode.LEASE_REQUIRED, "x-lease-token")


@EVERY_WRITE
def test_an_expired_lease_can_be_proved_again(api: Api, held: Held, write: Write) -> None:
    api.clock.advance(90)
    with api.unchanged():
        write(held).refused(ErrorCode.LEASE_EXPIRED, "x-lease-token")
    assert held.heartbeat().ok()["lease_expires_at"] == NOW + 180
    assert write(held).status == 200 or write(held).error["code"] == "not_stored_yet"


@EVERY_WRITE
def test_a_lease_that_was_reclaimed(api: Api, held: Held, write: Write) -> None:
    api.clock.advance(90)
    assert api.sweep().reclaimed == 1
    with api.unchanged():
        answer = write(held)
        assert answer.status == 409 and answer.error["code"] == "lease_expired", answer.text
    assert held.heartbeat().ok()["lease_expires_at"] == NOW + 180
    assert write(held).status == 200 or write(held).error["code"] == "not_stored_yet"
    assert api.attempts(held.id)[0]["epoch"] == 1 and len(api.attempts(held.id)) == 1


@EVERY_WRITE
def test_a_stale_epoch(api: Api, held: Held, write: Write) -> None:
    """A machine that slept while its job moved on can change nothing."""
    api.clock.advance(90)
    api.sweep()
    next_one = api.claim(machine_id="m-2")
    assert (next_one.id, next_one.epoch) == (held.id, 2)
    with api.unchanged():
        answer = write(held)
        assert answer.status == 409 and answer.error["code"] == "lease_lost", answer.text
        held.heartbeat(step=999).refused(ErrorCode.LEASE_LOST, "x-lease-token")
        with_token(next_one, held.token).heartbeat().refused(ErrorCode.LEASE_LOST, "x-lease-token")
    assert next_one.heartbeat().ok()["epoch"] == 2


@EVERY_WRITE
def test_a_canceled_job(api: Api, held: Held, write: Write) -> None:
    api.post(f"/job/{held.id}/stop").ok()
    with api.unchanged():
        write(held).refused(ErrorCode.JOB_CANCELED)
    assert api.job(held.id)["state"] == "canceled"


@EVERY_WRITE
def test_a_complete_job(api: Api, held: Held, write: Write) -> None:
    held.complete().ok()
    with api.unchanged():
        answer = write(held)
        if answer.status == 200:
            assert answer.json["state"] == "complete", "only complete may be repeated"
        else:
            assert answer.error["code"] in ("job_finished", "lease_lost"), answer.text


@pytest.mark.parametrize("late_s", [0, 90, 90 + REPROOF_WINDOW_S - 1])
def test_a_lease_that_nobody_reclaimed_can_be_proved_for_an_hour(api: Api, held: Held, late_s: int) -> None:
    """The control plane was down for many heartbeats: no other worker took the job, and the machine goes on."""
    api.clock.advance(late_s)
    answer = held.heartbeat(step=150).ok()
    assert answer["directive"] == "continue" and answer["lease_expires_at"] == NOW + late_s + 90
    held.commit(200).ok()
    assert api.job(held.id)["progress"]["step"] == 150 or api.job(held.id)["checkpoint_step"] == 200


def test_after_that_it_cannot(api: Api, held: Held) -> None:
    api.clock.advance(90 + REPROOF_WINDOW_S)
    with api.unchanged():
        held.heartbeat().refused(ErrorCode.LEASE_EXPIRED, "x-lease-token")


def test_a_heartbeat_without_its_token_is_no_heartbeat(api: Api, held: Held) -> None:
    with api.unchanged():
        held.post(f"/heartbeat/{held.id}", token=None).refused(ErrorCode.JOB_NOT_RUNNING)
        held.post(f"/heartbeat/{held.id}", token="x" * 43).refused(ErrorCode.LEASE_LOST, "x-lease-token")


def test_a_canceled_worker_learns_it_as_a_directive(api: Api, held: Held) -> None:
    api.post(f"/job/{held.id}/stop", {"message": "wrong prompt"}).ok()
    with api.unchanged():
        for _ in range(2):
            assert held.heartbeat().ok()["directive"] == Directive.CANCEL
        held.post(f"/heartbeat/{held.id}", token="x" * 43).refused(ErrorCode.LEASE_LOST, "x-lease-token")


def test_a_heartbeat_reports_progress_and_is_no_event(api: Api, held: Held) -> None:
    before = api.events(held.id)
    for step in (101, 102):
        held.heartbeat(step=step, total_steps=500, metrics={"loss": 0.5}, phase="training").ok()
    view = api.job(held.id)
    told = {"step": 102, "total_steps": 500, "metrics": {"loss": 0.5}, "nonfinite": {}, "reported_at": NOW}
    assert view["progress"] == {**told, "goodput": None}, "null, as every field of an answer that nobody has set"
    assert view["lease_expires_at"] == NOW + 90 and view["machine_id"] == "m-1"
    assert api.attempts(held.id)[0]["progress"]["step"] == 102
    held.heartbeat().ok()
    assert api.job(held.id)["progress"]["step"] == 102
    assert api.events(held.id) == before


def test_a_manifest_of_another_attempt_or_job_is_refused(api: Api, held: Held) -> None:
    other = api.submit()["id"]
    with api.unchanged():
        manifest = held.manifest(200, {"a": b"b"}, epoch=2)
        held.post(f"/job/{held.id}/checkpoints", manifest).refused(ErrorCode.LEASE_LOST, "epoch")
        manifest = held.manifest(200, {"a": b"b"}, job_id=other)
        held.post(f"/job/{held.id}/checkpoints", manifest).refused(ErrorCode.INVALID_VALUE, "job_id")


REPEATED: dict[str, Write] = {
    "commit": lambda held: held.post(f"/job/{held.id}/checkpoints", held.manifest(200, {"a": b"b"})),
    "complete": lambda held: held.complete(step=200),
    "fail": lambda held: held.fail(message="no"),
    "release": lambda held: held.release(),
    "logs": lambda held: held.post(f"/job/{held.id}/logs", {"first_line": 0, "lines": ["x"]}),
    "damaged": lambda held: held.post(f"/job/{held.id}/checkpoints/100/damaged", {"epoch": 1}),
    "artifacts": lambda held: held.post(f"/job/{held.id}/artifacts", {"artifacts": [FILE]}),
    "heartbeat": lambda held: held.heartbeat(step=150),
}


@pytest.mark.parametrize("write", REPEATED.values(), ids=REPEATED.keys())
def test_a_call_whose_answer_was_lost_can_be_repeated(api: Api, held: Held, write: Write) -> None:
    if write is REPEATED["commit"]:
        held.commit(200, {"a": b"b"}).ok()
    first = write(held).ok()
    with api.unchanged():
        for _ in range(2):
            # A heartbeat's answer, and its row, tell the time.
            api.clock.advance(0 if write is REPEATED["heartbeat"] else 5)
            assert write(held).ok() == first


@pytest.mark.parametrize(
    ("end", "code"),
    [("complete", ErrorCode.JOB_FINISHED), ("fail", ErrorCode.LEASE_EXPIRED), ("release", ErrorCode.LEASE_EXPIRED)],
)
def test_an_end_is_repeated_by_its_bearer_only(api: Api, held: Held, end: str, code: ErrorCode) -> None:
    held.post(f"/{end}", {"job_id": held.id}).ok()
    with api.unchanged():
        for token in ("x" * 43, None):
            held.post(f"/{end}", {"job_id": held.id}, token=token).refused(code)


def test_a_pause_whose_release_was_acknowledged_into_the_void(api: Api, held: Held) -> None:
    api.post(f"/job/{held.id}/pause").ok()
    for _ in range(2):
        assert held.release(reason="pause").ok()["state"] == "paused"
    assert api.events(held.id).count("job.paused") == 1
