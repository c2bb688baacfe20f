"""Retention after a commit deletes exactly the bytes that the policy does not keep."""

from __future__ import annotations

from typing import Any

import pytest
from blake3 import blake3

from baton.contract.checkpoints.manifest import Pack, parse_manifest
from functions.api.checkpoints import retention_runner
from functions.domain.checkpoints.packs import PackSnapshot
from functions.domain.checkpoints.retention import MAX_TAGS
from functions.domain.errors import StorageUnavailable, WriteConflict
from functions.domain.records import CheckpointRecord
from tests.kits.api.harness import TENANT, Api, Held


def held_with(api: Api, **retention: Any) -> Held:
    api.submit(policy={"retention": retention})
    return api.claim()


def stored(api: Api, held: Held) -> tuple[set[str], set[str]]:
    """Steps and attempts of the job's manifests that are stored, and the tenant's packs."""
    prefix = f"jobs/{held.id}/manifests/"
    manifests = {"-".join(key.removeprefix(prefix).split("-")[:2]) for key in api.objects(prefix=prefix)}
    return manifests, {key.removeprefix("packs/") for key in api.objects(prefix="packs/")}


def holders(api: Api, data: bytes) -> set[str]:
    """The jobs that hold a pack."""
    digest = blake3(data).hexdigest()
    record = api.context.packs.get_many(TENANT, [digest]).get(digest)
    return set(record.jobs) if record else set()


def rev_of(api: Api, held: Held) -> int:
    job = api.context.jobs.get(held.id)
    assert job is not None
    return job.rev


def digests(*packs: bytes) -> set[str]:
    return {blake3(data).hexdigest() for data in packs}


def test_the_last_ones_stay_with_every_byte_they_share(api: Api) -> None:
    held = held_with(api, keep_last=2)
    for step in (1, 2, 3, 4):
        held.commit(step, {"frozen": b"shared by all", "pair": b"pair %d" % (step // 2), "own": b"own %d" % step}).ok()
    assert sorted(api.checkpoints(held.id)) == [3, 4]
    manifests, packs = stored(api, held)
    assert manifests == {"3-1", "4-1"}
    assert packs == digests(b"shared by all", b"pair 1", b"pair 2", b"own 3", b"own 4")
    for step in (3, 4):
        urls = api.post(f"/job/{held.id}/checkpoints/{step}/urls", key="submit").ok()["urls"]
        assert all(api.send("GET", url).status == 200 for url in urls.values())


def test_every_kth_and_the_best_stay(api: Api) -> None:
    held = held_with(api, keep_last=1, keep_every_steps=4, keep_best_metric="loss")
    for step, loss in enumerate((9.0, 8.0, 1.0, 7.0, 6.0, 5.0, 4.0), start=1):
        held.commit(step, metrics={"loss": loss}).ok()
    assert sorted(api.checkpoints(held.id)) == [3, 4, 7]
    assert stored(api, held)[0] == {"3-1", "4-1", "7-1"}


def test_the_newest_of_each_tag_stays(api: Api) -> None:
    """The tag was only a text."""
    held = held_with(api, keep_last=1)
    for step, tag in enumerate(("good", "", "best", "good", "", ""), start=1):
        held.commit(step, **({"tag": tag} if tag else {})).ok()
    tags = {one["step"]: one["tag"] for one in api.get(f"/job/{held.id}/checkpoints").ok()["checkpoints"]}
    assert tags == {3: "best", 4: "good", 6: ""}
    assert stored(api, held)[0] == {"3-1", "4-1", "6-1"}
    assert held.commit(7, tag="x" * 65).status == 422


def test_of_many_tags_the_oldest_go_first(api: Api) -> None:
    held = held_with(api, keep_last=1)
    for step in range(1, MAX_TAGS + 4):
        held.commit(step, tag=f"tag-{step}").ok()
    assert sorted(api.checkpoints(held.id)) == list(range(4, MAX_TAGS + 4))
    held.commit(MAX_TAGS + 4, tag="tag-4").ok()
    assert sorted(api.checkpoints(held.id)) == list(range(5, MAX_TAGS + 5)), "the newer one of that tag"


def test_what_is_being_read_stays_until_its_urls_are_old(api: Api) -> None:
    held = held_with(api, keep_last=1)
    held.commit(1).ok()
    urls = api.post(f"/job/{held.id}/checkpoints/1/urls", key="submit").ok()["urls"]
    held.commit(2).ok()
    held.commit(3).ok()
    assert sorted(api.checkpoints(held.id)) == [1, 3]
    assert all(api.send("GET", url).status == 200 for url in urls.values())
    api.clock.advance(3600)
    held.heartbeat().ok()
    held.commit(4).ok()
    assert sorted(api.checkpoints(held.id)) == [4]
    assert stored(api, held) == ({"4-1"}, digests(b"weights at 4"))


@pytest.mark.parametrize("failing", ["read", "get_many", "remove_references", "delete_many"])
def test_a_failure_of_the_store_does_not_undo_the_commit_and_is_made_good(
    api: Api, failing: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    held = held_with(api, keep_last=1)
    held.commit(1).ok()
    store = api.context.packs if failing in ("get_many", "remove_references") else api.context.objects
    method = getattr(store, failing)

    def fail(*args: Any, **more: Any) -> Any:
        if failing == "get_many" and more.get("consistent") is not False:
            return method(*args, **more)  # The commit's own.
        raise StorageUnavailable("no answer")

    with monkeypatch.context() as patched:
        patched.setattr(store, failing, fail)
        assert held.commit(2).ok()["committed"] is True
    assert "retention left something behind" in caplog.text
    assert api.job(held.id)["checkpoint_step"] == 2
    assert digests(b"weights at 2") <= stored(api, held)[1]
    held.commit(3).ok()
    assert sorted(api.checkpoints(held.id)) == [3]
    held.complete().ok()
    assert stored(api, held) == ({"3-1"}, digests(b"weights at 3"))


def test_the_records_go_with_the_transaction_of_the_commit(api: Api) -> None:
    held = held_with(api, keep_last=1)
    held.commit(1).ok()
    rev = rev_of(api, held)
    held.commit(2).ok()
    assert (rev_of(api, held), sorted(api.checkpoints(held.id))) == (rev + 1, [2])


def test_what_is_being_read_all_of_a_sudden_does_not_stop_a_commit(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    held = held_with(api, keep_last=1)
    held.commit(1).ok()
    apply, urls = api.context.jobs.apply, []

    def reading(change: Any) -> None:
        if not urls:
            urls.extend(api.post(f"/job/{held.id}/checkpoints/1/urls", key="submit").ok()["urls"].values())
        apply(change)

    with monkeypatch.context() as patched:
        patched.setattr(api.context.jobs, "apply", reading)
        held.commit(2).ok()
    assert sorted(api.checkpoints(held.id)) == [1, 2]
    assert [api.send("GET", url).status for url in urls] == [200]


def test_a_commit_does_not_fail_for_what_it_cannot_let_go(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    held = held_with(api, keep_last=1)
    held.commit(1).ok()
    apply = api.context.jobs.apply

    def refusing(change: Any) -> None:
        if change.deletes and change.records(CheckpointRecord):
            raise WriteConflict
        apply(change)

    monkeypatch.setattr(api.context.jobs, "apply", refusing)
    held.commit(2).ok()
    assert stored(api, held) == ({"2-1"}, digests(b"weights at 2")), "retention came behind it"


def test_a_pack_that_another_job_takes_up_all_of_a_sudden_is_released(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = held_with(api, keep_last=1)
    held.commit(1).ok()
    remove_references = api.context.packs.remove_references
    (pack,) = api.context.packs.get_many(TENANT, digests(b"weights at 1")).values()
    sighting = PackSnapshot(Pack(blake3=pack.blake3, size_bytes=pack.size_bytes, crc64nvme=pack.crc64nvme), pack)

    def taking(*args: Any) -> set[str]:
        patched.undo()
        assert api.context.packs.add_references(TENANT, "another", [sighting])
        return remove_references(*args)

    with monkeypatch.context() as patched:
        patched.setattr(api.context.packs, "remove_references", taking)
        held.commit(2).ok()
    assert holders(api, b"weights at 1") == {"another"}
    assert stored(api, held) == ({"2-1"}, digests(b"weights at 1", b"weights at 2"))


def test_a_damaged_manifest_does_not_stop_retention_for_ever(api: Api) -> None:
    held = held_with(api, keep_last=1)
    held.commit(1).ok()
    (key,) = api.objects(prefix=f"jobs/{held.id}/manifests/")
    api.put_object("training-checkpoints", key, b"rotten")
    held.commit(2).ok()
    held.commit(3).ok()
    assert sorted(api.checkpoints(held.id)) == [3]
    manifests, packs = stored(api, held)
    assert manifests == {"3-1"}
    # The other packs of the damaged manifest are unknown, and stay.
    assert packs == digests(b"weights at 1", b"weights at 3")


def test_a_manifest_of_a_newer_version_stops_no_commit_and_is_not_told_to_be_damaged(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A control plane that was rolled back meets newer manifests: commits go on, no checkpoint is marked damaged."""
    held = held_with(api, keep_last=2)
    held.commit(1).ok()
    with monkeypatch.context() as rolled_back:
        rolled_back.setattr(retention_runner, "parse_manifest", lambda _: parse_manifest(b'{"version": 3}'))
        held.commit(2).ok()
        held.commit(3).ok()
        answer = api.post(f"/job/{held.id}/checkpoints/3/urls", key="submit")
        assert (answer.status, answer.error["code"]) == (503, "unavailable")
        assert "use the release that committed" in answer.error["message"]
    assert sorted(api.checkpoints(held.id)) == [1, 2, 3]
    held.commit(4).ok()
    assert sorted(api.checkpoints(held.id)) == [3, 4]
    assert stored(api, held) == ({"3-1", "4-1"}, digests(b"weights at 3", b"weights at 4"))


def test_a_manifest_that_was_stored_but_never_committed_is_swept_up_later(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = held_with(api, keep_last=1)
    held.commit(1).ok()

    def fail(*_: Any) -> Any:
        raise StorageUnavailable("no answer")

    with monkeypatch.context() as patched:
        patched.setattr(api.context.jobs, "apply", fail)
        assert held.commit(2).status == 503
    assert stored(api, held)[0] == {"1-1", "2-1"}
    assert holders(api, b"weights at 2") == {held.id}
    held.commit(3).ok()
    assert stored(api, held)[0] == {"2-1", "3-1"}, "nobody lists the bucket after a usual commit"
    held.complete().ok()
    assert stored(api, held) == ({"3-1"}, digests(b"weights at 3"))
    assert holders(api, b"weights at 2") == set()


@pytest.mark.parametrize("ending", ["next attempt", "complete", "failed for good"])
def test_what_a_killed_attempt_uploaded_goes(api: Api, ending: str) -> None:
    api.submit(policy={"retention": {"keep_last": 1}, "max_failures": 2})
    held = api.claim()
    held.commit(1).ok()
    manifest = held.manifest(2, {"a": b"uploaded", "b": b"never uploaded", "c": b"weights at 1"})
    answer = held.post(f"/job/{held.id}/checkpoints", manifest)
    blobs = {blake3(data).hexdigest(): data for data in (b"uploaded", b"never uploaded")}
    held.upload_missing(answer, blobs)
    assert digests(b"uploaded", b"never uploaded") <= stored(api, held)[1]
    if ending == "complete":
        held.complete().ok()
        assert stored(api, held) == ({"1-1"}, digests(b"weights at 1"))
        return
    before = stored(api, held)
    held.fail().ok()
    assert api.job(held.id)["state"] == "pending" and stored(api, held) == before, "another attempt may use it"
    api.clock.advance(3600)
    second = api.claim(machine_id="m-2")
    if ending == "failed for good":
        second.fail().ok()
        assert api.job(held.id)["state"] == "failed"
        assert stored(api, held) == ({"1-1"}, digests(b"weights at 1"))
        return
    second.commit(5).ok()
    assert stored(api, held) == ({"5-2"}, digests(b"weights at 5"))


def test_a_failure_that_is_reported_again_makes_good_what_the_store_refused(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.submit(policy={"max_failures": 1})
    held = api.claim()
    data = b"uploaded"
    answer = held.post(f"/job/{held.id}/checkpoints", held.manifest(2, {"a": data}))
    held.upload_missing(answer, {blake3(data).hexdigest(): data})

    def fail(*_: Any, **__: Any) -> Any:
        raise StorageUnavailable("no answer")

    with monkeypatch.context() as patched:
        patched.setattr(api.context.objects, "list", fail)
        held.fail().ok()
    assert api.job(held.id)["state"] == "failed" and stored(api, held) == ({"2-1"}, digests(data))
    held.fail().ok()
    assert stored(api, held) == (set(), set())


def test_the_upload_under_way_is_no_leaving(api: Api) -> None:
    """A manifest of the attempt that goes on is left alone however often retention runs."""
    held = held_with(api, keep_last=1)
    held.commit(1).ok()
    held.release().ok()
    second = api.claim()
    ahead = second.manifest(9, {"a": b"ahead"})
    second.upload_missing(second.post(f"/job/{held.id}/checkpoints", ahead), {blake3(b"ahead").hexdigest(): b"ahead"})
    second.commit(5).ok()
    assert second.post(f"/job/{held.id}/checkpoints", ahead).ok()["committed"] is True
    assert stored(api, held) == ({"9-2"}, digests(b"ahead"))


def test_a_step_committed_anew_after_a_retry_takes_the_old_ones_bytes_along(api: Api) -> None:
    held = held_with(api, keep_last=2)
    held.commit(1, {"a": b"one"}).ok()
    held.commit(2, {"a": b"two, first time"}).ok()
    held.complete().ok()
    api.post(f"/job/{held.id}/retry", {"from_step": 1}).ok()
    second = api.claim()
    second.commit(2, {"a": b"two, second time"}).ok()
    api.clock.advance(60)
    second.commit(3, {"a": b"three"}).ok()
    assert sorted(api.checkpoints(held.id)) == [2, 3]
    assert stored(api, held) == ({"2-2", "3-2"}, digests(b"two, second time", b"three"))


def test_a_pack_of_a_checkpoint_that_is_being_read_stays_though_its_record_was_replaced(api: Api) -> None:
    held = held_with(api, keep_last=2)
    held.commit(50, {"a": b"shared"}).ok()
    held.commit(100, {"a": b"shared", "b": b"own"}).ok()
    held.complete().ok()
    urls = api.post(f"/job/{held.id}/checkpoints/100/urls", key="submit").ok()["urls"]
    api.post(f"/job/{held.id}/retry", {"from_step": 0}).ok()
    second = api.claim()
    second.commit(100, {"a": b"other"}).ok()
    assert sorted(api.checkpoints(held.id)) == [100], "the one of step 50 has gone, and named the shared pack too"
    assert [api.send("GET", url).status for url in urls.values()] == [200, 200]
    api.clock.advance(3600)
    second.heartbeat().ok()
    second.complete().ok()
    assert stored(api, held) == ({"100-2"}, digests(b"other"))


def test_what_a_retry_left_behind_is_never_resumed(api: Api) -> None:
    held = held_with(api, keep_last=10)
    for step in (100, 200, 300):
        held.commit(step).ok()
    held.complete().ok()
    api.post(f"/job/{held.id}/retry", {"from_step": 100}).ok()
    second = api.claim()
    assert [ref["step"] for ref in second.item["resume"]] == [100]
    urls = api.post(f"/job/{held.id}/checkpoints/200/urls", key="submit").ok()["urls"]
    second.commit(250).ok()
    # Step 200 is still read by somebody, but leads somewhere else.
    assert sorted(api.checkpoints(held.id)) == [100, 200, 250]
    assert all(api.send("GET", url).status == 200 for url in urls.values())
    second.post(f"/job/{held.id}/checkpoints/250/damaged", {"epoch": 2}).ok()
    assert api.job(held.id)["checkpoint_step"] == 100
    second.release().ok()
    assert [(ref["step"], ref["epoch"]) for ref in api.claim().item["resume"]] == [(100, 1)]
