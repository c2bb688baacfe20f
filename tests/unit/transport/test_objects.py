"""Several objects at once: tokens, redirects, digests; the first failure stops the rest; and removing one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_client.transport.api.client import BatonClient
from gpu_client.transport.api.http import HttpClient
from gpu_client.transport.api.objects import Wanted
from gpu_client.transport.errors import ChecksumMismatch, FalseDigest, NotFound, TransferCanceled, UnsafePath
from gpu_client.transport.net.digests import digest_bytes
from gpu_client.transport.transfer.manager import Transfer
from tests.kits.files.directories import files_below
from tests.unit.transport.scripted_server import ScriptedServer, reply

BUCKET = "training-checkpoints"
FILES = {f"out/{number}.bin": b"%d" % number * 1000 for number in range(6)}


@pytest.fixture
def store() -> Iterator[ScriptedServer]:
    with ScriptedServer(objects={f"/s3/{path}": data for path, data in FILES.items()}) as running:
        yield running


@pytest.fixture
def client(server: ScriptedServer, store: ScriptedServer, transfer: Transfer) -> Iterator[BatonClient]:
    server.routes["GET", "/download/token"] = reply(200, {"token": "one-time", "expires_at": 1})
    for path in FILES:
        url = f"{store.url}/s3/{path}"
        server.routes["GET", f"/download/{BUCKET}/{path}"] = reply(200, {"url": url, "expires_at": 1})
    with BatonClient(server.url, "key", transfer=transfer, http=HttpClient(server.url, "key", sleep=len)) as made:  # type: ignore[arg-type]
        yield made


def wanted(root: Path, *paths: str) -> list[Wanted]:
    return [
        Wanted(
            bucket=BUCKET,
            key=path,
            root=root,
            path=path,
            size_bytes=len(FILES[path]),
            crc64nvme=digest_bytes(FILES[path]).crc64nvme,
        )
        for path in paths
    ]


def test_all_of_them_and_every_byte_reported(client: BatonClient, tmp_path: Path) -> None:
    moved: list[int] = []
    client.fetch_objects(wanted(tmp_path, *FILES), workers=3, progress=moved.append)
    assert files_below(tmp_path) == FILES
    assert sum(moved) == sum(map(len, FILES.values()))
    assert client.stats.requests == {"download_token": 6, "download": 6}
    client.fetch_objects([])


def test_the_first_failure_stops_the_rest(client: BatonClient, store: ScriptedServer, tmp_path: Path) -> None:
    store.objects["/s3/out/2.bin"] = b"x" * 1000
    with pytest.raises(ChecksumMismatch, match=r"out/2\.bin"):
        client.fetch_objects(wanted(tmp_path, "out/2.bin", *FILES), workers=1)
    assert files_below(tmp_path) == {}


def test_a_false_digest_keeps_no_other_file_away(client: BatonClient, tmp_path: Path) -> None:
    first, *rest = wanted(tmp_path, *FILES)
    false = replace(first, blake3=digest_bytes(b"other").blake3)
    with pytest.raises(FalseDigest, match=r"out/0\.bin"):
        client.fetch_objects([false, *rest], workers=1)
    assert files_below(tmp_path) == {path: data for path, data in FILES.items() if path != false.path}


def test_what_was_fetched_before_a_failure_stays(client: BatonClient, server: ScriptedServer, tmp_path: Path) -> None:
    server.routes["GET", f"/download/{BUCKET}/out/1.bin"] = reply(404, {"message": "gone"})
    with pytest.raises(NotFound):
        client.fetch_objects(wanted(tmp_path, "out/0.bin", "out/1.bin", "out/2.bin"), workers=1)
    assert files_below(tmp_path) == {"out/0.bin": FILES["out/0.bin"]}


def test_a_path_cannot_leave_its_root(client: BatonClient, tmp_path: Path) -> None:
    outside = Wanted(bucket=BUCKET, key="out/0.bin", root=tmp_path / "in", path="../out.bin")
    with pytest.raises(UnsafePath):
        client.fetch_objects([outside])
    assert files_below(tmp_path) == {}


def test_canceled_before_it_begins(client: BatonClient, server: ScriptedServer, tmp_path: Path) -> None:
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(TransferCanceled):
        client.fetch_objects(wanted(tmp_path, *FILES), cancel=cancel)
    assert server.seen == []


def test_deleting_an_object(client: BatonClient, server: ScriptedServer) -> None:
    server.script("GET", "/upload/token", reply(200, {"token": "for-it", "expires_at": 1}))
    server.script("DELETE", "/upload/training-data/a%20b/%C3%BC", reply(204))
    client.delete_object("training-data", "a b/ü")
    assert server.seen[-1].query == "action=delete"
    assert server.seen[-1].headers["x-upload-token"] == "for-it"
