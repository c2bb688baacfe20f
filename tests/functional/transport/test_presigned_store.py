"""Transfers against the emulated S3 with URLs from the real presigner: what is signed is what is sent."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from functions.domain.ports import Presigned
from functions.local.emulator import Emulator
from functions.storage.clients import s3_client
from functions.storage.s3.objects import S3ObjectStore
from gpu_client.transport.errors import ChecksumMismatch, FileChanged, ObjectMissing, UrlExpired
from gpu_client.transport.net.digests import FileDigest, digest_bytes
from gpu_client.transport.transfer.download_parts import PARTS_FROM_BYTES
from gpu_client.transport.transfer.manager import Download, RangeDownload, Segment, Transfer, Upload
from tests.kits.clouds.emulator import unique

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
    return Upload.of_file(name=path.name, path=path, size_bytes=size_bytes, url=target.url, headers=target.headers)


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
    path.write_bytes(bytes([DATA[0] ^ 1]) + DATA[1:])
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


def test_a_pack_of_pieces_of_files_comes_back_in_ranges(
    store: S3ObjectStore, transfer: Transfer, tmp_path: Path
) -> None:
    path = tmp_path / "source"
    path.write_bytes(DATA)
    pieces = [(2_000_000, 900_000), (10, 5), (15, 1_000_000), (0, 1)]
    pack = b"".join(DATA[offset:][:size_bytes] for offset, size_bytes in pieces)
    target = signed(store, "pack", digest_bytes(pack), create_only=True)
    segments = tuple(Segment(path, *piece) for piece in pieces)
    transfer.upload(
        [Upload(name="pack", segments=segments, size_bytes=len(pack), url=target.url, headers=target.headers)]
    )
    assert store.read("t", BUCKET, "pack") == pack
    url = store.presign_get("t", BUCKET, "pack", expires_s=60)
    found: dict[int, bytes] = {}

    def wanted(offset: int, size_bytes: int) -> RangeDownload:
        def deliver(view: memoryview) -> None:
            found[offset] = bytes(view)

        return RangeDownload(
            name="pack", url=url, offset=offset, size_bytes=size_bytes, object_bytes=len(pack), deliver=deliver
        )

    ranges = [(0, 1), (1, 1_500_000), (1_500_001, len(pack) - 1_500_001)]
    transfer.fetch_ranges([wanted(*one) for one in ranges])
    assert b"".join(found[offset] for offset, _ in ranges) == pack
    transfer.fetch_ranges([wanted(0, len(pack))])
    assert found[0] == pack


def test_ranges_of_a_missing_or_a_shorter_object(store: S3ObjectStore, transfer: Transfer) -> None:
    def wanted(key: str, offset: int, size_bytes: int, object_bytes: int) -> RangeDownload:
        url = store.presign_get("t", BUCKET, key, expires_s=60)
        return RangeDownload(
            name=key, url=url, offset=offset, size_bytes=size_bytes, object_bytes=object_bytes, deliver=lambda _: None
        )

    store.create("t", BUCKET, "k", b"0123456789")
    with pytest.raises(ObjectMissing):
        transfer.fetch_ranges([wanted("absent", 0, 5, 10)])
    for offset, size_bytes, object_bytes in ((5, 10, 20), (15, 5, 20), (2, 3, 11), (0, 9, 9)):
        with pytest.raises(ChecksumMismatch):
            transfer.fetch_ranges([wanted("k", offset, size_bytes, object_bytes)])


@pytest.mark.parametrize("promised", [True, False], ids=["digest", "ETag"])
def test_a_large_object_arrives_in_parts(
    store: S3ObjectStore, transfer: Transfer, tmp_path: Path, promised: bool
) -> None:
    data = os.urandom(1_000_000) * (PARTS_FROM_BYTES // 1_000_000 + 1)
    store.create("t", BUCKET, "large", data)
    url = store.presign_get("t", BUCKET, "large", expires_s=60)
    blake3 = digest_bytes(data).blake3 if promised else None
    transfer.download(
        [Download(name="large", url=url, root=tmp_path, path="large", size_bytes=len(data), blake3=blake3)]
    )
    assert (tmp_path / "large").read_bytes() == data
    counts = transfer.stats.counts
    assert (counts.downloaded_objects, counts.wasted_bytes, counts.retries) == (1, 0, 0)


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
