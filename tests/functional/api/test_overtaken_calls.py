"""Calls overtaken by other calls, unreadable items, limits of time: each case lost data once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from blake3 import blake3

from baton.contract.errors import ErrorCode
from baton.contract.jobs.job import JobState
from baton.contract.names import CHECKPOINTS_BUCKET
from baton.contract.worker.lease_grace import revocation_grace_s
from functions.domain.checkpoints.packs import DEAD_AFTER_S
from functions.domain.errors import Refusal, StorageUnavailable, WriteConflict
from functions.domain.jobs.transaction import Transaction
from functions.domain.records import CheckpointRecord
from functions.storage import cursors
from tests.kits.api.harness import TENANT, Answer, Api, Held


def once(before: Callable[[], None], method: Callable[..., Any]) -> Callable[..., Any]:
    """`method`, but the first call of it finds that `before` has happened at the last moment."""
    waiting = [before]

    def called(*args: Any, **more: Any) -> Any:
        if waiting:
            waiting.pop()()
        return method(*args, **more)

    return called


def resumable_bytes(api: Api, held: Held, files: dict[str, bytes], step: int) -> list[int]:
    """Statuses of fetching every blob of a committed checkpoint."""
    urls = api.post(f"/job/{held.id}/checkpoints/{step}/urls", key="submit").ok()["urls"]
    assert urls.keys() == {blake3(data).hexdigest() for data in files.values()}
    return [api.send("GET", url).status for url in urls.values()]


# The sweeper


@pytest.mark.parametrize("failure", [Refusal(ErrorCode.PAYLOAD_TOO_LARGE), StorageUnavailable("throttled")])
def test_a_timer_that_cannot_be_run_does_not_stop_the_others(
    api: Api, failure: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    deadline_at = api.clock.now() + 60
    poisoned = api.submit(policy={"deadline_at": deadline_at})["id"]
    others = [api.submit(policy={"deadline_at": deadline_at + n})["id"] for n in (1, 2)]
    api.clock.advance(120)
    apply = api.context.jobs.apply

    def failing(change: Any) -> None:
        if change.job.id == poisoned:
            raise failure
        apply(change)

    monkeypatch.setattr(api.context.jobs, "apply", failing)
    swept = api.sweep()
    assert (swept.timers, swept.left) == (2, 1)
    assert [api.job(job_id)["status"] for job_id in [poisoned, *others]] == ["pending", "failed", "failed"]
    assert poisoned in str([vars(record).get("job_id") for record in caplog.records])


def test_a_job_that_cannot_be_read_does_not_stop_the_sweeper_or_a_claim(
    api: Api, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    held = [api.claim() for _ in range(3) if api.submit()]
    api.clock.advance(100)
    get = api.context.jobs.get

    def rotten(job_id: str) -> Any:
        if job_id == held[0].id:
            raise ValueError("the document does not fit its model")
        return get(job_id)

    with monkeypatch.context() as patched:
        patched.setattr(api.context.jobs, "get", rotten)
        swept = api.sweep()
    assert (swept.reclaimed, swept.left) == (2, 1)
    assert [api.job(one.id)["status"] for one in held] == ["running", "pending", "pending"]
    assert "could not be processed" in caplog.text


# Retention


def test_retention_of_more_checkpoints_than_a_page_holds_destroys_none_that_is_kept(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The page of the twin is made small instead of a thousand checkpoints being committed.
    history, listing = api.context.jobs.history, api.context.objects.list
    monkeypatch.setattr(
        api.context.jobs,
        "history",
        lambda *place, limit, **more: history(*place, limit=min(limit, 3), **more),
    )
    monkeypatch.setattr(
        api.context.objects, "list", lambda *place, limit, **more: listing(*place, limit=min(limit, 3), **more)
    )
    api.submit(policy={"retention": {"keep_last": 1, "keep_every_steps": 2}})
    held = api.claim()
    for step in range(1, 13):
        held.commit(step, {"a": b"weights at %d" % step}).ok()
    kept = [2, 4, 6, 8, 10, 12]
    for step in kept:
        assert resumable_bytes(api, held, {"a": b"weights at %d" % step}, step) == [200]
    monkeypatch.undo()
    assert sorted(api.checkpoints(held.id)) == kept
    assert len(api.objects(prefix="packs/")) == len(kept)


@pytest.mark.parametrize("method", ["remove_references", "delete_many"])
def test_retention_that_was_overtaken_deletes_nothing_that_a_newer_commit_relies_on(
    api: Api, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to a commit is lost, and while its retention still runs the worker goes on to the next one.

    That one names a pack again which is stored, but which only checkpoints named that are being let go.
    """
    api.submit(policy={"retention": {"keep_last": 1}})
    held = api.claim()
    held.commit(10, {"a": b"once", "own": b"10"}).ok()
    files = {"a": b"once", "own": b"30"}
    early: list[Answer] = []
    store = api.context.packs if method == "remove_references" else api.context.objects
    monkeypatch.setattr(store, method, once(lambda: early.append(held.commit(30, files)), getattr(store, method)))
    held.commit(20, {"a": b"other", "own": b"20"}).ok()
    if method == "delete_many":
        # The pack is condemned already: the worker has to repeat its commit.
        early[0].refused(ErrorCode.CONFLICT)
        api.clock.advance(DEAD_AFTER_S)
        held.commit(30, files).ok()
    assert api.job(held.id)["checkpoint_step"] == 30
    assert resumable_bytes(api, held, files, 30) == [200, 200]
    api.clock.advance(3600)
    held.heartbeat().ok()
    held.commit(40, {"own": b"40"}).ok()
    assert sorted(api.checkpoints(held.id)) == [40]
    held.complete().ok()
    assert len(api.objects(prefix="packs/")) == 1, "what was left is let go later"


def test_a_commit_that_was_overtaken_lets_nothing_go(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit that a newer commit overtakes deletes nothing, though it had chosen a checkpoint and read its packs."""
    api.submit(policy={"retention": {"keep_last": 1}})
    held = api.claim()
    held.commit(10, {"a": b"once", "own": b"10"}).ok()
    files = {"a": b"once", "own": b"30"}
    read = once(lambda: held.commit(30, files), api.context.objects.read)
    monkeypatch.setattr(api.context.objects, "read", read)
    held.commit(20, {"a": b"other", "own": b"20"}).refused(ErrorCode.STEP_NOT_NEWER, "step")
    assert sorted(api.checkpoints(held.id)) == [30]
    assert resumable_bytes(api, held, files, 30) == [200, 200]
    api.clock.advance(3600)
    held.heartbeat().ok()
    held.commit(40, {"own": b"40"}).ok()
    held.complete().ok()
    assert set(api.objects(prefix="packs/").values()) == {b"40"}


@pytest.mark.parametrize("behind", [False, True], ids=["with the commit", "behind it"])
def test_a_checkpoint_that_a_retry_chose_is_not_taken_away_by_retention_under_way(
    api: Api, behind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention under way keeps the checkpoint that a retry chose: the next attempt would begin from nothing."""
    api.submit(policy={"retention": {"keep_last": 1}})
    held = api.claim()
    held.commit(100).ok()
    if behind:
        # The first commit of an attempt looks for leftovers of the attempt before.
        held.release().ok()
        held = api.claim()
    apply = api.context.jobs.apply

    def retried() -> None:
        api.post(f"/job/{held.id}/stop").ok()
        api.post(f"/job/{held.id}/retry", {"from_step": 100}).ok()

    def at_retention(change: Transaction) -> None:
        if change.deletes:
            monkeypatch.setattr(api.context.jobs, "apply", apply)
            retried()
        apply(change)

    monkeypatch.setattr(api.context.jobs, "apply", at_retention)
    answer = held.commit(200)
    assert answer.status == (200 if behind else 409), answer.text
    second = api.claim()
    assert [ref["step"] for ref in second.item["resume"]] == [100]
    assert resumable_bytes(api, second, {"model.bin": b"weights at 100"}, 100) == [200]
    second.commit(150).ok()


def test_a_checkpoint_that_is_being_read_outlives_one_of_the_same_step(api: Api) -> None:
    api.submit(policy={"retention": {"keep_last": 1}})
    held = api.claim()
    held.commit(100, {"a": b"first"}).ok()
    held.complete().ok()
    urls = api.post(f"/job/{held.id}/checkpoints/100/urls", key="submit").ok()["urls"]
    api.post(f"/job/{held.id}/retry", {"from_step": 0}).ok()
    second = api.claim()
    second.commit(100, {"a": b"second"}).ok()
    second.commit(200, {"a": b"third"}).ok()
    assert [api.send("GET", url).status for url in urls.values()] == [200]
    api.clock.advance(3600)
    second.heartbeat().ok()
    second.commit(300, {"a": b"fourth"}).ok()
    second.complete().ok()
    assert set(api.objects(prefix="packs/")) == {f"packs/{blake3(b'fourth').hexdigest()}"}


# Damaged checkpoints


def test_a_late_report_of_damage_does_not_touch_a_step_committed_anew(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.submit()
    first = api.claim()
    first.commit(100, {"a": b"rotten"}).ok()
    first.release().ok()
    second = api.claim()
    report = {"epoch": 1, "message": "bad bytes"}

    def overtaken() -> None:
        second.post(f"/job/{second.id}/checkpoints/100/damaged", report).ok()
        second.commit(100, {"a": b"sound"}).ok()

    seen: list[CheckpointRecord | None] = []
    jobs_read = api.context.jobs.read

    def read(kind: type[Any], job_id: str, number: int = 0) -> Any:
        record = jobs_read(kind, job_id, number)
        if kind is CheckpointRecord and not seen:
            # This report is overtaken right after it has read the checkpoint.
            seen.append(record)
            overtaken()
        return record

    monkeypatch.setattr(api.context.jobs, "read", read)
    second.post(f"/job/{second.id}/checkpoints/100/damaged", report)
    view = api.checkpoints(second.id)[100]
    assert (view["epoch"], view["damaged"], view["current"]) == (2, False, True)
    second.release().ok()
    assert [(ref["step"], ref["epoch"]) for ref in api.claim().item["resume"]] == [(100, 2)]


def test_two_reports_of_damage_at_once_leave_a_sound_checkpoint_to_resume_from(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.submit()
    first = api.claim()
    for step in (10, 20, 30):
        first.commit(step).ok()
    first.release().ok()
    second = api.claim()

    def other_one() -> None:
        second.post(f"/job/{second.id}/checkpoints/20/damaged", {"epoch": 1}).ok()

    apply = api.context.jobs.apply
    monkeypatch.setattr(api.context.jobs, "apply", once(other_one, apply))
    second.post(f"/job/{second.id}/checkpoints/30/damaged", {"epoch": 1}).ok()
    assert api.job(second.id)["checkpoint_step"] == 10
    second.commit(15).ok()


# Submitting


def test_two_submissions_at_once_with_one_key_are_one_job(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """DynamoDB cancels a transaction that meets another one under way; the other one is not yet to be read."""
    apply = api.context.jobs.apply
    refusals = [WriteConflict(), WriteConflict()]

    def conflicting(change: Any) -> None:
        if refusals:
            raise refusals.pop()
        apply(change)

    monkeypatch.setattr(api.context.jobs, "apply", conflicting)
    headers = {"idempotency-key": "tonight"}
    job = api.submit(headers=headers)
    assert api.submit(headers=headers)["id"] == job["id"]
    assert len(api.get("/jobs").ok()) == 1


def test_a_repeated_batch_costs_reads_and_not_a_transaction_for_each_job(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that took too long once would take longer each time it is repeated."""
    body = {"jobs": [{"command": ["train", str(n)]} for n in range(30)]}
    headers = {"idempotency-key": "batch"}
    first = api.post("/jobs/batch", body, headers=headers).ok()
    calls: list[str] = []
    monkeypatch.setattr(api.context.jobs, "apply", lambda change: calls.append(change.job.id))
    assert api.post("/jobs/batch", body, headers=headers).ok() == first
    assert calls == []


# Clients of the original


def test_a_zip_that_a_retry_left_behind_can_be_uploaded_anew(api: Api) -> None:
    """A new attempt may upload again a ZIP of the run that a retry left behind, and the old attempt may not."""
    api.submit(instance_prompt="dog", instance_data_prefix="dog/")
    machine = {"machine_id": "m-1"}
    job = api.get("/work", query=machine).ok()[0]
    for step in (50, 100):
        key = f"{job['checkpoint_prefix']}checkpoint-{step}.zip"
        api.put_object(CHECKPOINTS_BUCKET, key, b"first run %d" % step)
        api.post("/progress", {"job_id": job["id"], "bucket_name": CHECKPOINTS_BUCKET, "key": key, **machine}).ok()
    api.post(f"/job/{job['id']}/stop").ok()
    api.post(f"/job/{job['id']}/retry", {"from_step": 50}).ok()
    again = api.get("/work", query=machine).ok()[0]
    assert again["resume_from"].endswith("checkpoint-50.zip")
    for claimed, step, allowed in ((job, 50, False), (job, 100, False), (again, 100, True)):
        key = f"{claimed['checkpoint_prefix']}checkpoint-{step}.zip"
        answer = api.get("/upload/token", query={"bucket": CHECKPOINTS_BUCKET, "key": key}, key="worker")
        assert (answer.status == 200) is allowed, answer.text


# Time


@pytest.mark.parametrize("interval_s", [1, 30, 600])
def test_the_last_second_of_a_lease(api: Api, interval_s: int) -> None:
    api.submit(policy={"heartbeat_interval_s": interval_s})
    held = api.claim()
    api.clock.advance(3 * interval_s - 1)
    assert api.sweep().reclaimed == 0
    held.commit(1).ok()
    api.clock.advance(1)
    held.commit(2).refused(ErrorCode.LEASE_EXPIRED, "x-lease-token")
    api.clock.advance(revocation_grace_s(interval_s, 1))
    assert api.sweep().reclaimed == 1
    assert api.job(held.id)["status"] == JobState.PENDING


def test_a_second_of_runtime_is_a_second(api: Api) -> None:
    api.submit(policy={"max_runtime_s": 1, "heartbeat_interval_s": 600})
    held = api.claim()
    assert held.heartbeat().ok()["directive"] == "checkpoint"
    api.clock.advance(1)
    assert held.heartbeat().ok()["directive"] == "cancel"
    assert api.job(held.id)["reason"]["code"] == "max_runtime"


def test_a_cursor_of_another_tenant_whose_name_begins_alike_is_refused(api: Api) -> None:
    longer = f"{TENANT}-b"
    cursor = cursors.encode(("objects", longer, "training-data", ""), ["a"])
    api.get("/data", query={"cursor": cursor}).refused(ErrorCode.INVALID_CURSOR, "cursor")
    api.put_object("training-data", "secret", b"x", tenant=longer)
    assert api.get("/data").ok()["objects"] == []
