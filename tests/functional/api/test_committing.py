"""Checkpoints: committed once every byte is stored, immutable, deleted by the policy, replaced when damaged."""

from __future__ import annotations

from typing import Any

import pytest
from blake3 import blake3

from baton.contract.checkpoints.manifest import parse_manifest
from baton.contract.errors import ErrorCode
from baton.contract.names import CHECKPOINTS_BUCKET
from functions.domain.errors import StorageUnavailable
from tests.kits.api.harness import NOW, TENANT, Api, Held
from tests.kits.files.declared_files import described, pack_of


@pytest.fixture
def held(api: Api) -> Held:
    api.submit()
    return api.claim()


def pack(data: bytes) -> str:
    return f"packs/{blake3(data).hexdigest()}"


def manifests(api: Api, held: Held) -> list[str]:
    """Step and attempt of the stored manifests."""
    prefix = f"jobs/{held.id}/manifests/"
    return sorted(key.removeprefix(prefix).rsplit("-", 1)[0] for key in api.objects(prefix=prefix))


def test_nothing_is_committed_before_every_pack_is_stored(api: Api, held: Held) -> None:
    files = {"model.bin": b"weights", "optimizer.bin": b"moments", "copy.bin": b"weights"}
    manifest = held.manifest(100, files, metrics={"loss": 0.5})
    answer = held.post(f"/job/{held.id}/checkpoints", manifest).ok()
    # From here on retention knows what this attempt uploads, whatever becomes of it.
    assert manifests(api, held) == ["100-1"]
    with api.unchanged():
        answer = held.post(f"/job/{held.id}/checkpoints", manifest).ok()
    assert answer["committed"] is False and answer["more_missing"] is False
    assert {item["blake3"] for item in answer["missing"]} == {
        blake3(b"weights").hexdigest(),
        blake3(b"moments").hexdigest(),
    }
    first, second = answer["missing"]
    by_digest = {blake3(data).hexdigest(): data for data in files.values()}
    assert api.send("PUT", first["url"], first["headers"], by_digest[first["blake3"]]).status == 200
    answer = held.post(f"/job/{held.id}/checkpoints", manifest).ok()
    assert answer["committed"] is False and [item["blake3"] for item in answer["missing"]] == [second["blake3"]]
    assert api.checkpoints(held.id) == {} and api.job(held.id)["checkpoint_step"] is None
    assert api.send("PUT", second["url"], second["headers"], by_digest[second["blake3"]]).status == 200
    assert held.post(f"/job/{held.id}/checkpoints", manifest).ok()["committed"] is True
    (view,) = api.checkpoints(held.id).values()
    assert (view["step"], view["epoch"], view["num_files"]) == (100, 1, 3)
    assert (view["total_bytes"], view["new_bytes"]) == (21, 14)
    assert view["current"] and view["metrics"] == {"loss": 0.5}
    assert api.job(held.id)["checkpoint_step"] == 100
    assert sorted(api.objects()) == sorted([pack(b"weights"), pack(b"moments"), view["manifest_key"]])
    read = api.post(f"/job/{held.id}/checkpoints/100/urls", key="submit").ok()
    assert {api.send("GET", url).text for url in read["urls"].values()} == {"weights", "moments"}
    manifest = parse_manifest(api.send("GET", read["checkpoint"]["manifest_url"]).text.encode())
    assert (manifest.step, read["checkpoint"]["epoch"], read["checkpoint"]["total_bytes"]) == (100, 1, 21)
    assert blake3(manifest.canonical_bytes()).hexdigest() == read["checkpoint"]["manifest_blake3"]


def test_a_pack_that_is_stored_is_not_asked_for_again(api: Api, held: Held) -> None:
    held.commit(100, {"frozen.bin": b"same", "model.bin": b"1"}).ok()
    answer = held.post(f"/job/{held.id}/checkpoints", held.manifest(200, {"frozen.bin": b"same", "model.bin": b"2"}))
    assert [item["blake3"] for item in answer.ok()["missing"]] == [blake3(b"2").hexdigest()]


def test_other_bytes_are_refused_by_the_store_and_by_the_commit(api: Api, held: Held) -> None:
    manifest = held.manifest(100, {"model.bin": b"weights"})
    (missing,) = held.post(f"/job/{held.id}/checkpoints", manifest).ok()["missing"]
    assert api.send("PUT", missing["url"], missing["headers"], b"weighed").status == 400
    assert api.send("PUT", missing["url"], missing["headers"], b"weights!").status == 403
    # Even if they got there, the commit looks at what the store says of them.
    assert api.memory is not None
    for data in (b"weighed", b"short"):
        api.memory.objects.put(TENANT, CHECKPOINTS_BUCKET, pack(b"weights"), data)
        answer = held.post(f"/job/{held.id}/checkpoints", manifest).ok()
        assert answer["committed"] is False and len(answer["missing"]) == 1
    assert api.checkpoints(held.id) == {}
    (missing,) = answer["missing"]
    assert api.send("PUT", missing["url"], missing["headers"], b"weights").status == 200
    assert held.post(f"/job/{held.id}/checkpoints", manifest).ok()["committed"] is True


@pytest.mark.parametrize("declared", [{"crc64nvme": pack_of(b"others")["crc64nvme"]}, {"size_bytes": 8}])
def test_what_was_verified_is_never_replaced_whatever_is_declared_later(
    api: Api, held: Held, declared: dict[str, Any]
) -> None:
    held.commit(100, {"model.bin": b"weights"}).ok()
    api.submit()
    for other in (held, api.claim()):
        manifest = other.manifest(200, {"model.bin": b"weights"})
        wrong = [{**manifest["packs"][0], **declared}]
        with api.unchanged():
            answer = other.post(f"/job/{other.id}/checkpoints", {**manifest, "packs": wrong})
            answer.refused(ErrorCode.CHECKPOINT_CONFLICT, "packs")
    assert list(api.checkpoints(held.id)) == [100]


def test_the_same_commit_twice(api: Api, held: Held) -> None:
    held.commit(100).ok()
    with api.unchanged():
        manifest = held.manifest(100, {"model.bin": b"weights at 100"})
        again = held.post(f"/job/{held.id}/checkpoints", manifest).ok()
    assert again == {"committed": True, "step": 100, "epoch": 1, "missing": [], "more_missing": False}
    assert api.events(held.id).count("checkpoint.committed") == 1


def test_a_commit_is_repeated_by_its_bearer_only(api: Api, held: Held) -> None:
    held.commit(100).ok()
    manifest = held.manifest(100, {"model.bin": b"weights at 100"})
    commits = f"/job/{held.id}/checkpoints"
    with api.unchanged():
        held.post(commits, manifest, token="x" * 43).refused(ErrorCode.LEASE_LOST, "x-lease-token")
        held.post(commits, manifest, token=None).refused(ErrorCode.LEASE_REQUIRED, "x-lease-token")
        api.clock.advance(90)
        held.post(commits, manifest).refused(ErrorCode.LEASE_EXPIRED, "x-lease-token")


def test_other_contents_for_a_committed_step(api: Api, held: Held) -> None:
    held.commit(100).ok()
    with api.unchanged():
        held.commit(100, {"model.bin": b"others"}).refused(ErrorCode.CHECKPOINT_CONFLICT, "step")
        held.commit(100, metrics={"loss": 1.0}).refused(ErrorCode.CHECKPOINT_CONFLICT, "step")


def test_other_contents_than_an_interrupted_commit_left_behind(
    api: Api, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit of other contents is stored beside the manifest that an interrupted commit of the step has left."""

    def away(_: object) -> None:
        raise StorageUnavailable("no answer")

    with monkeypatch.context() as patched:
        patched.setattr(api.context.jobs, "apply", away)
        held.commit(100, {"model.bin": b"first"}).refused(ErrorCode.UNAVAILABLE)
    assert api.checkpoints(held.id) == {} and api.job(held.id)["checkpoint_step"] is None
    held.commit(100, {"model.bin": b"second"}).ok()
    with api.unchanged():
        held.commit(100, {"model.bin": b"first"}).refused(ErrorCode.CHECKPOINT_CONFLICT, "step")
    held.commit(101, {"model.bin": b"first"}).ok()
    for step, data in ((100, "second"), (101, "first")):
        urls = held.post(f"/job/{held.id}/checkpoints/{step}/urls").ok()["urls"]
        assert [api.send("GET", url).text for url in urls.values()] == [data]


@pytest.mark.parametrize("step", [0, 50, 99])
def test_a_step_that_goes_back(api: Api, held: Held, step: int) -> None:
    held.commit(100).ok()
    with api.unchanged():
        error = held.commit(step).refused(ErrorCode.STEP_NOT_NEWER, "step")
        assert "step 100" in error["message"]


def test_step_0_is_a_step(api: Api, held: Held) -> None:
    held.commit(0).ok()
    held.release().ok()
    assert [ref["step"] for ref in api.claim().item["resume"]] == [0]


ESCAPES = ["../x", "/etc/passwd", "a/../../x", "a//b", ".", "..", "a/", "", "a\\b", "a\0b", "a\nb", "x" * 901]


@pytest.mark.parametrize("path", ESCAPES, ids=lambda path: ascii(path[:12]))
def test_a_path_that_leaves_the_directory(api: Api, held: Held, path: str) -> None:
    with api.unchanged():
        manifest = held.manifest(100, {path: b"x"})
        held.post(f"/job/{held.id}/checkpoints", manifest).refused(ErrorCode.INVALID_KEY, "files.0.path")
        declared = {"artifacts": [described(path, b"x")]}
        held.post(f"/job/{held.id}/artifacts", declared).refused(ErrorCode.INVALID_KEY, "artifacts.0.path")
        held.post("/complete", {"job_id": held.id, **declared}).refused(ErrorCode.INVALID_KEY, "artifacts.0.path")


FILE = {"path": "a", "size_bytes": 1, "chunks": [0]}
BAD_MANIFESTS: list[tuple[dict[str, Any], ErrorCode, str | None]] = [
    ({"files": []}, ErrorCode.INVALID_VALUE, "files"),
    ({"files": [FILE, FILE]}, ErrorCode.INVALID_VALUE, None),
    ({"files": [FILE, FILE | {"path": "a/b"}]}, ErrorCode.INVALID_VALUE, None),
    ({"files": [FILE | {"size_bytes": -1}]}, ErrorCode.INVALID_VALUE, "files.0.size_bytes"),
    ({"files": [FILE | {"size_bytes": 2}]}, ErrorCode.INVALID_VALUE, None),
    ({"files": [FILE | {"chunks": [1]}]}, ErrorCode.INVALID_VALUE, None),
    ({"files": [FILE | {"blake3": "a" * 64}]}, ErrorCode.UNKNOWN_FIELD, "files.0.blake3"),
    ({"packs": [pack_of(b"x") | {"blake3": "A" * 64}]}, ErrorCode.INVALID_VALUE, "packs.0.blake3"),
    ({"packs": [pack_of(b"x") | {"crc64nvme": "AAAA"}]}, ErrorCode.INVALID_VALUE, "packs.0.crc64nvme"),
    ({"packs": [pack_of(b"x"), pack_of(b"y")]}, ErrorCode.INVALID_VALUE, None),
    ({"packs": [pack_of(b"x") | {"size_bytes": 0}]}, ErrorCode.INVALID_VALUE, None),
    ({"step": -1}, ErrorCode.INVALID_VALUE, "step"),
    ({"step": 10**13}, ErrorCode.INVALID_VALUE, "step"),
    ({"version": 3}, ErrorCode.INVALID_VALUE, "version"),
    ({"version": [2]}, ErrorCode.INVALID_VALUE, "version"),
    ({"version": None}, ErrorCode.INVALID_VALUE, "version"),
    ({"metrics": {"loss": "low"}}, ErrorCode.INVALID_VALUE, "metrics.loss"),
]


@pytest.mark.parametrize(("part", "code", "field"), BAD_MANIFESTS)
def test_a_manifest_that_cannot_be_one(
    api: Api, held: Held, part: dict[str, Any], code: ErrorCode, field: str | None
) -> None:
    manifest = {**held.manifest(100, {"model.bin": b"x"}), **part}
    with api.unchanged():
        held.post(f"/job/{held.id}/checkpoints", manifest).refused(code, field)


def test_more_packs_than_one_answer_names(api: Api, held: Held) -> None:
    manifest = held.manifest(100, {f"{n}.bin": b"%d" % n for n in range(1001)})
    answer = held.post(f"/job/{held.id}/checkpoints", manifest).ok()
    assert len(answer["missing"]) == 1000 and answer["more_missing"] is True


def test_a_claim_names_what_to_resume_from_newest_first(api: Api, held: Held) -> None:
    for step in (100, 200, 300, 400):
        held.commit(step).ok()
    held.release().ok()
    second = api.claim()
    assert [(ref["step"], ref["epoch"]) for ref in second.item["resume"]] == [(400, 1), (300, 1), (200, 1)]
    newest = second.item["resume"][0]
    data = api.send("GET", newest["manifest_url"]).text.encode()
    assert blake3(data).hexdigest() == newest["manifest_blake3"]
    urls = second.post(f"/job/{held.id}/checkpoints/400/urls").ok()["urls"]
    assert {api.send("GET", url).text for url in urls.values()} == {"weights at 400"}
    second.commit(500).ok()
    assert api.checkpoints(held.id)[500]["epoch"] == 2


def test_urls_are_given_for_named_packs_of_that_checkpoint(api: Api, held: Held) -> None:
    held.commit(100, {"a": b"a", "b": b"b"}).ok()
    digest = blake3(b"a").hexdigest()
    answer = api.post(f"/job/{held.id}/checkpoints/100/urls", {"blake3": [digest]}, key="submit").ok()
    assert list(answer["urls"]) == [digest] and answer["expires_at"] == NOW + 900
    with api.unchanged():
        api.post(f"/job/{held.id}/checkpoints/101/urls", key="submit").refused(ErrorCode.CHECKPOINT_NOT_FOUND, "step")
        unknown = {"blake3": ["0" * 64]}
        api.post(f"/job/{held.id}/checkpoints/100/urls", unknown, key="submit").refused(
            ErrorCode.INVALID_VALUE, "blake3"
        )


def test_a_damaged_newest_checkpoint_makes_way_for_the_one_before(api: Api, held: Held) -> None:
    for step in (100, 200, 300):
        held.commit(step).ok()
    held.release().ok()
    second = api.claim(machine_id="m-2")
    report = f"/job/{held.id}/checkpoints/300/damaged"
    assert second.post(report, {"epoch": 1, "message": "blob 3f has other bytes"}).ok() == {"status": "ok"}
    views = api.checkpoints(held.id)
    assert views[300]["damaged"] and not views[300]["current"] and views[200]["current"]
    assert api.job(held.id)["checkpoint_step"] == 200
    assert [one.get("resumed_step") for one in api.attempts(held.id)] == [None, 200], "what it did resume from"
    second.commit(250).ok()
    second.release().ok()
    assert [ref["step"] for ref in api.claim().item["resume"]] == [250, 200, 100]


def test_when_every_checkpoint_is_damaged_the_job_begins_anew(api: Api, held: Held) -> None:
    for step in (100, 200):
        held.commit(step).ok()
    for step in (200, 100):
        held.post(f"/job/{held.id}/checkpoints/{step}/damaged", {"epoch": 1}).ok()
    assert api.job(held.id)["checkpoint_step"] is None
    held.release().ok()
    second = api.claim()
    assert second.item["resume"] == []
    second.commit(50).ok()
    assert api.job(held.id)["checkpoint_step"] == 50


def test_only_a_checkpoint_that_exists_can_be_damaged(api: Api, held: Held) -> None:
    held.commit(100).ok()
    with api.unchanged():
        for step, epoch in ((101, 1), (100, 2)):
            answer = held.post(f"/job/{held.id}/checkpoints/{step}/damaged", {"epoch": epoch})
            answer.refused(ErrorCode.CHECKPOINT_NOT_FOUND, "step")


def test_a_damaged_step_can_be_committed_again_by_the_next_attempt(api: Api, held: Held) -> None:
    held.commit(100, {"model.bin": b"weights"}).ok()
    assert api.memory is not None
    api.memory.objects.put(TENANT, CHECKPOINTS_BUCKET, pack(b"weights"), b"rotten.")
    held.release().ok()
    second = api.claim()
    second.post(f"/job/{held.id}/checkpoints/100/damaged", {"epoch": 1}).ok()
    second.commit(100, {"model.bin": b"weights"}).ok()
    assert api.objects()[pack(b"weights")] == b"weights"
    view = api.checkpoints(held.id)[100]
    assert view["epoch"] == 2 and view["current"] and not view["damaged"]


def test_a_running_attempt_shows_what_it_has_committed(api: Api) -> None:
    api.submit()
    held = api.claim()
    assert api.attempts(held.id)[0].get("checkpoint_step") is None
    held.commit(10).ok()
    held.commit(20).ok()
    assert api.attempts(held.id)[0]["checkpoint_step"] == 20
    held.post(f"/job/{held.id}/checkpoints/20/damaged", {"epoch": 1}).ok()
    assert api.attempts(held.id)[0]["checkpoint_step"] == 10
    held.release().ok()
    second = api.claim(machine_id="m-2")
    assert [one.get("checkpoint_step") for one in api.attempts(held.id)] == [10, None]
    second.commit(30).ok()
    assert [one.get("checkpoint_step") for one in api.attempts(held.id)] == [10, 30]
