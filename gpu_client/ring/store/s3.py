"""A ring in a bucket of S3, or of a store that is like it: nothing runs but the bucket.

Objects are made by PUTs that demand that there is none of that key, records are swapped by PUTs that demand the version
that was seen. Each PUT has a mark of its own: where an answer was lost, the mark tells whether it had been carried out.
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
from gpu_client.ring.store.object_prefetcher import Fetching
from gpu_client.ring.store.s3_client import Bucket, Reply, Request
from gpu_client.transport.net.connections import BrokenConnection

PART_BYTES = 8 * 1024 * 1024
"""More than so much is read in several parts at a time."""
MAX_OBJECT_BYTES = 5 * 1024**3
"""What one PUT may have."""
_MARK = "x-amz-meta-baton-put"
KEYS_PER_REQUEST = 1000
"""Listed or deleted."""
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX = re.compile(r"[A-Za-z0-9_~-][A-Za-z0-9._~-]*(/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)*")
_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19})")
_ABSENT = frozenset({404})
_LOST = frozenset({404, 412})
_NOTHING = frozenset({404, 412, 416})


class BucketStore:
    """Any number of processes, and threads, may use the same place."""

    def __init__(self, place: str, bucket: Bucket | None = None) -> None:
        """`place`: `bucket/prefix`. Asks nothing of the store yet. Raises RingMismatch for a text that names none."""
        name, _, prefix = place.partition("/")
        prefix = prefix.strip("/")
        if not _BUCKET.fullmatch(name) or not _PREFIX.fullmatch(prefix) or len(prefix) > 500:
            raise RingMismatch(
                f"s3://{place} is no place of a ring",
                "Name a bucket and a prefix of letters, digits and -_.~ that is the ring's alone: s3://bucket/rings/mine",
            )
        self.bucket = bucket or Bucket(name)
        self._prefix = f"{prefix}/"
        self._fetching = Fetching("ring-s3-objects")

    def create(self, key: str, pieces: Sequence[memoryview]) -> bool:
        """As in the protocol."""
        reply, mark = self._put(key, pieces, {"If-None-Match": "*"})
        return reply.status < 300 or self._put_before(key, reply, mark) is not None

    def read(self, key: str) -> memoryview | None:
        """As in the protocol. Parts of a large object are fetched at once."""
        return self._fetching.read(key, self._read)

    def begin(self, keys: Sequence[str]) -> None:
        """As in the protocol."""
        self._fetching.begin(keys, self._read)

    def _read(self, key: str) -> memoryview | None:
        reply = self._get_part(key, 0, PART_BYTES, {})
        if reply.status == 404:
            return None
        if reply.status == 416:  # there are no bytes to be had of an empty one
            return memoryview(bytearray())
        first: _Part = reply.received
        whole = first.end == first.size_bytes or self._fetched_rest(key, first, reply.headers["etag"])
        return first.whole if whole else None

    def record(self, key: str) -> Versioned | None:
        """As in the protocol."""
        reply = self.bucket.send(Request(method="GET", key=self._prefix + key, expected=_ABSENT))
        return None if reply.status == 404 else Versioned(reply.body, reply.headers["etag"])

    def swap(self, key: str, data: bytes, seen: str | None) -> str | None:
        """As in the protocol."""
        condition = {"If-None-Match": "*"} if seen is None else {"If-Match": seen}
        reply, mark = self._put(key, [memoryview(data)], condition)
        return reply.headers["etag"] if reply.status < 300 else self._put_before(key, reply, mark)

    def keys(self, prefix: str) -> list[str]:
        """As in the protocol."""
        pages = self._listed(prefix)
        return sorted(
            html.unescape(key)[len(self._prefix) :] for text in pages for key in re.findall(r"<Key>([^<]*)</Key>", text)
        )

    def stored_bytes(self) -> int:
        """As in the protocol."""
        return sum(int(size) for text in self._listed("") for size in re.findall(r"<Size>([0-9]+)</Size>", text))

    def _listed(self, prefix: str) -> Iterator[str]:
        query = {"list-type": "2", "prefix": self._prefix + prefix, "max-keys": str(KEYS_PER_REQUEST)}
        while True:
            text = self.bucket.send(Request(method="GET", query=query)).body.decode()
            yield text
            if "<IsTruncated>true</IsTruncated>" not in text:
                return
            token = re.search(r"<NextContinuationToken>([^<]*)</NextContinuationToken>", text)
            if token is None:
                raise OSError(f"the bucket {self.bucket.name} lists a part of its keys, and not how to go on")
            query = {**query, "continuation-token": html.unescape(token[1])}

    def delete(self, keys: Sequence[str]) -> None:
        """As in the protocol."""
        for begin in range(0, len(keys), KEYS_PER_REQUEST):
            named = "".join(
                f"<Object><Key>{self._prefix}{html.escape(key)}</Key></Object>"
                for key in keys[begin : begin + KEYS_PER_REQUEST]
            )
            body = f"<Delete><Quiet>true</Quiet>{named}</Delete>".encode()
            digest = base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()
            reply = self.bucket.send(
                Request(
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
        """Nothing is there in part."""
        return 0

    def close(self) -> None:
        """Close connections, end threads."""
        self._fetching.close()
        self.bucket.close()

    def _put(self, key: str, pieces: Sequence[memoryview], condition: Mapping[str, str]) -> tuple[Reply, str]:
        """The answer, and the mark that the content has if it is stored."""
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
        request = Request(method="PUT", key=self._prefix + key, headers=headers, body=pieces, expected=_LOST)
        return self.bucket.send(request), mark

    def _put_before(self, key: str, reply: Reply, mark: str) -> str | None:
        """The version, if a PUT that was refused is there all the same: by an earlier try, whose answer was lost."""
        if not reply.repeated:
            return None
        there = self.bucket.send(Request(method="HEAD", key=self._prefix + key, expected=_ABSENT))
        return there.headers["etag"] if there.status < 300 and there.headers.get(_MARK) == mark else None

    def _get_part(self, key: str, begin: int, end: int, headers: Mapping[str, str], into: _Part | None = None) -> Reply:
        """The bytes from `begin` up to `end`, or up to the object's; written to where they belong in `into`'s."""

        def receive(response: HTTPResponse) -> _Part:
            part = _announced(response, key)
            whole = into.whole if into is not None else np.empty(part.size_bytes, np.uint8).data
            if part.begin != begin or (into is not None and (part.end, part.size_bytes) != (end, into.size_bytes)):
                raise _other_bytes(key, response)
            _read_into(response, whole[part.begin : part.end])
            return part._replace(whole=whole)

        return self.bucket.send(
            Request(
                method="GET",
                key=self._prefix + key,
                headers={"Range": f"bytes={begin}-{end - 1}", **headers},
                expected=_NOTHING,
                receive=receive,
            )
        )

    def _fetched_rest(self, key: str, first: _Part, etag: str) -> bool:
        """All parts behind the first one, of the same version; False if it was deleted meanwhile."""
        threads = self.bucket.part_threads()
        pending = [
            threads.submit(
                self._get_part, key, begin, min(begin + PART_BYTES, first.size_bytes), {"If-Match": etag}, first
            )
            for begin in range(first.end, first.size_bytes, PART_BYTES)
        ]
        wait(pending)  # all of them, since they write to what is given up after an error
        statuses = {one.result().status for one in pending}
        if 412 in statuses:
            raise ObjectDamaged(f"{key} is damaged: it was replaced while it was read", "Somebody else writes there")
        return max(statuses) < 300


class _Part(NamedTuple):
    """Some bytes of an object, in the memory for all of it."""

    begin: int
    end: int
    size_bytes: int
    """Of the whole object."""
    whole: memoryview


def _announced(response: HTTPResponse, key: str) -> _Part:
    """What an answer brings, by its headers."""
    text = response.headers.get("Content-Range")
    if text is None and response.length is not None:  # all of it, whatever was asked for
        return _Part(0, response.length, response.length, memoryview(b""))
    found = _CONTENT_RANGE.fullmatch((text or "").strip())
    if found is None:
        raise _other_bytes(key, response)
    return _Part(int(found[1]), int(found[2]) + 1, int(found[3]), memoryview(b""))


def _other_bytes(key: str, response: HTTPResponse) -> ObjectDamaged:
    said = response.headers.get("Content-Range", f"{response.status} without a length")
    return ObjectDamaged(
        f"{key} is damaged: the store sends other bytes than were asked for ({said[:80]})", "Look there"
    )


def _read_into(response: HTTPResponse, view: memoryview) -> None:
    filled = 0
    while filled < len(view):
        got = response.readinto(view[filled:])
        if not got:
            raise BrokenConnection(f"cut short after {filled} of {len(view)} bytes")
        filled += got
    response.read(1)  # the end, so that the connection can be used again
