"""Transfers against the emulated S3 with URLs from the real presigner: what is signed is what is sent."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from functions.domain.ports import Presigned
from functions.local.emulator import Emulator
from functions.storage.clients import s3_client
from functions.storage.s3_objects import S3ObjectStore
from gpu_client.transport.digests import FileDigest, digest_bytes
from gpu_client.transport.errors import ChecksumMismatch, FileChanged, ObjectMissing, UrlExpired
from gpu_client.transport.transfer import Download, Transfer, Upload
from tests.emulator import unique

pytestmark = pytest.mark.emulator

BUCKET = "training-checkpoints"
DATA = os.urandom(3_000_000)


@pytest.fixture
def store(emulator: Emulator) -> S3ObjectStore:
    name = unique("transfer")
    emulator.client("s3").create_bucket(Bucket=name)
    client = s3_client(emulator.endpoint_url)
    return S3ObjectStore(client, client, {BUCKET: name})


@pytest.fixture
def transfer() -> Iterator[Transfer]:
    made = Transfer(pause=lambda *_: None)
    yield made
    made.close()


def signed(store: S3ObjectStore, key: str, digest: FileDigest, **more: object) -> Presigned:
    return store.presign_put(
        "t", BUCKET, key, expires_s=60, size_bytes=digest.size_bytes, crc64nvme=digest.crc64nvme, **more  # type: ignore[arg-type]
    )  # fmt: skip


def upload(target: Presigned, path: Path, size_bytes: int) -> Upload:
    return Upload(name=path.name, path=path, size_bytes=size_bytes, url=target.url, headers=target.headers)


@pytest.mark.parametrize("data", [DATA, b"x", b""], ids=["3 MB", "1 byte", "empty"])
def test_there_and_back(store: S3ObjectStore, transfer: Transfer, tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "source"
    path.write_bytes(data)
    digest = digest_bytes(data)
    key = "a b/ü+%&=~'.bin"
    transfer.upload([upload(signed(store, key, digest, create_only=True), path, len(data))])
    found = store.head("t", BUCKET, key)
    assert found is not None
    assert (found.size_bytes, found.crc64nvme) == (digest.size_bytes, digest.crc64nvme)
    url = store.presign_get("t", BUCKET, key, expires_s=60)
    transfer.download(
        [Download(name=key, url=url, root=tmp_path / "in", path="x/y", size_bytes=len(data), blake3=digest.blake3)]
    )
    assert (tmp_path / "in/x/y").read_bytes() == data
    assert transfer.read(url, name=key, max_bytes=len(data)) == data


def test_what_is_stored_is_neither_sent_nor_overwritten(
    store: S3ObjectStore, transfer: Transfer, tmp_path: Path
) -> None:
    path = tmp_path / "source"
    path.write_bytes(DATA)
    target = signed(store, "k", digest_bytes(DATA), create_only=True)
    transfer.upload([upload(target, path, len(DATA))])
    before = store.head("t", BUCKET, "k")
    transfer.upload([upload(target, path, len(DATA))])
    assert store.head("t", BUCKET, "k") == before
    counts = transfer.stats.counts
    assert (counts.uploaded_objects, counts.already_stored_objects) == (1, 1)


def test_other_bytes_than_signed_are_not_stored(store: S3ObjectStore, transfer: Transfer, tmp_path: Path) -> None:
    path = tmp_path / "source"
    target = signed(store, "k", digest_bytes(DATA), create_only=True)
    path.write_bytes(b"!" + DATA[1:])
    with pytest.raises(ChecksumMismatch):
        transfer.upload([upload(target, path, len(DATA))])
    path.write_bytes(DATA[1:])
    with pytest.raises(FileChanged):
        transfer.upload([upload(target, path, len(DATA))])
    assert store.head("t", BUCKET, "k") is None


def test_a_damaged_object_is_replaced_and_only_the_version_meant(
    store: S3ObjectStore, transfer: Transfer, tmp_path: Path
) -> None:
    path = tmp_path / "source"
    path.write_bytes(DATA)
    store.create("t", BUCKET, "k", b"damaged")
    damaged = store.head("t", BUCKET, "k")
    assert damaged is not None
    target = signed(store, "k", digest_bytes(DATA), replace_etag=damaged.etag)
    transfer.upload([upload(target, path, len(DATA))])
    assert store.read("t", BUCKET, "k") == DATA
    with pytest.raises(UrlExpired, match="changed since"):
        transfer.upload([upload(target, path, len(DATA))])


def test_missing_and_expired(store: S3ObjectStore, transfer: Transfer, tmp_path: Path) -> None:
    url = store.presign_get("t", BUCKET, "absent", expires_s=60)
    with pytest.raises(ObjectMissing):
        transfer.download([Download(name="absent", url=url, root=tmp_path, path="x")])
    store.create("t", BUCKET, "k", b"data")
    old = store.presign_get("t", BUCKET, "k", expires_s=60)
    stamp = old.split("X-Amz-Date=")[1][:16]
    with pytest.raises(UrlExpired):
        transfer.download([Download(name="k", url=old.replace(stamp, "20200101T000000Z"), root=tmp_path, path="x")])
    assert list(tmp_path.iterdir()) == []


def test_many_small_objects(store: S3ObjectStore, transfer: Transfer, tmp_path: Path) -> None:
    uploads, downloads = [], []
    for index in range(100):
        data = b"%d" % index * index
        path = tmp_path / f"{index}"
        path.write_bytes(data)
        uploads.append(upload(signed(store, f"many/{index}", digest_bytes(data), create_only=True), path, len(data)))
        url = store.presign_get("t", BUCKET, f"many/{index}", expires_s=60)
        downloads.append(
            Download(name=str(index), url=url, root=tmp_path / "in", path=f"{index}", blake3=digest_bytes(data).blake3)
        )
    transfer.upload(uploads)
    transfer.download(downloads)
    assert {path.name: path.read_bytes() for path in (tmp_path / "in").iterdir()} == {
        f"{index}": b"%d" % index * index for index in range(100)
    }
