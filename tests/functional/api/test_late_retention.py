"""The sweeper runs retention for jobs that end without a last call of their worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from blake3 import blake3

from baton.contract.names import CHECKPOINTS_BUCKET
from baton.contract.worker.calls import AGENT_CRASHED
from functions.api.checkpoints.retention_runner import JOBS_A_SWEEP
from functions.domain.errors import StorageUnavailable
from functions.domain.jobs.attempt_end import LATE_AFTER_S
from functions.domain.records import Job
from tests.kits.api.harness import NOW, TENANT, Api, Held

KEPT, SURPLUS, KILLED, LATE = b"kept", b"surplus", b"uploaded by an attempt that was killed", b"uploaded after the end"
Ending = Callable[[Api, Held], None]


def digests(*packs: bytes) -> set[str]:
    return {blake3(data).hexdigest() for data in packs}


def packs(api: Api) -> set[str]:
    return {key.removeprefix("packs/") for key in api.objects(prefix="packs/")}


def manifests(api: Api) -> set[str]:
    """Step and epoch of each."""
    return {key.rpartition("/")[2].rpartition("-")[0] for key in api.objects() if "/manifests/" in key}


def job_of(api: Api, held: Held) -> Job:
    job = api.context.jobs.get(held.id)
    assert job is not None
    return job


def holders(api: Api, data: bytes) -> set[str]:
    (digest,) = digests(data)
    item = api.context.packs.get_many(TENANT, [digest]).get(digest)
    return set(item.jobs) if item is not None else set()


def offer(held: Held, step: int, *contents: bytes) -> Callable[[], None]:
    """The first call of a commit; its answer's URLs, to be used later."""
    answer = held.post(f"/job/{held.id}/checkpoints", held.manifest(step, {f"{n}": c for n, c in enumerate(contents)}))
    return lambda: held.upload_missing(answer, {blake3(data).hexdigest(): data for data in contents})


def with_leavings(api: Api, **policy: Any) -> Held:
    """A job with one checkpoint that it keeps, one that it does not, and an upload that was never committed."""
    api.submit(policy={"retention": {"keep_last": 1}, "heartbeat_interval_s": 30, **policy})
    held = api.claim()
    held.commit(1, {"a": KEPT, "b": SURPLUS}).ok()
    api.post(f"/job/{held.id}/checkpoints/1/urls", key="submit").ok()
    held.commit(2, {"a": KEPT}).ok()
    offer(held, 3, KEPT, KILLED)()
    return held


def stopped(api: Api, held: Held) -> None:
    api.post(f"/job/{held.id}/stop").ok()


def stopped_while_it_waits(api: Api, held: Held) -> None:
    held.fail().ok()
    api.post(f"/job/{held.id}/stop").ok()


def lost(api: Api, held: Held) -> None:
    api.sweep()
    api.clock.advance(91)
    assert api.sweep().reclaimed == 1


def agent_crashed(api: Api, held: Held) -> None:
    held.release(reason=AGENT_CRASHED).ok()


def out_of_time(api: Api, held: Held) -> None:
    api.clock.advance(60)
    assert held.heartbeat().ok()["directive"] == "cancel"


def past_the_deadline(api: Api, held: Held) -> None:
    api.clock.advance(80)
    assert api.sweep().timers == 1


ENDINGS: dict[Ending, tuple[str, dict[str, Any]]] = {
    stopped: ("canceled", {}),
    stopped_while_it_waits: ("canceled", {}),
    lost: ("failed", {"max_interruptions": 1}),
    agent_crashed: ("failed", {"max_interruptions": 1}),
    out_of_time: ("failed", {"max_runtime_s": 60}),
    past_the_deadline: ("failed", {"deadline_at": NOW + 80}),
}


@pytest.mark.parametrize("ending", ENDINGS, ids=lambda ending: ending.__name__)
def test_what_is_not_kept_goes_an_hour_after_the_end(api: Api, ending: Ending) -> None:
    state, policy = ENDINGS[ending]
    held = with_leavings(api, **policy)
    upload = offer(held, 4, KEPT, LATE)
    ending(api, held)
    assert api.job(held.id)["state"] == state
    ended_at = api.clock.now()
    api.clock.advance(800)
    upload()
    api.clock.advance(LATE_AFTER_S - 801)
    assert api.retain() == 0
    assert packs(api) == digests(KEPT, SURPLUS, KILLED, LATE)
    assert manifests(api) == {"1-1", "2-1", "3-1", "4-1"}
    api.clock.advance(1)
    view = api.job(held.id)
    assert api.retain() == 1
    assert (packs(api), manifests(api)) == (digests(KEPT), {"2-1"})
    assert holders(api, KEPT) == {held.id} and not holders(api, SURPLUS) | holders(api, KILLED) | holders(api, LATE)
    assert set(api.checkpoints(held.id)) == {2}
    after = api.job(held.id)
    assert after["rev"] > view["rev"], "a page that lists the checkpoints reads them again"
    assert {**after, "rev": view["rev"]} == view, "for the user nothing else has changed"
    assert job_of(api, held).retention_at is None and api.context.jobs.due_retentions(2**40, limit=9) == []
    assert api.clock.now() == ended_at + LATE_AFTER_S
    with api.unchanged():
        assert api.retain() == 0


def test_a_retry_in_time_keeps_everything_and_one_after_it_finds_what_the_policy_keeps(api: Api) -> None:
    held = with_leavings(api)
    stopped(api, held)
    api.clock.advance(LATE_AFTER_S - 1)
    api.post(f"/job/{held.id}/retry", {"from_step": 1}).ok()
    api.clock.advance(LATE_AFTER_S)
    assert api.retain() == 0
    assert set(api.checkpoints(held.id)) == {1, 2}
    second = api.claim()
    assert [ref["step"] for ref in second.item["resume"]] == [1]
    stopped(api, second)
    api.clock.advance(LATE_AFTER_S)
    assert api.retain() == 1
    assert set(api.checkpoints(held.id)) == {1}, "step 2 leads somewhere else"
    assert packs(api) == digests(KEPT, SURPLUS)
    assert api.post(f"/job/{held.id}/retry", {"from_step": 2}).status == 404
    api.post(f"/job/{held.id}/retry").ok()
    third = api.claim()
    assert [ref["step"] for ref in third.item["resume"]] == [1]
    urls = third.post(f"/job/{held.id}/checkpoints/1/urls").ok()["urls"]
    assert {api.send("GET", url).text.encode() for url in urls.values()} == {KEPT, SURPLUS}


def test_what_another_job_holds_stays(api: Api) -> None:
    held = with_leavings(api)
    api.submit()
    other = api.claim()
    other.commit(7, {"a": SURPLUS, "b": KILLED}).ok()
    stopped(api, held)
    api.clock.advance(LATE_AFTER_S)
    assert api.retain() == 1
    assert packs(api) == digests(KEPT, SURPLUS, KILLED)
    assert holders(api, SURPLUS) == holders(api, KILLED) == {other.id}


@pytest.mark.parametrize("ending", ["stopped", "complete"])
def test_what_is_being_read_at_the_end_goes_later(api: Api, ending: str) -> None:
    held = with_leavings(api)
    reads_until = api.clock.now() + 3600
    if ending == "stopped":
        stopped(api, held)
        api.clock.advance(LATE_AFTER_S)
        api.post(f"/job/{held.id}/checkpoints/1/urls", key="submit").ok()
        reads_until = api.clock.now() + 3600
        assert api.retain() == 1
    else:
        held.complete().ok()
    assert packs(api) == digests(KEPT, SURPLUS)
    assert job_of(api, held).retention_at == reads_until
    api.clock.advance(reads_until - api.clock.now() - 1)
    assert api.retain() == 0
    api.clock.advance(1)
    assert api.retain() == 1
    assert (packs(api), manifests(api)) == (digests(KEPT), {"2-1"})
    assert job_of(api, held).retention_at is None


def test_a_job_of_which_nothing_is_left_is_written_once_at_its_end(api: Api) -> None:
    api.submit(policy={"retention": {"keep_last": 1}})
    held = api.claim()
    held.commit(1).ok()
    held.commit(2).ok()
    rev = job_of(api, held).rev
    held.complete().ok()
    assert (job_of(api, held).rev, job_of(api, held).retention_at) == (rev + 1, None)
    with api.unchanged():
        api.clock.advance(10 * LATE_AFTER_S)
        assert api.retain() == 0


def test_more_than_one_transaction_can_forget_goes_with_several_sweeps(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = with_leavings(api)
    monkeypatch.setattr("functions.api.checkpoints.retention_runner.MAX_DELETED_RECORDS", 1)
    for step in (5, 6):
        api.context.jobs.protect_checkpoint(held.id, job_of(api, held).checkpoint_step or 0, api.clock.now() + 3600)
        held.commit(step, {"a": b"at %d" % step}).ok()
    stopped(api, held)
    api.clock.advance(LATE_AFTER_S)
    assert len(api.checkpoints(held.id)) == 4
    assert [api.retain() for _ in range(4)] == [1, 1, 1, 0]
    assert (packs(api), manifests(api)) == (digests(b"at 6"), {"6-1"})


@pytest.mark.parametrize("failing", ["list", "read", "delete_many", "remove_references", "get_many", "history"])
def test_a_failure_is_logged_and_made_good_later(
    api: Api, failing: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    held = with_leavings(api)
    stopped(api, held)
    api.clock.advance(LATE_AFTER_S)
    context = api.context
    store = {"remove_references": context.packs, "get_many": context.packs, "history": context.jobs}.get(
        failing, context.objects
    )

    def fail(*_: Any, **__: Any) -> Any:
        raise StorageUnavailable("no answer")

    with monkeypatch.context() as patched:
        patched.setattr(store, failing, fail)
        assert api.retain() == 0
    assert "retention left something behind" in caplog.text
    assert digests(KEPT) <= packs(api)
    again_at = job_of(api, held).retention_at
    assert again_at == api.clock.now() + LATE_AFTER_S
    assert api.retain() == 0, "not every minute"
    api.clock.advance(LATE_AFTER_S)
    assert api.retain() == 1
    assert (packs(api), manifests(api)) == (digests(KEPT), {"2-1"})


@pytest.mark.parametrize("ending", ["complete", "fail"])
def test_what_a_workers_last_call_could_not_let_go_of_is_left_to_the_sweeper(
    api: Api, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = with_leavings(api, max_failures=1)

    def fail(*_: Any, **__: Any) -> Any:
        raise StorageUnavailable("no answer")

    with monkeypatch.context() as patched:
        patched.setattr(api.context.objects, "list", fail)
        (held.complete() if ending == "complete" else held.fail()).ok()
    assert packs(api) == digests(KEPT, SURPLUS, KILLED)
    assert job_of(api, held).retention_at == api.clock.now() + LATE_AFTER_S
    api.clock.advance(LATE_AFTER_S)
    assert api.retain() == 1
    assert (packs(api), manifests(api)) == (digests(KEPT), {"2-1"})
    assert job_of(api, held).retention_at is None


def test_a_sweep_that_is_killed_is_gone_on_with_by_the_next_one(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    held = with_leavings(api)
    stopped(api, held)
    api.clock.advance(LATE_AFTER_S)

    def die(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(api.context.objects, "delete_many", die)
        api.retain()
    assert set(api.checkpoints(held.id)) == {2} and packs(api) == digests(KEPT, SURPLUS, KILLED)
    assert api.retain() == 1
    assert (packs(api), manifests(api)) == (digests(KEPT), {"2-1"})


def test_a_broken_job_and_a_crowd_of_ended_ones_hold_up_nobody(
    api: Api, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    held = with_leavings(api)
    stopped(api, held)
    for _ in range(JOBS_A_SWEEP):
        api.submit()
        stopped(api, api.claim())
    waiting = api.submit(policy={"deadline_at": NOW + LATE_AFTER_S})["id"]
    api.clock.advance(LATE_AFTER_S)
    assert api.sweep().timers == 1 and api.job(waiting)["state"] == "failed"
    left = api.context.jobs.due_retentions(api.clock.now(), limit=100)
    assert len(left) == 1
    broken, get = left[0], api.context.jobs.get

    def damaged(job_id: str) -> Job | None:
        if job_id == broken:
            raise ValueError("the item is damaged")
        return get(job_id)

    api.submit()
    stopped(api, api.claim())
    api.clock.advance(LATE_AFTER_S)
    monkeypatch.setattr(api.context.jobs, "get", damaged)
    assert api.retain() == 1
    assert "a job could not be processed" in caplog.text
    assert api.context.jobs.due_retentions(api.clock.now(), limit=100) == [broken]


def test_a_sweep_that_has_taken_long_begins_with_no_further_job(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        api.submit()
        stopped(api, api.claim())
    api.clock.advance(LATE_AFTER_S)
    history = api.context.jobs.history

    def slow(*args: Any, **more: Any) -> Any:
        api.clock.advance(16)
        return history(*args, **more)

    with monkeypatch.context() as patched:
        patched.setattr(api.context.jobs, "history", slow)
        assert api.retain() == 2, "a third one might be cut off"
    assert api.retain() == 1


def test_a_damaged_manifest_is_no_reason_to_delete_what_it_may_name(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    held = with_leavings(api)
    (key,) = (key for key in api.objects() if "/manifests/2-1-" in key)
    api.put_object(CHECKPOINTS_BUCKET, key, b"damaged")
    stopped(api, held)
    api.clock.advance(LATE_AFTER_S)
    assert api.retain() == 0
    assert "damaged or gone" in caplog.records[-1].__dict__["reason"]
    assert packs(api) == digests(KEPT, SURPLUS, KILLED)
    assert job_of(api, held).retention_at == api.clock.now() + LATE_AFTER_S
