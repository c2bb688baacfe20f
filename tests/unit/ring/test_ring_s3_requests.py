"""Test bucket requests: endpoints, signatures, classification of answers."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import botocore.auth
import pytest
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import Credentials

from gpu_client.ring.core.ring import Ring
from gpu_client.ring.errors import ObjectDamaged, RingError, RingMismatch, StoreFull
from gpu_client.ring.settings import RingSettings
from gpu_client.ring.store.s3 import BucketStore
from gpu_client.ring.store.s3_client import BucketClient, BucketEndpoint, RequestSigner, find_region
from gpu_client.ring.store.uri import open_store
from tests.kits.clouds.second_store import ACCESS_KEY_ID, SECRET_ACCESS_KEY, SecondStore
from tests.unit.ring.scripted_store import Scripted, ScriptedStore, refusal

NOW = datetime(2026, 11, 22, 12, 30, tzinfo=UTC)
Opened = Callable[..., tuple[BucketStore, ScriptedStore]]


@pytest.fixture
def opened() -> Iterator[Opened]:
    """A store in the bucket `b`, and what answers it."""
    made: list[AbstractContextManager[Any] | BucketStore] = []

    def open_one(*script: Scripted) -> tuple[BucketStore, ScriptedStore]:
        server = ScriptedStore(*script)
        environment = {"AWS_REGION": "us-east-1", "AWS_ENDPOINT_URL": f"{server.url}/store"}
        bucket = BucketClient("bucket", environment=environment, pause=lambda _: None, clock=NOW.timestamp)
        made.extend([store := BucketStore("bucket/p", bucket), server])
        return store, server

    yield open_one
    for one in made:
        one.close()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("bucket", "region", "environment", "origin", "path"),
    [
        ("b-1", "eu-west-1", {}, "https://b-1.s3.eu-west-1.amazonaws.com", "/"),
        ("b.with.dots", "eu-west-1", {}, "https://s3.eu-west-1.amazonaws.com", "/b.with.dots/"),
        ("b-1", "cn-north-1", {}, "https://b-1.s3.cn-north-1.amazonaws.com.cn", "/"),
        ("b-1", "x", {"AWS_ENDPOINT_URL": "http://[::1]:9000/a/"}, "http://[::1]:9000", "/a/b-1/"),
        ("b-1", "x", {"AWS_ENDPOINT_URL": "http://no", "AWS_ENDPOINT_URL_S3": "https://s"}, "https://s", "/b-1/"),
    ],
)
def test_buckets_have_their_addresses(
    bucket: str, region: str, environment: dict[str, str], origin: str, path: str
) -> None:
    assert BucketEndpoint.of_bucket(bucket, region, environment) == BucketEndpoint(origin, path)


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        ("https://b.s3.eu-west-1.amazonaws.com", "b.s3.eu-west-1.amazonaws.com"),
        ("https://store:443", "store"),
        ("http://store:443", "store:443"),
        ("http://[::1]:9000", "[::1]:9000"),
    ],
)
def test_hosts_are_signed_as_they_are_sent(origin: str, host: str) -> None:
    assert BucketEndpoint(origin, "/").host == host


@pytest.mark.parametrize("url", ["store:9000", "ftp://store", "http://store:port", "http://", "http://store?x=1"])
def test_an_endpoint_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(RingMismatch, match="is not the URL of a store"):
        BucketEndpoint.of_bucket("b", "r", {"AWS_ENDPOINT_URL": url})


@pytest.mark.parametrize(
    "place",
    ["s3://", "s3://bucket", "s3://bucket/", "s3://BucketClient/x", "s3://b/x", "s3://bucket/a b", "s3://bucket/a//b",
     "s3://bucket/../x", "s3://bucket/a/.x/b", "s3:bucket/x", f"s3://bucket/{'x' * 501}"],
)  # fmt: skip
def test_places_that_are_none_are_refused(place: str) -> None:
    with pytest.raises(RingMismatch, match="is not a place of a ring"):
        open_store(place, make=True)


def test_the_region_is_the_environment_s_or_the_profile_s(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("[default]\nregion = eu-north-1\n[profile lab]\nregion=ap-south-1\n[profile bare]\noutput=json\n")
    files = {"AWS_CONFIG_FILE": str(config)}
    assert find_region({**files, "AWS_REGION": "a", "AWS_DEFAULT_REGION": "b"}) == "a"
    assert find_region({**files, "AWS_DEFAULT_REGION": "b"}) == "b"
    assert find_region(files) == "eu-north-1"
    assert find_region({**files, "AWS_PROFILE": "lab"}) == "ap-south-1"
    assert find_region({**files, "AWS_PROFILE": "bare"}) == "us-east-1"
    assert find_region({"AWS_CONFIG_FILE": str(tmp_path / "none")}) == "us-east-1"
    config.write_text("region = x")
    with pytest.raises(RingMismatch, match="cannot be read"):
        find_region(files)


@pytest.mark.parametrize("token", [None, "session/token=="])
def test_a_signature_is_the_one_that_botocore_makes(monkeypatch: pytest.MonkeyPatch, token: str | None) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKID")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret/+x")
    if token:
        monkeypatch.setenv("AWS_SESSION_TOKEN", token)
    target = "/samples/w/00000001-1?continuation-token=a%2Fb%3D&list-type=2&prefix=p%2Finbox%2F"
    headers = {"If-None-Match": "*", "x-amz-meta-baton-put": "1f", "host": "b.s3.eu-west-1.amazonaws.com"}
    ours = RequestSigner("eu-west-1", clock=NOW.timestamp).signed("PUT", target, headers)

    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda remove_tzinfo=True: NOW.replace(tzinfo=None))
    request = AWSRequest("PUT", f"https://b.s3.eu-west-1.amazonaws.com{target}", headers)
    request.context["client_config"] = Config(s3={"payload_signing_enabled": False})
    botocore.auth.S3SigV4Auth(Credentials("AKID", "secret/+x", token), "s3", "eu-west-1").add_auth(request)
    assert ours["X-Amz-Date"] == request.headers["X-Amz-Date"] == "20261122T123000Z"
    assert ours["Authorization"].rpartition("Signature=")[2] == request.headers["Authorization"].rpartition("=")[2]


def test_a_store_that_checks_signatures_takes_the_right_ones_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SecondStore(tmp_path / "second") as second:
        second.client.create_bucket(Bucket="signed")
        environment = {"AWS_REGION": "auto", "AWS_ENDPOINT_URL": second.endpoint_url}
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY_ID)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_ACCESS_KEY)
        store = BucketStore("signed/rings/one", BucketClient("signed", environment=environment))
        keys = [f"samples/w/{number}" for number in range(3)]
        for key in keys:
            assert store.create(key, [memoryview(key.encode())])
        found = store.read(keys[1])
        assert found is not None
        assert bytes(found) == keys[1].encode()
        assert store.keys("samples/") == keys
        store.delete(keys[:2])
        assert store.keys("samples/") == keys[2:]
        store.close()
        with pytest.raises(RingMismatch, match="ignores the conditions of writes"):
            Ring.make(store, RingSettings(cap=3))
        assert store.read("ring.json") is None
        assert store.record("pointer") is None
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
        wrong = BucketStore("signed/rings/one", BucketClient("signed", environment=environment))
        with pytest.raises(PermissionError, match="was refused"):
            wrong.record("pointer")
        wrong.close()


def test_credentials_are_those_of_the_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    (tmp_path / "credentials").write_text("[lab]\naws_access_key_id = OF-LAB\naws_secret_access_key = x\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_PROFILE", "lab")
    assert "Credential=OF-LAB/" in RequestSigner("r").signed("GET", "/", {"host": "h"})["Authorization"]
    monkeypatch.setenv("AWS_PROFILE", "other")
    with pytest.raises(PermissionError, match=r"there are no AWS credentials .*: set AWS_ACCESS_KEY_ID"):
        RequestSigner("r").signed("GET", "/", {"host": "h"})


def test_a_bucket_elsewhere_is_found(opened: Opened) -> None:
    elsewhere = refusal(400, "AuthorizationHeaderMalformed", "<Region>eu-west-1</Region>")
    store, server = opened(elsewhere, Scripted(404, b""), Scripted(404, b""))
    assert store.record("pointer") is None
    assert store.record("pointer") is None
    assert [one.credential.split("/")[2] for one in server.asked] == ["us-east-1", "eu-west-1", "eu-west-1"]
    assert {one.target for one in server.asked} == {"/store/bucket/p/pointer"}


def test_new_credentials_are_looked_for_when_the_old_ones_have_ended(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "OLD")
    store, server = opened(Scripted(404), refusal(400, "ExpiredToken"), Scripted(404))
    store.record("pointer")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "NEW")
    store.record("pointer")
    assert [one.credential.split("/")[0] for one in server.asked] == ["OLD", "OLD", "NEW"]


def test_a_clock_that_is_wrong_is_made_up_for(opened: Opened) -> None:
    skewed = refusal(403, "RequestTimeTooSkewed", Date="Sun, 22 Nov 2026 18:00:00 GMT")
    store, server = opened(skewed, Scripted(404))
    store.record("pointer")
    assert [one.headers["x-amz-date"] for one in server.asked] == ["20261122T123000Z", "20261122T180000Z"]


@pytest.mark.parametrize(
    ("answer", "error", "said"),
    [
        (refusal(507, "InsufficientStorage"), StoreFull, "no space in the bucket bucket"),
        (refusal(403, "QuotaExceeded"), StoreFull, "no space"),
        (refusal(404, "NoSuchBucket"), RingMismatch, "there is no bucket bucket"),
        (refusal(403, "AccessDenied"), PermissionError, "403 AccessDenied that is why"),
        (refusal(400, "InvalidRequest"), OSError, "400 InvalidRequest that is why"),
        (refusal(400, "EntityTooLarge"), OSError, "400 EntityTooLarge"),
        (refusal(301, "PermanentRedirect"), RingMismatch, "Set AWS_REGION"),
    ],
)
def test_refusals_are_told_apart(opened: Opened, answer: Scripted, error: type[Exception], said: str) -> None:
    store, server = opened(answer)
    with pytest.raises(error, match=said) as raised:
        store.create("samples/w/1", [memoryview(b"x")])
    assert isinstance(raised.value, OSError | RingError)
    assert len(server.asked) == 1


def test_what_is_stored_is_checked_by_the_store(opened: Opened) -> None:
    store, server = opened(Scripted())
    assert store.create("samples/w/1", [memoryview(b"1234"), memoryview(b""), memoryview(b"56789")])
    asked = server.asked[0]
    assert (asked.method, asked.body, asked.headers["if-none-match"]) == ("PUT", b"123456789", "*")
    # The check value of CRC-64/NVME in its catalogue: AE8B14860A799888.
    assert asked.headers["x-amz-checksum-crc64nvme"] == "rosUhgp5mIg="
    signed = asked.headers["authorization"].partition("SignedHeaders=")[2].partition(",")[0].split(";")
    assert {"host", "if-none-match", "x-amz-checksum-crc64nvme", "x-amz-date"} <= set(signed)


def test_an_answer_that_is_cut_off_is_asked_for_again(opened: Opened) -> None:
    cut = Scripted(206, b"0123456789", {"Content-Range": "bytes 0-9/10", "ETag": '"e"'}, cut=3)
    whole = Scripted(206, b"0123456789", {"Content-Range": "bytes 0-9/10", "ETag": '"e"'})
    store, server = opened(cut, whole, Scripted(200, b"12345", cut=2, headers={"ETag": '"r"'}), Scripted(404))
    found = store.read("samples/w/1")
    assert found is not None
    assert bytes(found) == b"0123456789"
    assert store.record("pointer") is None
    assert len(server.asked) == 4


def test_a_store_without_ranges_is_read_whole(opened: Opened) -> None:
    store, _ = opened(Scripted(200, b"0123456789", {"ETag": '"e"'}))
    found = store.read("samples/w/1")
    assert found is not None
    assert bytes(found) == b"0123456789"


@pytest.mark.parametrize("said", ["bytes 1-9/10", "bytes 0-9/*", "nonsense"])
def test_other_bytes_than_were_asked_for_are_damage(opened: Opened, said: str) -> None:
    store, _ = opened(Scripted(206, b"123456789", {"Content-Range": said, "ETag": '"e"'}))
    with pytest.raises(ObjectDamaged, match="other than the requested range"):
        store.read("samples/w/1")


def test_keys_that_are_not_deleted_are_an_error(opened: Opened) -> None:
    gone = b"<DeleteResult><Error><Key>p/a</Key><Code>NoSuchKey</Code></Error></DeleteResult>"
    kept = b"<DeleteResult><Error><Key>p/a</Key><Code>AccessDenied</Code></Error></DeleteResult>"
    store, _ = opened(Scripted(200, gone), Scripted(200, kept))
    store.delete(["a"])
    with pytest.raises(OSError, match="1 keys of the bucket bucket were not deleted \\(AccessDenied\\)"):
        store.delete(["a"])


def test_a_listing_that_breaks_off_is_an_error(opened: Opened) -> None:
    store, _ = opened(Scripted(200, b"<R><IsTruncated>true</IsTruncated><Contents><Key>p/a</Key></Contents></R>"))
    with pytest.raises(OSError, match="without a continuation token"):
        store.keys("a/")


def _in_a_fork(store: BucketStore) -> None:
    assert store.record("pointer") is None
    sys.exit(7)


def test_a_forked_process_goes_its_own_way(opened: Opened) -> None:
    store, server = opened(Scripted(404), Scripted(404), Scripted(404))
    store.record("pointer")
    process = multiprocessing.get_context("fork").Process(target=_in_a_fork, args=(store,))
    process.start()
    process.join(60)
    assert process.exitcode == 7
    assert store.record("pointer") is None
    ports = [one.port for one in server.asked]
    assert ports[0] == ports[2] != ports[1], "on a connection of its own"


def test_an_object_that_is_too_large_is_refused_before_it_is_sent(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu_client.ring.store.s3.MAX_OBJECT_BYTES", 10)
    store, server = opened()
    with pytest.raises(OSError, match="make packs smaller"):
        store.create("samples/w/1", [memoryview(b"x" * 11)])
    assert server.asked == []
