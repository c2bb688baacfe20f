"""A ring in a bucket of S3, or of a compatible store, without any server.

A PUT with `If-None-Match` creates an object, a PUT with `If-Match` swaps a record. Each PUT carries a unique mark:
after a lost answer, the mark shows if the PUT was executed.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import wait
from http.client import HTTPResponse
from typing import NamedTuple

import numpy as np
from awscrt import checksums

from gpu_client.ring.errors import ObjectDamaged, RingMismatch
from gpu_client.ring.format.records import Versioned
from gpu_client.ring.store.object_prefetcher import ObjectPrefetcher
from gpu_client.ring.store.s3_client import BucketClient, BucketReply, BucketRequest
from gpu_client.transport.net.connections import BrokenConnection

PART_BYTES = 8 * 1024 * 1024
"""Larger objects are read in concurrent parts of this size."""
MAX_OBJECT_BYTES = 5 * 1024**3
"""Maximum size of one PUT."""
_MARK = "x-amz-meta-baton-put"
KEYS_PER_REQUEST = 1000
"""Keys of one list or delete request."""
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX = re.compile(r"[A-Za-z0-9_~-][A-Za-z0-9._~-]*(/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)*")
_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19})")
_ABSENT = frozenset({404})
_LOST = frozenset({404, 412})
_NOTHING = frozenset({404, 412, 416})


class BucketStore:
    """Store in a bucket that any number of processes and threads share."""

    def __init__(self, place: str, bucket: BucketClient | None = None) -> None:
        """`place`: `bucket/prefix`. Sends no request. Raises RingMismatch for an invalid place."""
        name, _, prefix = place.partition("/")
        prefix = prefix.strip("/")
        if not _BUCKET.fullmatch(name) or not _PREFIX.fullmatch(prefix) or len(prefix) > 500:
            raise RingMismatch(
                f"s3://{place} is not a place of a ring",
                "Name a bucket and a prefix of letters, digits and -_.~ that is the ring's alone: s3://bucket/rings/mine",
            )
        self.bucket = bucket or BucketClient(name)
        self._prefix = f"{prefix}/"
        self._prefetcher = ObjectPrefetcher("ring-s3-objects")

    def create(self, key: str, pieces: Sequence[memoryview]) -> bool:
        """Implement the protocol."""
        reply, mark = self._put(key, pieces, {"If-None-Match": "*"})
        return reply.status < 300 or self._find_own_put(key, reply, mark) is not None

    def read(self, key: str) -> memoryview | None:
        """Implement the protocol. Reads a large object in concurrent parts."""
        return self._prefetcher.read(key, self._read)

    def prefetch(self, keys: Sequence[str]) -> None:
        """Implement the protocol."""
        self._prefetcher.prefetch(keys, self._read)

    def _read(self, key: str) -> memoryview | None:
        reply = self._get_part(key, 0, PART_BYTES, {})
        if reply.status == 404:
            return None
        if reply.status == 416:  # an empty object has no range
            return memoryview(bytearray())
        first: _ObjectPart = reply.received
        whole = first.end == first.size_bytes or self._fetch_rest(key, first, reply.headers["etag"])
        return first.whole if whole else None

    def record(self, key: str) -> Versioned | None:
        """Implement the protocol."""
        reply = self.bucket.send(BucketRequest(method="GET", key=self._prefix + key, expected=_ABSENT))
        return None if reply.status == 404 else Versioned(reply.body, reply.headers["etag"])

    def swap(self, key: str, data: bytes, seen: str | None) -> str | None:
        """Implement the protocol."""
        condition = {"If-None-Match": "*"} if seen is None else {"If-Match": seen}
        reply, mark = self._put(key, [memoryview(data)], condition)
        return reply.headers["etag"] if reply.status < 300 else self._find_own_put(key, reply, mark)

    def keys(self, prefix: str) -> list[str]:
        """Implement the protocol."""
        pages = self._list_pages(prefix)
        return sorted(
            html.unescape(key)[len(self._prefix) :] for text in pages for key in re.findall(r"<Key>([^<]*)</Key>", text)
        )

    def stored_bytes(self) -> int:
        """Implement the protocol."""
        return sum(int(size) for text in self._list_pages("") for size in re.findall(r"<Size>([0-9]+)</Size>", text))

    def _list_pages(self, prefix: str) -> Iterator[str]:
        query = {"list-type": "2", "prefix": self._prefix + prefix, "max-keys": str(KEYS_PER_REQUEST)}
        while True:
            text = self.bucket.send(BucketRequest(method="GET", query=query)).body.decode()
            yield text
            if "<IsTruncated>true</IsTruncated>" not in text:
                return
            token = re.search(r"<NextContinuationToken>([^<]*)</NextContinuationToken>", text)
            if token is None:
                raise OSError(f"the bucket {self.bucket.name} returned a part of its keys without a continuation token")
            query = {**query, "continuation-token": html.unescape(token[1])}

    def delete(self, keys: Sequence[str]) -> None:
        """Implement the protocol."""
        for begin in range(0, len(keys), KEYS_PER_REQUEST):
            named = "".join(
                f"<Object><Key>{self._prefix}{html.escape(key)}</Key></Object>"
                for key in keys[begin : begin + KEYS_PER_REQUEST]
            )
            body = f"<Delete><Quiet>true</Quiet>{named}</Delete>".encode()
            digest = base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()
            reply = self.bucket.send(
                BucketRequest(
                    method="POST",
                    query={"delete": ""},
                    headers={"Content-MD5": digest, "Content-Type": "application/xml"},
                    body=[memoryview(body)],
                )
            )
            refused = [code for code in re.findall(r"<Code>([^<]*)</Code>", reply.body.decode()) if code != "NoSuchKey"]
            if refused:
                raise OSError(f"{len(refused)} keys of the bucket {self.bucket.name} were not deleted ({refused[0]})")

    def tidy(self, older_than_s: float) -> int:
        """Do nothing: no write is ever incomplete."""
        return 0

    def close(self) -> None:
        """Close connections and end threads."""
        self._prefetcher.close()
        self.bucket.close()

    def _put(self, key: str, pieces: Sequence[memoryview], condition: Mapping[str, str]) -> tuple[BucketReply, str]:
        """Send a conditional PUT. Returns the answer and the mark of the content."""
        size_bytes = sum(map(len, pieces))
        if size_bytes > MAX_OBJECT_BYTES:
            raise OSError(
                f"{key} has {size_bytes} bytes, and one object at most {MAX_OBJECT_BYTES}: make packs smaller"
            )
        checksum = 0
        for piece in pieces:
            checksum = checksums.crc64nvme(piece, checksum)
        mark = secrets.token_hex(8)
        headers = {
            **condition,
            _MARK: mark,
            "x-amz-checksum-crc64nvme": base64.b64encode(checksum.to_bytes(8, "big")).decode(),
        }
        request = BucketRequest(method="PUT", key=self._prefix + key, headers=headers, body=pieces, expected=_LOST)
        return self.bucket.send(request), mark

    def _find_own_put(self, key: str, reply: BucketReply, mark: str) -> str | None:
        """Return the version if an earlier try of a refused PUT, whose answer was lost, has stored the content."""
        if not reply.repeated:
            return None
        there = self.bucket.send(BucketRequest(method="HEAD", key=self._prefix + key, expected=_ABSENT))
        return there.headers["etag"] if there.status < 300 and there.headers.get(_MARK) == mark else None

    def _get_part(
        self, key: str, begin: int, end: int, headers: Mapping[str, str], into: _ObjectPart | None = None
    ) -> BucketReply:
        """Read the bytes from `begin` to `end`, or to the end of the object, into the memory of `into`."""

        def receive(response: HTTPResponse) -> _ObjectPart:
            part = _parse_range(response, key)
            whole = into.whole if into is not None else np.empty(part.size_bytes, np.uint8).data
            if part.begin != begin or (into is not None and (part.end, part.size_bytes) != (end, into.size_bytes)):
                raise _wrong_bytes_error(key, response)
            _read_into(response, whole[part.begin : part.end])
            return part._replace(whole=whole)

        return self.bucket.send(
            BucketRequest(
                method="GET",
                key=self._prefix + key,
                headers={"Range": f"bytes={begin}-{end - 1}", **headers},
                expected=_NOTHING,
                receive=receive,
            )
        )

    def _fetch_rest(self, key: str, first: _ObjectPart, etag: str) -> bool:
        """Read all parts after the first one, of the same version. Returns False for a deleted object."""
        threads = self.bucket.part_threads()
        pending = [
            threads.submit(
                self._get_part, key, begin, min(begin + PART_BYTES, first.size_bytes), {"If-Match": etag}, first
            )
            for begin in range(first.end, first.size_bytes, PART_BYTES)
        ]
        wait(pending)  # for all parts: after an error, their buffer is released
        statuses = {one.result().status for one in pending}
        if 412 in statuses:
            raise ObjectDamaged(
                f"{key} is damaged: it was replaced during the read",
                "Keep other programs from writing below the prefix",
            )
        return max(statuses) < 300


class _ObjectPart(NamedTuple):
    """Part of an object, in the memory of the whole object."""

    begin: int
    end: int
    size_bytes: int
    """Size of the whole object."""
    whole: memoryview


def _parse_range(response: HTTPResponse, key: str) -> _ObjectPart:
    """Parse the range of an answer from its headers."""
    text = response.headers.get("Content-Range")
    if text is None and response.length is not None:  # the whole object, whatever the range was
        return _ObjectPart(0, response.length, response.length, memoryview(b""))
    found = _CONTENT_RANGE.fullmatch((text or "").strip())
    if found is None:
        raise _wrong_bytes_error(key, response)
    return _ObjectPart(int(found[1]), int(found[2]) + 1, int(found[3]), memoryview(b""))


def _wrong_bytes_error(key: str, response: HTTPResponse) -> ObjectDamaged:
    header = response.headers.get("Content-Range", f"{response.status} without a length")
    return ObjectDamaged(
        f"{key} is damaged: the store sent bytes other than the requested range ({header[:80]})", "Check the store"
    )


def _read_into(response: HTTPResponse, view: memoryview) -> None:
    filled = 0
    while filled < len(view):
        got = response.readinto(view[filled:])
        if not got:
            raise BrokenConnection(f"cut short after {filled} of {len(view)} bytes")
        filled += got
    response.read(1)  # read to the end, so that the connection can be used again
