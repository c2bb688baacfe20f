"""Multipart uploads of files and outputs: begun, interrupted, resumed, altered, overtaken, completed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from blake3 import blake3

from baton.contract.base import MAX_OBJECT_BYTES
from baton.contract.errors import ErrorCode
from baton.contract.objects.parts import MAX_PARTED_BYTES, count_parts, part_bytes_of
from functions.api.objects import multipart_uploads as parts_api
from functions.local.emulator import Emulator
from functions.settings import ControlPlaneSettings
from tests.kits.api.harness import TENANT, Answer, Api, Held, emulated_api, memory_api
from tests.kits.files.declared_files import PART, checksum, declared, large, pieces
from tests.twins import objects

DATA, CHECKPOINTS = "training-data", "training-checkpoints"
FILE = large(3)


@pytest.fixture(params=["memory", pytest.param("emulated", marks=pytest.mark.emulator)])
def api(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    monkeypatch.setattr(objects, "crc64nvme_of", checksum)  # the twin's own takes a second for a part
    if request.param == "memory":
        yield memory_api()
    else:
        emulator: Emulator = request.getfixturevalue("emulator")
        yield emulated_api(emulator)


def ask(api: Api, files: Sequence[dict[str, Any]], bucket: str = DATA) -> dict[str, Any]:
    answer: dict[str, Any] = api.post("/uploads", {"bucket": bucket, "files": files}).ok()
    return answer


def numbers(answer: dict[str, Any], key: str = "k") -> list[int]:
    return [target["part"] for target in answer["uploads"] if target["key"] == key]


def put(api: Api, answer: dict[str, Any], data: bytes, *, only: Sequence[int] = range(1, 100)) -> None:
    for target in answer["uploads"]:
        if target["part"] in only:
            sent = api.send("PUT", target["url"], target["headers"], pieces(data)[target["part"] - 1])
            assert sent.status == 200, sent.text


def stored(api: Api, key: str = "k", bucket: str = DATA) -> bytes | None:
    return api.context.objects.read(TENANT, bucket, key)


def test_a_file_goes_up_in_parts_and_exists_when_all_are_there(api: Api) -> None:
    wanted = [declared(FILE, key="k")]
    answer = ask(api, wanted)
    assert (answer["pending"], numbers(answer)) == (["k"], [1, 2, 3])
    put(api, answer, FILE)
    assert stored(api) is None, "parts are no object"
    assert ask(api, wanted) == {"uploads": [], "expires_at": answer["expires_at"], "pending": []}
    found = api.context.objects.head(TENANT, DATA, "k")
    assert found is not None and (found.size_bytes, found.crc64nvme) == (len(FILE), checksum(FILE))
    assert stored(api) == FILE
    # again: its answer was lost, or the same file is pushed once more
    assert ask(api, wanted)["pending"] == []
    assert list(api.context.objects.multiparts(TENANT, DATA, "k")) == []


def test_whoever_asks_again_is_told_the_parts_that_are_not_stored(api: Api) -> None:
    wanted = [declared(FILE, key="k")]
    put(api, ask(api, wanted), FILE, only=[2])
    answer = ask(api, wanted)
    assert (answer["pending"], numbers(answer)) == (["k"], [1, 3])
    assert len(api.context.objects.multiparts(TENANT, DATA, "k")) == 1, "it is the same upload"
    put(api, answer, FILE, only=[1])
    assert numbers(ask(api, wanted)) == [3]
    put(api, ask(api, wanted), FILE)
    assert ask(api, wanted)["pending"] == []
    assert stored(api) == FILE


def test_other_bytes_than_declared_are_refused_by_the_store(api: Api) -> None:
    answer = ask(api, [declared(FILE, key="k")])
    for target in answer["uploads"]:
        piece = bytearray(pieces(FILE)[target["part"] - 1])
        piece[0] ^= 1
        assert api.send("PUT", target["url"], target["headers"], bytes(piece)).status == 400
        longer = {name: value for name, value in target["headers"].items() if name != "content-length"}
        assert api.send("PUT", target["url"], longer, bytes(piece) + b"!").status in (400, 403)
    assert numbers(ask(api, [declared(FILE, key="k")])) == [1, 2, 3]


def test_parts_that_are_not_the_file_are_never_completed(api: Api) -> None:
    lying = declared(FILE, key="k") | {"crc64nvme": checksum(b"something else")}
    put(api, ask(api, [lying]), FILE)
    said = api.post("/uploads", {"bucket": DATA, "files": [lying]})
    said.refused(ErrorCode.DIGEST_MISMATCH)
    assert stored(api) is None


def test_a_file_that_changed_is_begun_anew_and_nothing_of_the_old_one_is_in_it(api: Api) -> None:
    other = large(3, seed=2)
    put(api, ask(api, [declared(FILE, key="k")]), FILE)
    answer = ask(api, [declared(other, key="k")])
    assert numbers(answer) == [1, 2, 3], "the parts of the old one are others"
    put(api, answer, other)
    assert ask(api, [declared(other, key="k")])["pending"] == []
    assert stored(api) == other
    # the old one can be gone on with as well, and then is what was uploaded last
    assert ask(api, [declared(FILE, key="k")])["pending"] == []
    assert stored(api) == FILE


def test_a_file_that_grew_shorter_does_not_get_the_parts_behind_its_end(api: Api) -> None:
    shorter = FILE[: 2 * PART]
    put(api, ask(api, [declared(FILE, key="k")]), FILE)
    answer = ask(api, [declared(shorter, key="k")])
    assert numbers(answer) == [1, 2]
    put(api, answer, shorter)
    assert ask(api, [declared(shorter, key="k")])["pending"] == []
    assert stored(api) == shorter


def test_two_who_push_the_same_file_help_each_other(api: Api) -> None:
    wanted = [declared(FILE, key="k")]
    mine, theirs = ask(api, wanted), ask(api, wanted)
    put(api, mine, FILE, only=[1])
    put(api, theirs, FILE, only=[1, 2])
    put(api, ask(api, wanted), FILE)
    assert ask(api, wanted)["pending"] == []
    # that upload has ended under the slower one: it asks again, and is done
    late = theirs["uploads"][2]
    refused = api.send("PUT", late["url"], late["headers"], pieces(FILE)[2])
    assert refused.status == 404 and "NoSuchUpload" in refused.text
    assert ask(api, wanted)["pending"] == []
    assert stored(api) == FILE


def test_large_and_small_files_in_one_call(api: Api) -> None:
    small = {"key": "s", "size_bytes": 1, "crc64nvme": checksum(b"s")}
    answer = ask(api, [small, declared(FILE, key="k")])
    assert [target["part"] for target in answer["uploads"] if target["key"] == "s"] == [None]
    assert (answer["pending"], numbers(answer)) == (["k"], [1, 2, 3])


def test_a_call_names_so_many_parts_and_looks_at_so_many_files(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {key: large(3, seed=seed) for seed, key in enumerate("abcd")}
    wanted = [declared(data, key=key) for key, data in files.items()]
    monkeypatch.setattr(parts_api, "MAX_PART_URLS", 5)
    answer = ask(api, wanted)
    assert [(target["key"], target["part"]) for target in answer["uploads"]] == [
        ("a", 1), ("a", 2), ("a", 3), ("b", 1), ("b", 2),
    ]  # fmt: skip
    assert answer["pending"] == ["a", "b", "c", "d"]
    assert list(api.context.objects.multiparts(TENANT, DATA, "c")) == [], "not even begun"
    monkeypatch.setattr(parts_api, "MAX_PART_URLS", 100)
    monkeypatch.setattr(parts_api, "MAX_CHECKS", 3)
    answer = ask(api, wanted)
    assert answer["pending"] == ["a", "b", "c", "d"]
    assert {target["key"] for target in answer["uploads"]} == {"a", "b", "c"}
    rounds = 0
    while answer["pending"]:
        for target in answer["uploads"]:
            piece = pieces(files[target["key"]])[target["part"] - 1]
            assert api.send("PUT", target["url"], target["headers"], piece).status == 200
        answer = ask(api, [one for one in wanted if one["key"] in answer["pending"]])
        rounds += 1
        assert rounds < 6
    assert {key: stored(api, key) for key in files} == files


def test_a_store_that_cannot_gets_one_upload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "crc64nvme_of", checksum)
    api = memory_api(settings=ControlPlaneSettings(multipart=False))
    (target,) = ask(api, [declared(FILE, key="k")])["uploads"]
    assert target["part"] is None
    assert api.send("PUT", target["url"], target["headers"], FILE).status == 200
    held = training(api)
    (missing,) = declare(held, {"model": FILE}).ok()["missing"]
    assert missing["part"] is None
    assert api.send("PUT", missing["url"], missing["headers"], FILE).status == 200
    assert declare(held, {"model": FILE}).ok() == {"missing": [], "pending": []}


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"crc64nvme": [checksum(b"")] * 2}, "files.0"),
        ({"crc64nvme": [checksum(b"")] * 4}, "files.0"),
        ({"part_bytes": PART - 1}, "files.0.parts.part_bytes"),
        ({"part_bytes": 5 * 1024**3 + 1}, "files.0.parts.part_bytes"),
        ({"crc64nvme": []}, "files.0.parts.crc64nvme"),
        ({"crc64nvme": ["AAAA"] * 3}, "files.0.parts.crc64nvme.0"),
        ({"crc64nvme": [checksum(b"")] * 10_001}, "files.0.parts.crc64nvme"),
    ],
)
def test_parts_that_cannot_be_are_refused(changed: dict[str, Any], field: str) -> None:
    api = memory_api()
    wrong = declared(FILE, key="k")
    wrong["parts"] |= changed
    with api.unchanged():
        refused = api.post("/uploads", {"bucket": DATA, "files": [wrong]})
        assert refused.status in (400, 422), refused.text
        assert refused.error["field"] == field
    assert list(api.context.objects.multiparts(TENANT, DATA, "k")) == []


def huge(size_bytes: int, **named: str) -> dict[str, Any]:
    """A file without a stored byte."""
    part_bytes = part_bytes_of(size_bytes)
    crcs = [checksum(b"")] * count_parts(size_bytes, part_bytes)
    return {**declared(b"x" * (PART + 1), **named), "size_bytes": size_bytes} | {
        "parts": {"part_bytes": part_bytes, "crc64nvme": crcs}
    }


def test_what_one_put_cannot_carry_goes_up_in_parts() -> None:
    api = memory_api()
    for size_bytes in (MAX_OBJECT_BYTES + 1, MAX_PARTED_BYTES):
        answer = ask(api, [huge(size_bytes, key="k")])
        parts = count_parts(size_bytes, part_bytes_of(size_bytes))
        assert numbers(answer) == list(range(1, min(parts, 256) + 1))
        assert int(answer["uploads"][0]["headers"]["content-length"]) == part_bytes_of(size_bytes)
    too_large = api.post("/uploads", {"bucket": DATA, "files": [huge(MAX_PARTED_BYTES + 1, key="k")]})
    too_large.refused(ErrorCode.INVALID_VALUE, "files.0.size_bytes")


@pytest.mark.parametrize("multipart", [True, False])
def test_what_one_put_cannot_carry_is_refused_without_parts(multipart: bool) -> None:
    api = memory_api(settings=ControlPlaneSettings(multipart=multipart))
    file = huge(MAX_OBJECT_BYTES + 1, key="k")
    output = huge(MAX_OBJECT_BYTES + 1, path="model", blake3="0" * 64)
    if multipart:
        del file["parts"], output["parts"]
    held = training(api)
    with api.unchanged():
        refused = api.post("/uploads", {"bucket": DATA, "files": [file]})
        said = refused.refused(ErrorCode.INVALID_VALUE, "files.0.size_bytes")["message"]
        assert ("declare the file's parts" if multipart else "supports no parts") in said
        held.post(f"/job/{held.id}/artifacts", {"artifacts": [output]}).refused(
            ErrorCode.INVALID_VALUE, "artifacts.0.size_bytes"
        )
    assert ask(api, [{**file, "size_bytes": MAX_OBJECT_BYTES, "parts": None}])["pending"] == []


# Outputs of a job


def training(api: Api, **query: Any) -> Held:
    api.submit(outputs=["model"])
    return api.claim(**query)


def declare(held: Held, files: dict[str, bytes], **more: Any) -> Answer:
    artifacts = [declared(data, path=path, blake3=blake3(data).hexdigest()) for path, data in files.items()]
    return held.post(f"/job/{held.id}/artifacts", {"artifacts": artifacts}, **more)


def put_output(api: Api, answer: dict[str, Any], data: bytes, *, only: Sequence[int] = range(1, 100)) -> None:
    for target in answer["missing"]:
        if target["part"] in only:
            sent = api.send("PUT", target["url"], target["headers"], pieces(data)[target["part"] - 1])
            assert sent.status == 200, sent.text


def complete(held: Held, data: bytes) -> Answer:
    output = declared(data, path="model", blake3=blake3(data).hexdigest())
    del output["parts"]
    return held.post("/complete", {"job_id": held.id, "artifacts": [output]})


def test_an_output_goes_up_in_parts_and_the_job_is_complete(api: Api) -> None:
    held = training(api)
    answer = declare(held, {"model": FILE}).ok()
    assert [part["part"] for part in answer["missing"]] == [1, 2, 3]
    assert answer["pending"] == ["model"]
    put_output(api, answer, FILE, only=[1, 3])
    complete(held, FILE).refused(ErrorCode.NOT_STORED_YET, "artifacts.0")
    put_output(api, declare(held, {"model": FILE}).ok(), FILE)
    complete(held, FILE).refused(ErrorCode.NOT_STORED_YET, "artifacts.0")
    assert declare(held, {"model": FILE}).ok() == {"missing": [], "pending": []}
    complete(held, FILE).ok()
    (artifact,) = api.job(held.id)["artifacts"]
    assert (artifact["size_bytes"], artifact["crc64nvme"]) == (len(FILE), checksum(FILE))
    assert stored(api, artifact["key"], CHECKPOINTS) == FILE


def test_an_output_that_somebody_has_damaged_is_replaced(api: Api) -> None:
    held = training(api)
    key = f"jobs/{held.id}/artifacts/{held.epoch}/model"
    api.put_object(CHECKPOINTS, key, b"damaged")
    put_output(api, declare(held, {"model": FILE}).ok(), FILE)
    assert declare(held, {"model": FILE}).ok()["pending"] == []
    assert stored(api, key, CHECKPOINTS) == FILE


def test_an_output_that_was_written_meanwhile_is_looked_at_again(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look and the completion: create-only holds, and the next call sees what is there."""
    held = training(api)
    key = f"jobs/{held.id}/artifacts/{held.epoch}/model"
    put_output(api, declare(held, {"model": FILE}).ok(), FILE)
    whole = type(api.context.objects).complete_checksummed

    def overtaken(self: Any, *place: Any, **more: Any) -> str | None:
        if stored(api, key, CHECKPOINTS) is None:
            api.put_object(CHECKPOINTS, key, FILE)
        return whole(self, *place, **more)

    monkeypatch.setattr(type(api.context.objects), "complete_checksummed", overtaken)
    assert declare(held, {"model": FILE}).ok() == {"missing": [], "pending": ["model"]}
    assert stored(api, key, CHECKPOINTS) == FILE


def test_a_lost_attempt_completes_nothing(api: Api) -> None:
    held = training(api)
    put_output(api, declare(held, {"model": FILE}).ok(), FILE)
    api.clock.advance(10_000)
    api.sweep()
    again = api.claim(machine_id="m-2")
    assert again.id == held.id
    declare(held, {"model": FILE}).refused(ErrorCode.LEASE_LOST, "x-lease-token")
    assert api.context.objects.head(TENANT, CHECKPOINTS, f"jobs/{held.id}/artifacts/{held.epoch}/model") is None
    answer = declare(again, {"model": FILE}).ok()
    assert [part["part"] for part in answer["missing"]] == [1, 2, 3], "outputs of one attempt are not another's"
