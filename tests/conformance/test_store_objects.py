"""ObjectStore: what every implementation does alike, and what S3 itself enforces of a presigned request."""

from __future__ import annotations

import base64
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from awscrt.checksums import crc64nvme

from baton.contract.errors import ErrorCode
from functions.domain.errors import Refusal
from functions.domain.ports import Presigned
from functions.domain.table_keys import object_key
from functions.storage.clients import s3_client
from functions.storage.s3.object_headers import EXPIRING_TAG
from functions.storage.s3.objects import S3ObjectStore
from tests.conformance.store_kit import TENANT
from tests.kits.clouds.emulator import CREDENTIALS
from tests.kits.clouds.paging import all_pages
from tests.kits.clouds.second_store import SecondStore
from tests.kits.clouds.store_sets import Cloud, memory_cloud, moto_cloud
from tests.twins.objects import MemoryObjectStore

DATA = "training-data"
CHECKPOINTS = "training-checkpoints"
AWKWARD_KEYS = [
    "plain.png",
    "with space/and  two",
    "colon:plus+percent%25hash#question?amp&equals=",
    "%2F%2e%2e/a",
    "\u00fcml\u00e4ut/\u65e5\u672c\u8a9e/\U0001f600.png",
    "e\u0301 decomposed",
    "tilde~star*quote'paren(bracket[brace{pipe|caret^tick`lt<gt>\"",
    "jobs/x/artifacts/1/" + "k" * 900,
    "a;b,c@d!e$f",
    "trailing./dots..x",
]


def checksum(data: bytes) -> str:
    return base64.b64encode(crc64nvme(data).to_bytes(8, "big")).decode()


def request(
    cloud: Cloud, method: str, url: str, headers: Mapping[str, str] | None = None, data: bytes | None = None
) -> tuple[int, dict[str, str], bytes]:
    """Send a request without AWS code; return status, headers and body of the answer."""
    if isinstance(cloud.objects, MemoryObjectStore):
        return cloud.objects.request(method, url, headers, data or b"")
    sent = urllib.request.Request(url, data=data, headers=dict(headers or {}), method=method)
    if data is not None:
        # urllib would add one of its own, which is not part of the signature.
        sent.add_header("Content-Type", "application/octet-stream")
    try:
        with urllib.request.urlopen(sent, timeout=20) as answer:
            return answer.status, {name.lower(): value for name, value in answer.headers.items()}, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, {}, error.read()


def presigned_put(cloud: Cloud, key: str, data: bytes, **more: Any) -> Presigned:
    return cloud.objects.presign_put(
        TENANT, DATA, key, expires_s=60, size_bytes=len(data), crc64nvme=checksum(data), **more
    )


EMULATED = pytest.param("ministack", marks=pytest.mark.emulator)
RCLONE = pytest.param("rclone", marks=pytest.mark.processes)
LACKING = {
    "test_an_object_is_created_once_and_read_back": "ignores If-None-Match",
    "test_a_second_create_is_refused_by_the_store": "ignores If-None-Match",
    "test_an_object_is_replaced_only_where_it_is_the_one_that_was_seen": "ignores If-Match",
    "test_altered_bytes_are_refused_by_the_store": "keeps the checksum as it was claimed and never computes it",
    "test_a_key_may_go_on_behind_another_one": "keys are paths of files: none can be a folder as well",
    "test_a_multipart_upload": "forgets that an object was made of parts: its ETag changes",
    "test_wrong_parts_are_refused_and_the_upload_goes_on": "takes parts in any order, and twice",
    "test_parts_are_listed_with_their_checksums_and_make_an_object_with_one": "does not list checksums of parts",
    "test_a_part_with_other_bytes_is_refused_by_the_store": "does not look at checksums of parts",
    "test_parts_of_another_object_are_refused_and_the_upload_goes_on": "does not look at the checksum of the whole",
    "test_an_object_that_is_there_is_not_made_anew": "ignores If-None-Match of a completion",
    "test_an_object_is_replaced_only_where_it_is_the_one_that_was_seen_by_parts_too": "ignores If-Match, too",
    "test_a_part_that_was_sent_anew_meanwhile_is_not_taken_for_the_one_that_was_listed": "takes no part twice",
    "test_uploads_of_a_key_are_found_and_those_of_longer_keys_are_not": "answers 404 where no upload is under way",
}
"""Tests that rclone's server fails, with the reason: docs/decisions/0005. A deployment requires the first four."""


@pytest.fixture(params=["memory", "moto", EMULATED, RCLONE])
def cloud(request: pytest.FixtureRequest) -> Iterator[Cloud]:
    """The stores, on each of what can be beneath them."""
    yield from on_each(request)


@pytest.fixture(params=["memory", EMULATED, RCLONE])
def enforcing(request: pytest.FixtureRequest) -> Iterator[Cloud]:
    """The stores that look at signatures and checksums; moto does not."""
    yield from on_each(request)


def on_each(request: pytest.FixtureRequest) -> Iterator[Cloud]:
    if request.param == "memory":
        yield memory_cloud()
    elif request.param == "moto":
        with moto_cloud() as made:
            yield made
    elif request.param == "ministack":
        yield request.getfixturevalue("ministack")
    else:
        store: SecondStore = request.getfixturevalue("second_store")
        lacking = LACKING.get(request.function.__name__)
        if lacking is not None:
            request.applymarker(pytest.mark.xfail(reason=lacking, strict=True))
        yield store.cloud()


def test_an_object_is_created_once_and_read_back(cloud: Cloud) -> None:
    objects = cloud.objects
    assert objects.create(TENANT, DATA, "a/b.json", b"first")
    assert not objects.create(TENANT, DATA, "a/b.json", b"second")
    assert objects.read(TENANT, DATA, "a/b.json") == b"first"
    assert objects.create(TENANT, DATA, "a/c.json", b"")
    assert objects.read_many(TENANT, DATA, ["a/c.json", "no", "a/b.json"]) == {"a/b.json": b"first", "a/c.json": b""}
    stored = objects.head(TENANT, DATA, "a/b.json")
    assert stored is not None
    assert (stored.key, stored.size_bytes, stored.etag) == ("a/b.json", 5, "8b04d5e3775d298e78455efc5ca404d5")
    assert stored.modified_at >= 0


def test_what_does_not_exist(cloud: Cloud) -> None:
    objects = cloud.objects
    assert objects.read(TENANT, DATA, "no") is None
    assert objects.head(TENANT, DATA, "no") is None
    assert objects.read_many(TENANT, DATA, []) == {}
    assert objects.read_many(TENANT, DATA, ["no", "nor this"]) == {}
    assert objects.head_many(TENANT, DATA, []) == {}
    assert objects.head_many(TENANT, DATA, ["no", "nor this"]) == {}
    assert list(objects.list(TENANT, DATA, "", limit=5).items) == []
    objects.delete(TENANT, DATA, "no")
    objects.delete_many(TENANT, DATA, ["no", "nor this"])
    objects.delete_many(TENANT, DATA, [])


def test_an_empty_object(cloud: Cloud) -> None:
    assert cloud.objects.create(TENANT, DATA, "empty", b"")
    assert cloud.objects.read(TENANT, DATA, "empty") == b""
    stored = cloud.objects.head(TENANT, DATA, "empty")
    assert stored is not None
    assert stored.size_bytes == 0


def test_tenants_and_buckets_are_apart(cloud: Cloud) -> None:
    objects = cloud.objects
    objects.create(TENANT, DATA, "k", b"1")
    assert objects.head("other", DATA, "k") is None
    assert objects.head(TENANT, CHECKPOINTS, "k") is None
    assert list(objects.list("acm", DATA, "", limit=5).items) == []
    assert list(objects.list("acme2", DATA, "", limit=5).items) == []
    objects.delete("other", DATA, "k")
    assert objects.read(TENANT, DATA, "k") == b"1"


def test_an_unknown_bucket_is_refused(cloud: Cloud) -> None:
    objects = cloud.objects
    calls: list[Callable[[], object]] = [
        lambda: objects.head(TENANT, "b", "k"),
        lambda: objects.list(TENANT, "b", "", limit=1),
        lambda: objects.read(TENANT, "b", "k"),
        lambda: objects.create(TENANT, "b", "k", b""),
        lambda: objects.delete(TENANT, "b", "k"),
        lambda: objects.presign_get(TENANT, "b", "k", expires_s=9),
        lambda: objects.presign_put(TENANT, "b", "k", expires_s=9),
        lambda: objects.create_multipart(TENANT, "b", "k"),
        lambda: objects.abort_multipart(TENANT, "b", "k", "u"),
        lambda: objects.put_part(TENANT, "b", "k", "u", 1, data=b"x"),
    ]
    for call in calls:
        with pytest.raises(Refusal) as refused:
            call()
        assert (refused.value.code, refused.value.field) == (ErrorCode.UNKNOWN_BUCKET, "bucket")


def test_many_objects_are_looked_up_and_deleted_at_once(cloud: Cloud) -> None:
    keys = [f"blobs/{n}" for n in range(40)]
    for key in keys[::2]:
        cloud.objects.create(TENANT, CHECKPOINTS, key, key.encode())
    found = cloud.objects.head_many(TENANT, CHECKPOINTS, [*keys, keys[0]])
    assert list(found) == keys[::2]
    assert all(found[key].size_bytes == len(key) for key in found)
    cloud.objects.delete_many(TENANT, CHECKPOINTS, keys[:30])
    left = [stored.key for stored in cloud.objects.list(TENANT, CHECKPOINTS, "blobs/", limit=50).items]
    assert left == sorted(keys[30::2])


@pytest.mark.parametrize("limit", [1, 2, 4, 100])
def test_pages_of_objects_join_to_the_whole(cloud: Cloud, limit: int) -> None:
    keys = ["d/a.x", "d/a b", "d/a/x", "d/b", "d/\u00fc", "d/\U0001f600"]
    for key in [*keys, "c", "d.x", "e/f"]:
        cloud.objects.create(TENANT, DATA, key, b"1")
    found = all_pages(lambda cursor: cloud.objects.list(TENANT, DATA, "d/", limit=limit, cursor=cursor), full=limit)
    assert [stored.key for stored in found] == sorted(keys)
    assert all(stored.crc64nvme is None and stored.size_bytes == 1 for stored in found)


def test_a_key_may_go_on_behind_another_one(cloud: Cloud) -> None:
    for key in ("d", "d/a", "d/a/x"):
        assert cloud.objects.create(TENANT, DATA, key, key.encode())
    assert [stored.key for stored in cloud.objects.list(TENANT, DATA, "d/", limit=5).items] == ["d/a", "d/a/x"]
    assert cloud.objects.read(TENANT, DATA, "d/a") == b"d/a"


def test_a_list_begins_behind_a_key(cloud: Cloud) -> None:
    for key in ("p/1", "p/2", "p/3", "q/1"):
        cloud.objects.create(TENANT, DATA, key, b"")

    def after(key: str | None, **more: Any) -> list[str]:
        page = cloud.objects.list(TENANT, DATA, "p/", limit=9, after=key, **more)
        return [stored.key for stored in page.items]

    assert after("p/1") == ["p/2", "p/3"]
    assert after("p/15") == ["p/2", "p/3"]
    assert after("a") == ["p/1", "p/2", "p/3"]
    assert after("p/3") == []
    first = cloud.objects.list(TENANT, DATA, "p/", limit=1, after="p/1")
    assert [stored.key for stored in first.items] == ["p/2"]
    assert after("p/1", cursor=first.cursor) == ["p/3"]
    with pytest.raises(Refusal):
        cloud.objects.list(TENANT, DATA, "q/", limit=1, cursor=first.cursor)
    with pytest.raises(Refusal):
        cloud.objects.list("other", DATA, "p/", limit=1, cursor=first.cursor)
    with pytest.raises(Refusal):
        cloud.objects.list(TENANT, CHECKPOINTS, "p/", limit=1, cursor=first.cursor)


@pytest.mark.parametrize("key", AWKWARD_KEYS, ids=range(len(AWKWARD_KEYS)))
def test_awkward_keys_round_trip(enforcing: Cloud, key: str) -> None:
    objects, data = enforcing.objects, key.encode()
    presigned = presigned_put(enforcing, key, data, create_only=True)
    status, _, body = request(enforcing, "PUT", presigned.url, presigned.headers, data)
    assert (status, body) == (200, b"")
    assert objects.read(TENANT, DATA, key) == data
    assert request(enforcing, "GET", objects.presign_get(TENANT, DATA, key, expires_s=60))[::2] == (200, data)
    shown = objects.presign_get(TENANT, DATA, key, expires_s=60, content_type="image/png")
    status, headers, body = request(enforcing, "GET", shown)
    assert (status, headers["content-type"], body) == (200, "image/png", data)
    stored = objects.head(TENANT, DATA, key)
    assert stored is not None
    assert (stored.key, stored.size_bytes, stored.crc64nvme) == (key, len(data), checksum(data))
    assert objects.head_many(TENANT, DATA, [key, "other"]) == {key: stored}
    assert [found.key for found in objects.list(TENANT, DATA, "", limit=5).items] == [key]
    assert [found.key for found in objects.list(TENANT, DATA, key[:5], limit=5).items] == [key]
    assert list(objects.list(TENANT, DATA, "", limit=5, after=key).items) == []
    objects.delete_many(TENANT, DATA, [key])
    assert objects.head(TENANT, DATA, key) is None


def test_altered_bytes_are_refused_by_the_store(enforcing: Cloud) -> None:
    data = b"the real bytes"
    presigned = presigned_put(enforcing, "k", data)
    status, _, _ = request(enforcing, "PUT", presigned.url, presigned.headers, b"THE real bytes")
    assert status == 400
    assert enforcing.objects.head(TENANT, DATA, "k") is None


def test_another_length_is_refused_by_the_store(enforcing: Cloud) -> None:
    presigned = enforcing.objects.presign_put(TENANT, DATA, "k", expires_s=60, size_bytes=5)
    headers = {name: value for name, value in presigned.headers.items() if name != "content-length"}
    status, _, _ = request(enforcing, "PUT", presigned.url, headers, b"123456")
    assert status == 403
    assert enforcing.objects.head(TENANT, DATA, "k") is None
    assert request(enforcing, "PUT", presigned.url, headers, b"12345")[0] == 200


@pytest.mark.parametrize("left_out", ["x-amz-checksum-crc64nvme", "if-none-match"])
def test_a_signed_header_cannot_be_left_out_or_changed(enforcing: Cloud, left_out: str) -> None:
    presigned = presigned_put(enforcing, "k", b"data", create_only=True)
    without = {name: value for name, value in presigned.headers.items() if name != left_out}
    assert request(enforcing, "PUT", presigned.url, without, b"data")[0] == 403
    other = {**presigned.headers, left_out: checksum(b"else") if left_out.startswith("x") else '"etag"'}
    assert request(enforcing, "PUT", presigned.url, other, b"data")[0] == 403
    assert enforcing.objects.head(TENANT, DATA, "k") is None


def test_what_may_expire_is_stored_with_the_tag_that_a_lifecycle_goes_by(enforcing: Cloud) -> None:
    kept, expiring = presigned_put(enforcing, "kept", b"data"), presigned_put(enforcing, "gone", b"data", expiring=True)
    tag = dict([EXPIRING_TAG])
    assert set(expiring.headers.items()) - set(kept.headers.items()) == {("x-amz-tagging", "=".join(EXPIRING_TAG))}
    # The tag is part of the signature: a client cannot leave the tag out.
    assert request(enforcing, "PUT", expiring.url, kept.headers, b"data")[0] in (400, 403)
    for name, presigned, tags in (("kept", kept, {}), ("gone", expiring, tag)):
        assert request(enforcing, "PUT", presigned.url, presigned.headers, b"data")[0] == 200
        if enforcing.kind == "ministack":
            stored = {"Bucket": enforcing.buckets[DATA], "Key": object_key(TENANT, name)}
            found = enforcing.s3.get_object_tagging(**stored)["TagSet"]
            assert {one["Key"]: one["Value"] for one in found} == tags


def test_a_second_create_is_refused_by_the_store(enforcing: Cloud) -> None:
    presigned = presigned_put(enforcing, "k", b"data", create_only=True)
    assert request(enforcing, "PUT", presigned.url, presigned.headers, b"data")[0] == 200
    assert request(enforcing, "PUT", presigned.url, presigned.headers, b"data")[0] == 412
    assert not enforcing.objects.create(TENANT, DATA, "k", b"other")
    assert enforcing.objects.read(TENANT, DATA, "k") == b"data"


def test_an_object_is_replaced_only_where_it_is_the_one_that_was_seen(enforcing: Cloud) -> None:
    enforcing.objects.create(TENANT, DATA, "k", b"old")
    seen = enforcing.objects.head(TENANT, DATA, "k")
    assert seen is not None
    presigned = presigned_put(enforcing, "k", b"new", replace_etag=seen.etag)
    # Which version is part of the signature: it can neither be left out nor be changed.
    without = {name: value for name, value in presigned.headers.items() if name != "if-match"}
    for headers in (without, {**without, "if-match": "*"}):
        assert request(enforcing, "PUT", presigned.url, headers, b"new")[0] == 403
    assert enforcing.objects.read(TENANT, DATA, "k") == b"old"
    assert request(enforcing, "PUT", presigned.url, presigned.headers, b"new")[0] == 200
    assert request(enforcing, "PUT", presigned.url, presigned.headers, b"new")[0] == 412
    assert enforcing.objects.read(TENANT, DATA, "k") == b"new"
    gone = presigned_put(enforcing, "gone", b"new", replace_etag=seen.etag)
    assert request(enforcing, "PUT", gone.url, gone.headers, b"new")[0] in (404, 412)
    assert enforcing.objects.head(TENANT, DATA, "gone") is None


def test_a_url_is_good_for_one_object_and_one_method(enforcing: Cloud) -> None:
    enforcing.objects.create(TENANT, DATA, "k", b"data")
    url = enforcing.objects.presign_get(TENANT, DATA, "k", expires_s=60)
    assert request(enforcing, "GET", url)[0] == 200
    assert request(enforcing, "GET", url.replace("/k?", "/x?"))[0] == 403
    assert request(enforcing, "PUT", url, data=b"evil")[0] == 403
    assert enforcing.objects.read(TENANT, DATA, "k") == b"data"


def test_a_url_ends_with_its_life(ministack: Cloud) -> None:
    ministack.objects.create(TENANT, DATA, "k", b"data")
    url = ministack.objects.presign_get(TENANT, DATA, "k", expires_s=60)
    # Signed for a moment long past.
    aged = url.replace("X-Amz-Date=2", "X-Amz-Date=1")
    assert request(ministack, "GET", aged)[0] == 403


def test_urls_name_the_public_endpoint(ministack: Cloud) -> None:
    public = s3_client("https://s3.public.example:9443", **CREDENTIALS)
    objects = S3ObjectStore(ministack.s3, public, ministack.buckets)
    bucket = ministack.buckets[DATA]
    start = f"https://s3.public.example:9443/{bucket}/{TENANT}/k%20%2B?"
    assert objects.presign_get(TENANT, DATA, "k +", expires_s=60).startswith(start)
    assert objects.presign_put(TENANT, DATA, "k +", expires_s=60).url.startswith(start)
    assert objects.presign_part(TENANT, DATA, "k +", "u", 1, expires_s=60).url.startswith(start)


PART = 5 * 1024 * 1024


def uploaded(cloud: Cloud, key: str, parts: list[bytes]) -> tuple[str, list[tuple[int, str]]]:
    upload_id = cloud.objects.create_multipart(TENANT, DATA, key)
    etags = []
    for number, data in enumerate(parts, start=1):
        url = cloud.objects.presign_part(TENANT, DATA, key, upload_id, number, expires_s=60).url
        status, headers, _ = request(cloud, "PUT", url, data=data)
        assert status == 200
        etags.append((number, headers["etag"]))
    return upload_id, etags


@pytest.mark.parametrize("named", [True, False])
def test_a_multipart_upload(enforcing: Cloud, named: bool) -> None:
    parts = [b"a" * PART, b"b" * 10]
    upload_id, etags = uploaded(enforcing, "big file:1.zip", parts)
    assert enforcing.objects.head(TENANT, DATA, "big file:1.zip") is None
    chosen = [(number, etag.strip('"')) for number, etag in etags] if named else []
    etag = enforcing.objects.complete_multipart(TENANT, DATA, "big file:1.zip", upload_id, chosen)
    stored = enforcing.objects.head(TENANT, DATA, "big file:1.zip")
    assert stored is not None
    assert (stored.etag, stored.size_bytes) == (etag, PART + 10)
    assert enforcing.objects.read(TENANT, DATA, "big file:1.zip") == b"".join(parts)


def test_a_part_is_stored_with_its_bytes(enforcing: Cloud) -> None:
    objects = enforcing.objects
    upload_id = objects.create_multipart(TENANT, DATA, "k")
    etag = objects.put_part(TENANT, DATA, "k", upload_id, 1, data=b"a small part")
    assert etag is not None and '"' not in etag
    assert objects.put_part(TENANT, DATA, "another", upload_id, 1, data=b"x") is None
    assert objects.put_part(TENANT, DATA, "k", "no-such-upload", 1, data=b"x") is None
    assert objects.complete_multipart(TENANT, DATA, "k", upload_id, [(1, etag)]) is not None
    assert objects.read(TENANT, DATA, "k") == b"a small part"
    assert objects.put_part(TENANT, DATA, "k", upload_id, 1, data=b"x") is None


def test_wrong_parts_are_refused_and_the_upload_goes_on(enforcing: Cloud) -> None:
    upload_id, etags = uploaded(enforcing, "k", [b"a" * PART, b"b"])
    wrong: list[list[tuple[int, str]]] = [
        [(1, "0" * 32)],
        [(3, etags[0][1])],
        list(reversed(etags)),
        [etags[0], etags[0]],
        [(0, etags[0][1])],
        [(10_001, etags[0][1])],
    ]
    for parts in wrong:
        with pytest.raises(Refusal) as refused:
            enforcing.objects.complete_multipart(TENANT, DATA, "k", upload_id, parts)
        assert (refused.value.code, refused.value.field) == (ErrorCode.INVALID_VALUE, "parts")
    assert enforcing.objects.head(TENANT, DATA, "k") is None
    assert enforcing.objects.complete_multipart(TENANT, DATA, "k", upload_id, etags) is not None


def test_an_upload_without_parts_is_refused(cloud: Cloud) -> None:
    upload_id = cloud.objects.create_multipart(TENANT, DATA, "k")
    with pytest.raises(Refusal):
        cloud.objects.complete_multipart(TENANT, DATA, "k", upload_id, [])
    assert cloud.objects.head(TENANT, DATA, "k") is None


def test_an_upload_that_ended_is_not_found(enforcing: Cloud) -> None:
    objects = enforcing.objects
    upload_id = objects.create_multipart(TENANT, DATA, "k")
    assert objects.abort_multipart(TENANT, DATA, "k", upload_id)
    assert not objects.abort_multipart(TENANT, DATA, "k", upload_id)
    assert objects.complete_multipart(TENANT, DATA, "k", upload_id, [(1, "0" * 32)]) is None
    assert objects.complete_multipart(TENANT, DATA, "k", "no-such-upload", []) is None
    assert objects.head(TENANT, DATA, "k") is None
