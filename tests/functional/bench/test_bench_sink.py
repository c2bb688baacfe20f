"""The sink answers as S3 does, to boto3, to our own transfer, and to bodies in all kinds of chunks."""

from __future__ import annotations

import http.client
import io
import os
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from bench.checkpoints.subjects import store_client
from bench.sink.sink import Sink
from gpu_client.transport.transfer.manager import Download, RangeDownload, Transfer, Upload
from gpu_client.transport.transfer.transfer_requests import Segment
from tests.kits.network.certificates import throwaway_certificate
from tests.kits.waiting import until

BUCKET = "bench"
DATA = os.urandom(3_000_000)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "sink"
    path.mkdir()
    return path


@pytest.fixture
def sink(directory: Path) -> Iterator[Sink]:
    running = Sink(directory)
    threading.Thread(target=running.serve, daemon=True).start()
    yield running
    running.close()


@pytest.fixture
def endpoint(sink: Sink) -> str:
    return f"http://127.0.0.1:{sink.port}"


@pytest.fixture
def s3(endpoint: str) -> Iterator[Any]:
    client = store_client(endpoint)
    client.create_bucket(Bucket=BUCKET)
    yield client
    client.close()


@pytest.fixture
def wire(s3: Any, sink: Sink) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection("127.0.0.1", sink.port, timeout=10)
    yield connection
    connection.close()


def refusal(code: str) -> Any:
    return pytest.raises(ClientError, match=code)


def body(client: Any, key: str, **more: str) -> bytes:
    data: bytes = client.get_object(Bucket=BUCKET, Key=key, **more)["Body"].read()
    return data


def multipart(client: Any, key: str, parts: dict[int, bytes]) -> str:
    """Send the parts in this order and complete; the object's ETag."""
    place = {"Bucket": BUCKET, "Key": key}
    upload_id = client.create_multipart_upload(**place)["UploadId"]
    sent = {
        number: client.upload_part(**place, UploadId=upload_id, PartNumber=number, Body=data)["ETag"]
        for number, data in parts.items()
    }
    told = [{"PartNumber": number, "ETag": sent[number]} for number in sorted(sent)]
    etag: str = client.complete_multipart_upload(**place, UploadId=upload_id, MultipartUpload={"Parts": told})["ETag"]
    return etag


def test_an_object_is_what_was_put(s3: Any) -> None:
    etag = s3.put_object(Bucket=BUCKET, Key="a/ü b&<c>", Body=DATA)["ETag"]
    assert body(s3, "a/ü b&<c>") == DATA
    head = s3.head_object(Bucket=BUCKET, Key="a/ü b&<c>")
    assert (head["ContentLength"], head["ETag"]) == (len(DATA), etag)
    assert s3.put_object(Bucket=BUCKET, Key="empty", Body=b"")["ETag"] != etag
    assert body(s3, "empty") == b""


def test_ranges_of_an_object(s3: Any) -> None:
    s3.put_object(Bucket=BUCKET, Key="a", Body=DATA)
    assert body(s3, "a", Range="bytes=10-19") == DATA[10:20]
    assert body(s3, "a", Range="bytes=2999990-") == DATA[2999990:]
    assert body(s3, "a", Range="bytes=-7") == DATA[-7:]
    assert body(s3, "a", Range="bytes=2999990-9999999") == DATA[2999990:]
    answer = s3.get_object(Bucket=BUCKET, Key="a", Range="bytes=1-2")
    assert answer["ContentRange"] == "bytes 1-2/3000000"
    with refusal("InvalidRange"):
        body(s3, "a", Range="bytes=3000000-")


def test_parts_become_one_object_and_no_byte_is_copied(s3: Any, directory: Path) -> None:
    one, two, three = os.urandom(70_000), os.urandom(1), os.urandom(130_000)
    etag = multipart(s3, "big", {3: three, 1: b"replaced", 2: two, 7: b""})
    assert etag.endswith('-4"')
    assert multipart(s3, "big", {3: three, 1: one, 2: two}).endswith('-3"')
    whole = one + two + three
    assert len(list(directory.iterdir())) == 3
    assert body(s3, "big") == whole
    assert s3.head_object(Bucket=BUCKET, Key="big")["ContentLength"] == len(whole)
    assert body(s3, "big", Range="bytes=69999-70001") == whole[69999:70002]
    assert body(s3, "big", Range="bytes=70001-70010") == whole[70001:70011]


def test_what_is_deleted_or_aborted_leaves_nothing(s3: Any, directory: Path) -> None:
    place = {"Bucket": BUCKET, "Key": "big"}
    upload_id = s3.create_multipart_upload(**place)["UploadId"]
    s3.upload_part(**place, UploadId=upload_id, PartNumber=1, Body=b"1")
    s3.upload_part(**place, UploadId=upload_id, PartNumber=1, Body=b"2")
    s3.put_object(Bucket=BUCKET, Key="a", Body=b"1")
    s3.put_object(Bucket=BUCKET, Key="a", Body=b"2")
    assert len(list(directory.iterdir())) == 2
    with refusal("BucketNotEmpty"):
        s3.delete_bucket(Bucket=BUCKET)
    s3.delete_object(Bucket=BUCKET, Key="a")
    s3.delete_object(Bucket=BUCKET, Key="a")
    s3.abort_multipart_upload(**place, UploadId=upload_id)
    assert not list(directory.iterdir())
    s3.delete_bucket(Bucket=BUCKET)
    with refusal("404"):
        s3.head_bucket(Bucket=BUCKET)


def test_what_is_not_there(s3: Any) -> None:
    with refusal("NoSuchKey"):
        body(s3, "a")
    with refusal("404"):
        s3.head_object(Bucket=BUCKET, Key="a")
    with refusal("NoSuchBucket"):
        s3.put_object(Bucket="other", Key="a", Body=b"1")
    with refusal("NoSuchUpload"):
        s3.upload_part(Bucket=BUCKET, Key="a", UploadId="0", PartNumber=1, Body=b"1")
    upload_id = s3.create_multipart_upload(Bucket=BUCKET, Key="a")["UploadId"]
    with refusal("InvalidPart"):
        told = {"Parts": [{"PartNumber": 1, "ETag": "0"}]}
        s3.complete_multipart_upload(Bucket=BUCKET, Key="a", UploadId=upload_id, MultipartUpload=told)


def test_what_the_sink_does_not_know_it_refuses(s3: Any, directory: Path) -> None:
    s3.put_object(Bucket=BUCKET, Key="a", Body=b"1")
    with refusal("NotImplemented"):
        s3.copy_object(Bucket=BUCKET, Key="b", CopySource={"Bucket": BUCKET, "Key": "a"})
    with refusal("NotImplemented"):
        s3.put_object_tagging(Bucket=BUCKET, Key="a", Tagging={"TagSet": []})
    assert body(s3, "a") == b"1"
    assert len(list(directory.iterdir())) == 1


def test_create_only(s3: Any, directory: Path) -> None:
    s3.put_object(Bucket=BUCKET, Key="a", Body=b"1", IfNoneMatch="*")
    with refusal("PreconditionFailed"):
        s3.put_object(Bucket=BUCKET, Key="a", Body=b"2", IfNoneMatch="*")
    assert body(s3, "a") == b"1"
    assert len(list(directory.iterdir())) == 1


def test_listings_come_in_pages(s3: Any) -> None:
    names = [f"x/{number:02} ü&" for number in range(7)]
    for name in [*names, "y"]:
        s3.put_object(Bucket=BUCKET, Key=name, Body=name.encode())
    pages = list(
        s3.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix="x/", PaginationConfig={"PageSize": 3})
    )
    assert [page["KeyCount"] for page in pages] == [3, 3, 1]
    found = [entry for page in pages for entry in page["Contents"]]
    assert [entry["Key"] for entry in found] == names
    assert {entry["Size"] for entry in found} == {len(names[0].encode())}
    assert s3.list_objects_v2(Bucket=BUCKET, StartAfter="x/9")["Contents"][0]["Key"] == "y"
    assert "Contents" not in s3.list_objects_v2(Bucket=BUCKET, Prefix="z")


def in_chunks(data: bytes, size_bytes: int, *, extension: str = "", trailers: str = "") -> bytes:
    """Encode a body in chunks, as HTTP and S3 do."""
    pieces = [data[start : start + size_bytes] for start in range(0, len(data), size_bytes)]
    lines = [f"{len(piece):x}{extension}\r\n".encode() + piece + b"\r\n" for piece in pieces]
    return b"".join([*lines, f"0{extension}\r\n{trailers}\r\n".encode()])


@pytest.mark.parametrize("chunk_bytes", [1_000, 64 * 1024, 2**20, len(DATA)])
@pytest.mark.parametrize("framed", ["s3", "http", "both"])
def test_bodies_in_chunks(wire: http.client.HTTPConnection, s3: Any, chunk_bytes: int, framed: str) -> None:
    sent, headers = DATA, {}
    if framed in ("s3", "both"):
        trailers = "x-amz-checksum-crc32:AAAAAA==\r\n"
        sent = in_chunks(DATA, chunk_bytes, extension=f";chunk-signature={'0' * 64}", trailers=trailers)
        headers |= {
            "x-amz-content-sha256": "STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER",
            "Content-Encoding": "aws-chunked",
        }
    if framed in ("http", "both"):
        sent = in_chunks(sent, 100_000)
        headers |= {"Transfer-Encoding": "chunked"}
    for key in ("one", "two"):  # over one connection: nothing is left of the first
        wire.request("PUT", f"/{BUCKET}/{key}", body=sent, headers=headers, encode_chunked=False)
        answer = wire.getresponse()
        assert (answer.status, answer.read()) == (200, b"")
        assert body(s3, key) == DATA


def test_a_body_that_breaks_off_is_no_object(sink: Sink, s3: Any, directory: Path) -> None:
    with socket.create_connection(("127.0.0.1", sink.port)) as sock:
        sock.sendall(f"PUT /{BUCKET}/a HTTP/1.1\r\nContent-Length: 100\r\n\r\n".encode() + bytes(99))
        until(lambda: list(directory.iterdir()) != [])
    until(lambda: list(directory.iterdir()) == [])
    with refusal("NoSuchKey"):
        body(s3, "a")


def test_over_tls_with_the_checksums_that_boto3_sends_by_itself(tmp_path: Path, directory: Path) -> None:
    certificate = throwaway_certificate(tmp_path / "both.pem")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate)
    sink = Sink(directory, tls=tls)
    threading.Thread(target=sink.serve, daemon=True).start()
    client = boto3.client(
        "s3",
        endpoint_url=f"https://127.0.0.1:{sink.port}",
        verify=str(certificate),
        config=Config(s3={"addressing_style": "path"}),
    )
    client.create_bucket(Bucket=BUCKET)
    client.put_object(Bucket=BUCKET, Key="a", Body=io.BytesIO(DATA))  # aws-chunked, CRC in a trailer
    assert body(client, "a") == DATA
    assert body(client, "a", Range="bytes=5-6") == DATA[5:7]
    client.close()
    sink.close()


def test_our_own_transfer(s3: Any, endpoint: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(DATA)
    segments = (Segment(source, 1_000_000, 2_000_000), Segment(source, 0, 1_000_000))
    url = f"{endpoint}/{BUCKET}/packs/1"
    found: dict[int, bytes] = {}
    transfer = Transfer(workers=2)
    upload = Upload(name="pack", segments=segments, size_bytes=3_000_000, url=url, headers={"If-None-Match": "*"})
    transfer.upload([upload])
    transfer.upload([upload])
    assert transfer.stats.counts.already_stored_objects == 1
    transfer.download([Download(name="pack", url=url, root=tmp_path, path="whole", size_bytes=3_000_000)])
    transfer.fetch_ranges(
        [
            RangeDownload(
                name="pack",
                url=url,
                offset=offset,
                size_bytes=500_000,
                object_bytes=3_000_000,
                deliver=lambda piece, offset=offset: found.update({offset: bytes(piece)}),
            )
            for offset in (0, 1_750_000)
        ]
    )
    transfer.close()
    stored = DATA[1_000_000:] + DATA[:1_000_000]
    assert (tmp_path / "whole").read_bytes() == stored
    assert found == {offset: stored[offset : offset + 500_000] for offset in (0, 1_750_000)}
