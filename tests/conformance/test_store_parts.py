"""Objects of parts that are sent with their checksums: what every store does alike, and what S3 itself enforces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from baton.contract.errors import ErrorCode
from functions.domain.errors import Refusal
from functions.domain.ports import Presigned, StoredPart
from tests.conformance.store_kit import TENANT
from tests.conformance.test_store_objects import DATA, EMULATED, PART, RCLONE, checksum, on_each, request
from tests.kits.clouds.store_sets import Cloud, memory_cloud


@pytest.fixture(params=["memory", EMULATED, RCLONE])
def enforcing(request: pytest.FixtureRequest) -> Iterator[Cloud]:
    """The stores that look at signatures and checksums."""
    yield from on_each(request)


def begun(cloud: Cloud, key: str = "k") -> str:
    return cloud.objects.create_multipart(TENANT, DATA, key, checksummed=True)


def signed(cloud: Cloud, upload_id: str, number: int, data: bytes, key: str = "k") -> Presigned:
    return cloud.objects.presign_part(
        TENANT, DATA, key, upload_id, number, expires_s=60, size_bytes=len(data), crc64nvme=checksum(data)
    )


def send(cloud: Cloud, upload_id: str, parts: Sequence[bytes], key: str = "k") -> list[StoredPart]:
    """Store the parts; as they have to be listed then."""
    for number, data in enumerate(parts, start=1):
        put = signed(cloud, upload_id, number, data, key)
        assert request(cloud, "PUT", put.url, put.headers, data)[0] == 200
    stored = cloud.objects.stored_parts(TENANT, DATA, key, upload_id)
    assert stored is not None
    return list(stored)


def complete(cloud: Cloud, upload_id: str, parts: Sequence[StoredPart], whole: bytes, **more: Any) -> str | None:
    return cloud.objects.complete_checksummed(TENANT, DATA, "k", upload_id, parts, crc64nvme=checksum(whole), **more)


def test_parts_are_listed_with_their_checksums_and_make_an_object_with_one(enforcing: Cloud) -> None:
    data = [b"a" * PART, b"b" * 10]
    upload_id = begun(enforcing)
    assert list(enforcing.objects.stored_parts(TENANT, DATA, "k", upload_id) or ()) == []
    parts = send(enforcing, upload_id, data)
    assert [(part.number, part.size_bytes, part.crc64nvme) for part in parts] == [
        (1, PART, checksum(data[0])),
        (2, 10, checksum(data[1])),
    ]
    assert enforcing.objects.head(TENANT, DATA, "k") is None
    etag = complete(enforcing, upload_id, parts, b"".join(data))
    stored = enforcing.objects.head(TENANT, DATA, "k")
    assert stored is not None
    assert (stored.size_bytes, stored.etag) == (PART + 10, etag)
    assert stored.crc64nvme == checksum(b"".join(data)), "of the whole, not of its parts' checksums"
    assert enforcing.objects.read(TENANT, DATA, "k") == b"".join(data)


def test_a_part_with_other_bytes_is_refused_by_the_store(enforcing: Cloud) -> None:
    upload_id = begun(enforcing)
    put = signed(enforcing, upload_id, 1, b"the real bytes")
    assert request(enforcing, "PUT", put.url, put.headers, b"THE real bytes")[0] == 400
    longer = {name: value for name, value in put.headers.items() if name != "content-length"}
    assert request(enforcing, "PUT", put.url, longer, b"the real bytes!")[0] == 403
    without = {name: value for name, value in put.headers.items() if not name.startswith("x-amz-checksum")}
    assert request(enforcing, "PUT", put.url, without, b"THE real bytes")[0] == 403
    moved = put.url.replace("partNumber=1", "partNumber=2")
    assert request(enforcing, "PUT", moved, put.headers, b"the real bytes")[0] == 403
    assert list(enforcing.objects.stored_parts(TENANT, DATA, "k", upload_id) or ()) == []


def test_parts_of_another_object_are_refused_and_the_upload_goes_on(enforcing: Cloud) -> None:
    upload_id = begun(enforcing)
    parts = send(enforcing, upload_id, [b"some bytes"])
    with pytest.raises(Refusal) as refused:
        complete(enforcing, upload_id, parts, b"SOME bytes")
    assert refused.value.code == ErrorCode.DIGEST_MISMATCH
    assert enforcing.objects.head(TENANT, DATA, "k") is None
    assert complete(enforcing, upload_id, parts, b"some bytes") is not None


def test_an_object_that_is_there_is_not_made_anew(enforcing: Cloud) -> None:
    upload_id = begun(enforcing)
    parts = send(enforcing, upload_id, [b"late"])
    assert enforcing.objects.create(TENANT, DATA, "k", b"first")
    assert complete(enforcing, upload_id, parts, b"late", create_only=True) is None
    assert enforcing.objects.read(TENANT, DATA, "k") == b"first"


def test_an_object_is_replaced_only_where_it_is_the_one_that_was_seen_by_parts_too(enforcing: Cloud) -> None:
    upload_id = begun(enforcing)
    parts = send(enforcing, upload_id, [b"new"])
    assert complete(enforcing, upload_id, parts, b"new", replace_etag="0" * 32) is None
    enforcing.objects.create(TENANT, DATA, "k", b"damaged")
    seen = enforcing.objects.head(TENANT, DATA, "k")
    assert seen is not None
    assert complete(enforcing, upload_id, parts, b"new", replace_etag="0" * 32) is None
    assert enforcing.objects.read(TENANT, DATA, "k") == b"damaged"
    assert complete(enforcing, upload_id, parts, b"new", replace_etag=seen.etag) is not None
    assert enforcing.objects.read(TENANT, DATA, "k") == b"new"


def test_a_part_that_was_sent_anew_meanwhile_is_not_taken_for_the_one_that_was_listed(enforcing: Cloud) -> None:
    upload_id = begun(enforcing)
    listed = send(enforcing, upload_id, [b"first"])
    send(enforcing, upload_id, [b"other"])
    assert complete(enforcing, upload_id, listed, b"first") is None
    assert enforcing.objects.head(TENANT, DATA, "k") is None


def test_uploads_of_a_key_are_found_and_those_of_longer_keys_are_not(enforcing: Cloud) -> None:
    objects = enforcing.objects
    assert list(objects.multiparts(TENANT, DATA, "k")) == []
    mine, other = begun(enforcing), begun(enforcing)
    begun(enforcing, "k/longer"), begun(enforcing, "kk"), begun(enforcing, "a")
    assert set(objects.multiparts(TENANT, DATA, "k")) == {mine, other}
    assert list(objects.multiparts("other", DATA, "k")) == []
    send(enforcing, mine, [b"x"])
    assert objects.abort_multipart(TENANT, DATA, "k", other)
    assert list(objects.multiparts(TENANT, DATA, "k")) == [mine]
    assert complete(enforcing, mine, objects.stored_parts(TENANT, DATA, "k", mine) or (), b"x") is not None
    assert list(objects.multiparts(TENANT, DATA, "k")) == []


def test_the_newest_upload_comes_first() -> None:
    """The twin lists the newest upload first; a store whose times are whole seconds cannot order two uploads."""
    cloud = memory_cloud()
    first, second = begun(cloud), begun(cloud)
    assert list(cloud.objects.multiparts(TENANT, DATA, "k")) == [second, first]


def test_an_upload_that_ended_has_no_parts(enforcing: Cloud) -> None:
    objects = enforcing.objects
    upload_id = begun(enforcing)
    parts = send(enforcing, upload_id, [b"x"])
    put = signed(enforcing, upload_id, 1, b"x")
    assert objects.abort_multipart(TENANT, DATA, "k", upload_id)
    assert objects.stored_parts(TENANT, DATA, "k", upload_id) is None
    assert complete(enforcing, upload_id, parts, b"x") is None
    status, _, body = request(enforcing, "PUT", put.url, put.headers, b"x")
    assert status == 404
    assert b"<Code>NoSuchUpload</Code>" in body
    assert objects.head(TENANT, DATA, "k") is None
