"""An object store that is not AWS's: what is asked of it before it is trusted, and where its credentials come from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from blake3 import blake3
from botocore.exceptions import ClientError

from baton.contract.names import BUCKETS, CHECKPOINTS_BUCKET, DATA_BUCKET
from functions.domain.ports import StoredObject, StoredPart
from functions.local.emulator import Emulator
from functions.settings import ControlPlaneSettings
from functions.storage.clients import Clients
from functions.storage.s3 import store_secret
from functions.storage.s3.crc64 import crc64nvme
from functions.storage.s3.objects import S3ObjectStore
from functions.storage.s3.store_conformance import TENANT, missing_of_multipart, missing_promises
from functions.storage.s3.store_secret import StoreSecretError, read_secret
from tests.kits.api.harness import Api, memory_api
from tests.kits.clouds.emulator import unique
from tests.kits.clouds.second_store import ACCESS_KEY_ID, SECRET_ACCESS_KEY, SecondStore
from tests.kits.clouds.store_sets import Cloud, memory_cloud
from tests.twins.objects import MemoryObjectStore, _Signed

CHECKSUM = "it stores other bytes than x-amz-checksum-crc64nvme says"
UNSIGNED = "it takes an upload without a header that was signed"
LENGTH = "it takes more bytes than the signed content-length says"
REPORT = "it does not report the CRC-64/NVME of what is stored"
CREATE = "it overwrites an object in spite of If-None-Match"
REPLACE = "it overwrites another version than If-Match names"

# Objects


def missing_in(objects: MemoryObjectStore) -> list[str]:
    def put(method: str, url: str, headers: Mapping[str, str], data: bytes) -> int:
        return objects.request(method, url, headers, data)[0]

    return missing_promises(objects, DATA_BUCKET, put)


def test_aws_s_language_spoken_well_is_enough(ministack: Cloud) -> None:
    for bucket in BUCKETS:
        assert missing_promises(ministack.objects, bucket) == []
        assert list(ministack.objects.list(TENANT, bucket, "", limit=9).items) == [], "nothing is left behind"


class Claimed(MemoryObjectStore):
    """The store that keeps the checksum that the client claims, unchecked."""

    def _put_object(self, signed: _Signed, sent: Mapping[str, str], data: bytes) -> tuple[int, dict[str, str], bytes]:
        claimed = sent.get("x-amz-checksum-crc64nvme")
        without = {name: value for name, value in sent.items() if not name.startswith("x-amz-checksum")}
        answer = super()._put_object(signed, without, data)
        if answer[0] == 200:
            self._store(signed.bucket, signed.name, data, crc=claimed)
        return answer


class Silent(MemoryObjectStore):
    """The store that checks a checksum and does not keep the checksum."""

    def head(self, tenant: str, bucket: str, key: str) -> StoredObject | None:
        found = super().head(tenant, bucket, key)
        return found and replace(found, crc64nvme=None)


class Overwriting(MemoryObjectStore):
    """The store that ignores the header `condition` of a PUT."""

    condition = "if-none-match"

    def _put_object(self, signed: _Signed, sent: Mapping[str, str], data: bytes) -> tuple[int, dict[str, str], bytes]:
        kept = {name: value for name, value in signed.headers.items() if name != self.condition}
        return super()._put_object(replace(signed, headers=kept), sent, data)


class Replacing(Overwriting):
    """The store that ignores `if-match`, and thus replaces any version."""

    condition = "if-match"


class Careless(MemoryObjectStore):
    """The store that does not require the signed header `careless_of`."""

    careless_of = "x-amz-checksum-crc64nvme"

    def request(
        self, method: str, url: str, headers: Mapping[str, str] | None = None, data: bytes = b""
    ) -> tuple[int, dict[str, str], bytes]:
        signed = self._signed[url]
        kept = {name: value for name, value in signed.headers.items() if name != self.careless_of}
        self._signed[url] = replace(signed, headers=kept)
        try:
            return super().request(method, url, headers, data)
        finally:
            self._signed[url] = signed


class Greedy(Careless):
    """The store that accepts any number of bytes."""

    careless_of = "content-length"


@pytest.mark.parametrize(
    ("store", "missing"),
    [
        (MemoryObjectStore, []),
        (Claimed, [CHECKSUM]),
        (Silent, [REPORT]),
        (Overwriting, [CREATE]),
        (Replacing, [REPLACE]),
        (Careless, [UNSIGNED]),
        (Greedy, [LENGTH]),
    ],
)
def test_whatever_is_missing_is_found(store: type[MemoryObjectStore], missing: list[str]) -> None:
    objects = store()
    assert missing_in(objects) == missing
    assert list(objects.list(TENANT, DATA_BUCKET, "", limit=9).items) == []


# Uploads in parts


def missing_of_parts(objects: MemoryObjectStore) -> list[str]:
    def put(method: str, url: str, headers: Mapping[str, str], data: bytes) -> int:
        return objects.request(method, url, headers, data)[0]

    return missing_of_multipart(objects, DATA_BUCKET, put)


class Unseen(MemoryObjectStore):
    """The store that does not list the uploads in progress."""

    def multiparts(self, tenant: str, bucket: str, key: str) -> Sequence[str]:
        return []


class Unchecked(MemoryObjectStore):
    """The store that does not check the checksum of a part."""

    def _put_part(self, signed: _Signed, sent: Mapping[str, str], data: bytes) -> tuple[int, dict[str, str], bytes]:
        answer = super()._put_part(signed, {}, data)
        self._uploads[signed.upload_id].parts[1] = replace(
            self._uploads[signed.upload_id].parts[1], crc64nvme=sent["x-amz-checksum-crc64nvme"]
        )
        return answer


class Forgetful(MemoryObjectStore):
    """The store that does not keep the checksum of a part."""

    def stored_parts(self, tenant: str, bucket: str, key: str, upload_id: str) -> Sequence[StoredPart] | None:
        found = super().stored_parts(tenant, bucket, key, upload_id)
        return None if found is None else [replace(part, crc64nvme=None) for part in found]


class Trusting(MemoryObjectStore):
    """The store that completes an upload with the arguments in `ignored` instead of the client's."""

    ignored: Mapping[str, Any] = {"create_only": False}

    def complete_checksummed(self, *place: Any, **more: Any) -> str | None:
        return super().complete_checksummed(*place, **{**more, **self.ignored})


class Believing(Trusting):
    """The store that does not check the checksum of the completed object."""

    ignored: Mapping[str, Any] = {"crc64nvme": crc64nvme(b"the right bytes")}


class Composing(MemoryObjectStore):
    """The store that reports a checksum of the parts' checksums."""

    def head(self, tenant: str, bucket: str, key: str) -> StoredObject | None:
        found = super().head(tenant, bucket, key)
        return found and replace(found, crc64nvme=f"{found.crc64nvme}-1")


class Refusing(MemoryObjectStore):
    """The store that does not implement ListParts."""

    def stored_parts(self, tenant: str, bucket: str, key: str, upload_id: str) -> Sequence[StoredPart] | None:
        raise ClientError({"Error": {"Code": "NotImplemented", "Message": "no"}}, "ListParts")


@pytest.mark.parametrize(
    ("store", "missing"),
    [
        (MemoryObjectStore, []),
        (Unseen, ["it does not list an upload that is under way"]),
        (Unchecked, ["it stores a part with other bytes than x-amz-checksum-crc64nvme says"]),
        (Forgetful, ["it does not list a part with its size and CRC-64/NVME"]),
        (Believing, ["it completes an upload whose parts have another CRC-64/NVME than the whole is said to have"]),
        (Trusting, ["it overwrites an object by an upload in parts in spite of If-None-Match"]),
        (Composing, ["it does not report the CRC-64/NVME of an object that was made of parts"]),
        (
            Refusing,
            [
                "it refuses a request of an upload in parts "
                "(An error occurred (NotImplemented) when calling the ListParts operation: no)"
            ],
        ),
    ],
)
def test_whatever_is_missing_of_uploads_in_parts_is_found(store: type[MemoryObjectStore], missing: list[str]) -> None:
    objects = store()
    assert missing_of_parts(objects) == missing
    assert list(objects.list(TENANT, DATA_BUCKET, "", limit=9).items) == []
    assert objects._uploads == {}, "nothing is left behind"


def test_the_emulated_store_takes_uploads_in_parts(ministack: Cloud) -> None:
    for bucket in BUCKETS:
        assert missing_of_multipart(ministack.objects, bucket) == []
        assert list(ministack.objects.list(TENANT, bucket, "", limit=9).items) == []


@pytest.mark.processes
def test_rclone_does_not_take_uploads_in_parts(second_store: SecondStore) -> None:
    cloud = second_store.cloud()
    (lack,) = missing_of_multipart(cloud.objects, DATA_BUCKET)
    assert lack.startswith("it refuses a request of an upload in parts (")
    assert list(cloud.objects.list(TENANT, DATA_BUCKET, "", limit=9).items) == []


@pytest.mark.processes
def test_rclone_is_found_out(second_store: SecondStore) -> None:
    cloud = second_store.cloud()
    assert missing_promises(cloud.objects, DATA_BUCKET) == [CHECKSUM, CREATE, REPLACE]
    assert list(cloud.objects.list(TENANT, DATA_BUCKET, "", limit=9).items) == []


@pytest.mark.processes
def test_why_such_a_store_is_refused(second_store: SecondStore) -> None:
    """A store that echoes the declared checksum would let altered bytes be committed."""
    api = on(second_store.cloud())
    api.submit()
    held = api.claim()
    manifest = held.manifest(100, {"model.bin": b"weights"})
    for blob in held.post(f"/job/{held.id}/checkpoints", manifest).ok()["missing"]:
        assert api.send("PUT", blob["url"], blob["headers"], b"wEIGHTS").status == 200
    assert held.post(f"/job/{held.id}/checkpoints", manifest).ok()["committed"] is True


# Where the credentials come from


def on(cloud: Cloud) -> Api:
    """The API with its objects there."""
    api = memory_api()
    api.context.__dict__["objects"] = cloud.objects
    api.memory = None
    return api


@pytest.fixture
def secrets(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Secrets Manager of the emulated cloud, for us and for what is tested."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", emulator.endpoint_url)
    yield emulator.client("secretsmanager")


def stored(secrets: Any, text: str | None = None) -> str:
    """The name of a new secret, with what the second store takes."""
    name = unique("store")
    right = json.dumps({"access_key_id": ACCESS_KEY_ID, "secret_access_key": SECRET_ACCESS_KEY})
    secrets.create_secret(Name=name, SecretString=right if text is None else text)
    return name


def deployed(store: SecondStore, secret: str) -> Cloud:
    """Stores as a deployed function makes them from its settings, with objects in the second store."""
    cloud = store.cloud()
    settings = ControlPlaneSettings.from_environment(
        {
            "BATON_S3_ENDPOINT": store.endpoint_url,
            "BATON_S3_REGION": "auto",
            "BATON_S3_SECRET": secret,
            "BATON_DATA_BUCKET": cloud.buckets[DATA_BUCKET],
            "BATON_CHECKPOINTS_BUCKET": cloud.buckets[CHECKPOINTS_BUCKET],
        }
    )
    clients = Clients.from_settings(settings)
    assert clients.s3 is clients.s3_public
    return replace(memory_cloud(), objects=S3ObjectStore(clients.s3, clients.s3_public, clients.buckets), s3=clients.s3)


@pytest.mark.processes
@pytest.mark.emulator
def test_a_job_that_loses_its_machine_on_another_store(second_store: SecondStore, secrets: Any) -> None:
    api = on(deployed(second_store, stored(secrets)))
    api.put_object(DATA_BUCKET, "in/1 \u00fc.png", b"picture")
    job = api.submit(inputs=[{"prefix": "in/"}], outputs=["model"])["id"]
    held = api.claim()
    (picture,) = api.get(f"/job/{job}/inputs", headers=held.headers).ok()["inputs"]
    assert picture["url"].startswith(f"{second_store.endpoint_url}/training-data-"), "path-style, for that endpoint"
    assert "%2Fauto%2Fs3%2F" in picture["url"], "signed for its region"
    assert api.send("GET", picture["url"]).text == "picture"
    assert held.commit(100, {"model.bin": b"half"}).ok()["committed"] is True
    held.release().ok()
    again = api.claim(machine_id="m-2")
    (checkpoint,) = again.item["resume"]
    manifest = json.loads(api.send("GET", checkpoint["manifest_url"]).text)
    digest = manifest["packs"][0]["blake3"]
    urls = again.post(f"/job/{job}/checkpoints/100/urls", {"blake3": [digest]}).ok()["urls"]
    restored = api.send("GET", urls[digest]).text.encode()
    assert blake3(restored).hexdigest() == digest and restored == b"half"
    again.complete({"model": b"trained"}).ok()
    artifact = api.job(job)["artifacts"][0]
    assert api.context.objects.read("acme", CHECKPOINTS_BUCKET, artifact["key"]) == b"trained"


@pytest.mark.processes
@pytest.mark.emulator
def test_the_secret_is_read_when_it_is_needed_and_once(
    second_store: SecondStore, secrets: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []

    def counted(secret: str) -> tuple[str, str]:
        reads.append(secret)
        return read_secret(secret)

    monkeypatch.setattr(store_secret, "read_secret", counted)
    name = stored(secrets)
    cloud = deployed(second_store, name)
    assert reads == [], "a function that needs no object reads no secret, and may not"
    for _ in range(3):
        assert cloud.objects.create("acme", DATA_BUCKET, "k", b"1")
        cloud.objects.presign_get("acme", DATA_BUCKET, "k", expires_s=60)
    assert reads == [name]


@pytest.mark.processes
@pytest.mark.emulator
def test_a_rotated_secret_is_read_again_in_time(
    second_store: SecondStore, secrets: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # botocore looks for newer ones from a quarter of an hour before the end.
    monkeypatch.setattr(store_secret, "LIFE", timedelta(minutes=14))
    wrong = json.dumps({"access_key_id": ACCESS_KEY_ID, "secret_access_key": "of-yesterday"})
    name = stored(secrets, wrong)
    cloud = deployed(second_store, name)
    with pytest.raises(ClientError, match="SignatureDoesNotMatch") as refused:
        cloud.objects.create("acme", DATA_BUCKET, "k", b"1")
    assert "of-yesterday" not in str(refused.value)
    right = json.dumps({"access_key_id": ACCESS_KEY_ID, "secret_access_key": SECRET_ACCESS_KEY})
    secrets.put_secret_value(SecretId=name, SecretString=right)
    assert cloud.objects.create("acme", DATA_BUCKET, "k", b"1")


CANARY = hashlib.sha256(b"a credential").hexdigest()


@pytest.mark.parametrize(
    "text",
    [CANARY, f'"{CANARY}"', f'["{CANARY}"]', "{}", f'{{"access_key_id": "{CANARY}"}}', "",
     f'{{"access_key_id": "{CANARY}", "secret_access_key": ""}}',
     f'{{"access_key_id": "{CANARY}", "secret_access_key": 1}}'],
)  # fmt: skip
def test_a_secret_of_another_form_is_named_and_not_shown(text: str, caplog: pytest.LogCaptureFixture) -> None:
    class Manager:
        def get_secret_value(self, **_: Any) -> dict[str, str]:
            return {"SecretString": text}

    with pytest.raises(StoreSecretError, match="secret 'mine': JSON with the texts") as refused:
        read_secret("mine", Manager())
    assert refused.value.__cause__ is None and refused.value.__suppress_context__
    assert CANARY not in str(refused.value) and CANARY not in caplog.text


def test_bytes_without_text_are_no_secret() -> None:
    class Manager:
        def get_secret_value(self, **_: Any) -> dict[str, bytes]:
            return {"SecretBinary": b"{}"}

    with pytest.raises(StoreSecretError):
        read_secret("mine", Manager())
