"""After a commit: what the policy lets go of is deleted, byte for byte, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from blake3 import blake3

from functions.domain.errors import StorageUnavailable
from tests.api_harness import Api, Held


def held_with(api: Api, **retention: Any) -> Held:
    api.submit(policy={"retention": retention})
    return api.claim()


def stored(api: Api, held: Held) -> tuple[set[str], set[str]]:
    """Manifests and blobs of the job that are stored."""
    prefix = f"jobs/{held.id}/"
    names = {key.removeprefix(prefix) for key in api.objects(prefix=prefix)}
    manifests = {name.removeprefix("manifests/").removesuffix(".json") for name in names if "manifests/" in name}
    return manifests, {name.removeprefix("blobs/") for name in names if "blobs/" in name}


def digests(*blobs: bytes) -> set[str]:
    return {blake3(data).hexdigest() for data in blobs}


def test_the_last_ones_stay_with_every_byte_they_share(api: Api) -> None:
    held = held_with(api, keep_last=2)
    for step in (1, 2, 3, 4):
        held.commit(step, {"frozen": b"shared by all", "pair": b"pair %d" % (step // 2), "own": b"own %d" % step}).ok()
    assert sorted(api.checkpoints(held.id)) == [3, 4]
    manifests, blobs = stored(api, held)
    assert manifests == {"3-1", "4-1"}
    assert blobs == digests(b"shared by all", b"pair 1", b"pair 2", b"own 3", b"own 4")
    for step in (3, 4):
        urls = api.post(f"/job/{held.id}/checkpoints/{step}/urls", key="submit").ok()["urls"]
        assert all(api.send("GET", url).status == 200 for url in urls.values())


def test_every_kth_and_the_best_stay(api: Api) -> None:
    held = held_with(api, keep_last=1, keep_every_steps=4, keep_best_metric="loss")
    for step, loss in enumerate((9.0, 8.0, 1.0, 7.0, 6.0, 5.0, 4.0), start=1):
        held.commit(step, metrics={"loss": loss}).ok()
    assert sorted(api.checkpoints(held.id)) == [3, 4, 7]
    assert stored(api, held)[0] == {"3-1", "4-1", "7-1"}


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


@pytest.mark.parametrize("failing", ["delete_many", "delete_checkpoint", "list"])
def test_a_failure_of_the_store_does_not_undo_the_commit_and_is_made_good(
    api: Api, failing: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    held = held_with(api, keep_last=1)
    held.commit(1).ok()
    store = api.context.jobs if failing == "delete_checkpoint" else api.context.objects

    def fail(*_: Any, **__: Any) -> Any:
        raise StorageUnavailable("no answer")

    with monkeypatch.context() as patched:
        patched.setattr(store, failing, fail)
        assert held.commit(2).ok()["committed"] is True
    assert "retention left something behind" in caplog.text
    assert api.job(held.id)["checkpoint_step"] == 2
    assert digests(b"weights at 2") <= stored(api, held)[1]
    held.commit(3).ok()
    assert sorted(api.checkpoints(held.id)) == [3]
    assert stored(api, held) == ({"3-1"}, digests(b"weights at 3"))


def test_a_damaged_manifest_does_not_stop_retention_for_ever(api: Api) -> None:
    held = held_with(api, keep_last=1)
    held.commit(1).ok()
    api.put_object("training-checkpoints", f"jobs/{held.id}/manifests/1-1.json", b"rotten")
    held.commit(2).ok()
    held.commit(3).ok()
    assert sorted(api.checkpoints(held.id)) == [3]
    manifests, blobs = stored(api, held)
    assert manifests == {"3-1"}
    # Nobody can say any more what else the damaged one named.
    assert blobs == digests(b"weights at 1", b"weights at 3")


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
    held.commit(3).ok()
    assert stored(api, held) == ({"3-1"}, digests(b"weights at 3"))


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
