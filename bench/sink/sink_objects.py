"""S3 of the sink without sockets: buckets, objects, multipart uploads, listings.

An object is a list of files, served one behind the other: completing a multipart upload copies nothing. Names and
versions are kept in memory; only the bytes are files.
"""

from __future__ import annotations

import itertools
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path
from typing import BinaryIO
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

_RANGE = re.compile(r"bytes=(\d*)-(\d*)")
_PART = re.compile(rb"<PartNumber>(\d+)</PartNumber>")
_NAMESPACE = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
_PAGE = 1000
_MULTIPART = ("uploads", "uploadId", "partNumber", "x-id")
_LISTING = ("list-type", "prefix", "max-keys", "start-after", "continuation-token", "encoding-type")
_KNOWN_QUERY = frozenset({*_MULTIPART, *_LISTING})


@dataclass(frozen=True)
class Request:
    """Request in path style: `/bucket/key`. `query` has the first value of each name."""

    method: str
    bucket: str
    key: str
    query: Mapping[str, str]
    headers: Mapping[str, str]

    @classmethod
    def parse(cls, method: str, target: str, headers: Mapping[str, str]) -> Request:
        parts = urlsplit(target)
        bucket, _, key = parts.path.removeprefix("/").partition("/")
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        return cls(method, unquote(bucket), unquote(key), query, headers)

    @property
    def stores(self) -> bool:
        """Recognize a request whose body is an object or a part of one."""
        return self.method == "PUT" and bool(self.key)

    @property
    def unknown(self) -> list[str]:
        """Name the unknown feature that a request asks for."""
        names = [name for name in self.query if name not in _KNOWN_QUERY and not name.lower().startswith("x-amz-")]
        return [*names, *(name for name in self.headers if name == "x-amz-copy-source")]


@dataclass(frozen=True)
class Stored:
    """Files of an object and their sizes, in order."""

    files: tuple[tuple[Path, int], ...]
    etag: str
    modified_at: datetime

    @property
    def size_bytes(self) -> int:
        return sum(size for _, size in self.files)


@dataclass(frozen=True)
class Answer:
    """Status with content, or with pieces of open files that are closed at the answer's end."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    content: bytes = b""
    pieces: tuple[tuple[BinaryIO, int, int], ...] = ()
    length: int | None = None
    """Content length in the answer to a HEAD, which has no content."""

    @property
    def size_bytes(self) -> int:
        if self.length is not None:
            return self.length
        return len(self.content) + sum(size for _, _, size in self.pieces)

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *_exception: object) -> None:
        for file, _, _ in self.pieces:
            file.close()


class Refused(Exception):  # noqa: N818 - an answer
    """Error answer to the client."""

    def __init__(self, status: int, code: str, message: str = "") -> None:
        self.status = status
        self.code = code
        super().__init__(message or code)


@dataclass
class _Upload:
    bucket: str
    key: str
    parts: dict[int, Stored] = field(default_factory=dict)


class Objects:
    """Buckets of a sink. Thread-safe."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._buckets: dict[str, dict[str, Stored]] = {}
        self._uploads: dict[str, _Upload] = {}
        self._numbers = itertools.count()

    @contextmanager
    def incoming(self) -> Iterator[tuple[Path, int]]:
        """Open a new file; an interrupted body removes the file."""
        path = self._directory / f"{next(self._numbers):08}"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            yield path, descriptor
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)

    def store(self, request: Request, path: Path, size_bytes: int) -> Answer:
        """Store the body of a PUT."""
        stored = Stored(((path, size_bytes),), _etag(), datetime.now(UTC))
        return self._answered(request, lambda: self._store(request, stored), otherwise=lambda: _remove([stored]))

    def answer(self, request: Request, content: bytes) -> Answer:
        """Answer all other requests; `content` is the body."""
        acts: dict[str, Callable[[], Answer]] = {
            "PUT": lambda: self._make_bucket(request),
            "POST": lambda: self._multipart(request, content),
            "GET": lambda: self._get(request),
            "HEAD": lambda: self._get(request),
            "DELETE": lambda: self._delete(request),
        }
        return self._answered(request, acts.get(request.method, _refuse), otherwise=lambda: None)

    def _answered(self, request: Request, act: Callable[[], Answer], otherwise: Callable[[], None]) -> Answer:
        try:
            if request.unknown:
                raise Refused(501, "NotImplemented", f"the sink does not know {', '.join(request.unknown)}")
            with self._lock:
                return act()
        except Refused as refused:
            otherwise()
            fields = f"<Code>{refused.code}</Code><Message>{escape(str(refused))}</Message>"
            return _xml(refused.status, f"<Error>{fields}</Error>")

    def _bucket(self, request: Request) -> dict[str, Stored]:
        try:
            return self._buckets[request.bucket]
        except KeyError:
            raise Refused(404, "NoSuchBucket") from None

    def _make_bucket(self, request: Request) -> Answer:
        if not request.bucket:
            raise Refused(405, "MethodNotAllowed")
        self._buckets.setdefault(request.bucket, {})
        return Answer(200, {"Location": f"/{request.bucket}"})

    def _store(self, request: Request, stored: Stored) -> Answer:
        objects = self._bucket(request)
        if "uploadId" in request.query:
            parts = self._upload(request).parts
            number = int(request.query["partNumber"])
            _remove([old] if (old := parts.get(number)) else [])
            parts[number] = stored
        else:
            if request.headers.get("if-none-match") == "*" and request.key in objects:
                raise Refused(412, "PreconditionFailed")
            _remove([old] if (old := objects.get(request.key)) else [])
            objects[request.key] = stored
        return Answer(200, {"ETag": stored.etag})

    def _upload(self, request: Request) -> _Upload:
        upload = self._uploads.get(request.query.get("uploadId", ""))
        if upload is None or (upload.bucket, upload.key) != (request.bucket, request.key):
            raise Refused(404, "NoSuchUpload")
        return upload

    def _multipart(self, request: Request, content: bytes) -> Answer:
        objects, names = (
            self._bucket(request),
            f"<Bucket>{escape(request.bucket)}</Bucket><Key>{escape(request.key)}</Key>",
        )
        if not request.key:
            raise Refused(501, "NotImplemented")
        if "uploads" in request.query:
            upload_id = secrets.token_hex(16)
            self._uploads[upload_id] = _Upload(request.bucket, request.key)
            fields = f"{names}<UploadId>{upload_id}</UploadId>"
            return _xml(200, f"<InitiateMultipartUploadResult {_NAMESPACE}>{fields}</InitiateMultipartUploadResult>")
        parts = self._upload(request).parts
        numbers = [int(number) for number in _PART.findall(content)]
        if not numbers or any(number not in parts for number in numbers) or numbers != sorted(set(numbers)):
            raise Refused(400, "InvalidPart")
        files = tuple(file for number in numbers for file in parts[number].files)
        _remove([old] if (old := objects.get(request.key)) else [])
        stored = Stored(files, _etag(len(numbers)), datetime.now(UTC))
        objects[request.key] = stored
        _remove(part for number, part in parts.items() if number not in numbers)
        del self._uploads[request.query["uploadId"]]
        fields = f"{names}<ETag>{escape(stored.etag)}</ETag>"
        return _xml(200, f"<CompleteMultipartUploadResult {_NAMESPACE}>{fields}</CompleteMultipartUploadResult>")

    def _delete(self, request: Request) -> Answer:
        objects = self._bucket(request)
        if "uploadId" in request.query:
            _remove(self._upload(request).parts.values())
            del self._uploads[request.query["uploadId"]]
        elif request.key:
            _remove([old] if (old := objects.pop(request.key, None)) else [])
        elif objects:
            raise Refused(409, "BucketNotEmpty")
        else:
            del self._buckets[request.bucket]
        return Answer(204)

    def _get(self, request: Request) -> Answer:
        objects = self._bucket(request)
        if not request.key:
            return Answer(200) if request.method == "HEAD" else _listing(request, objects)
        stored = objects.get(request.key)
        if stored is None:
            raise Refused(404, "NoSuchKey")
        size_bytes = stored.size_bytes
        headers = {
            "ETag": stored.etag,
            "Last-Modified": format_datetime(stored.modified_at, usegmt=True),
            "Accept-Ranges": "bytes",
            "Content-Type": "binary/octet-stream",
        }
        status, (begin, end) = 200, (0, size_bytes)
        asked = _RANGE.fullmatch(request.headers.get("range", ""))
        if asked is not None and any(asked.groups()):
            status, (begin, end) = 206, _bounds(asked, size_bytes)
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size_bytes}"
        if request.method == "HEAD":
            return Answer(status, headers, length=end - begin)
        # Opened before anybody can replace the object.
        return Answer(status, headers, pieces=tuple(_pieces(stored, begin, end)))


def _refuse() -> Answer:
    raise Refused(405, "MethodNotAllowed")


def _bounds(asked: re.Match[str], size_bytes: int) -> tuple[int, int]:
    first, last = asked.groups()
    begin = int(first) if first else max(0, size_bytes - int(last))
    end = min(size_bytes, int(last) + 1) if first and last else size_bytes
    if begin >= end:
        raise Refused(416, "InvalidRange")
    return begin, end


def _pieces(stored: Stored, begin: int, end: int) -> Iterator[tuple[BinaryIO, int, int]]:
    at = 0
    for path, size_bytes in stored.files:
        first, last = max(begin - at, 0), min(end - at, size_bytes)
        if first < last:
            yield path.open("rb"), first, last - first
        at += size_bytes


def _listing(request: Request, objects: Mapping[str, Stored]) -> Answer:
    """List objects by ListObjectsV2; the last key of a page is the token for the next."""
    query = request.query
    after = query.get("continuation-token") or query.get("start-after", "")
    most = min(int(query.get("max-keys", _PAGE)), _PAGE)
    prefix = query.get("prefix", "")
    found = sorted(key for key in objects if key.startswith(prefix) and key > after)
    page, more = found[:most], len(found) > most

    def name(key: str) -> str:
        return quote(key, safe="/") if query.get("encoding-type") == "url" else escape(key)

    fields = [f"<Name>{escape(request.bucket)}</Name><Prefix>{name(prefix)}</Prefix><MaxKeys>{most}</MaxKeys>"]
    fields.append(f"<KeyCount>{len(page)}</KeyCount><IsTruncated>{str(more).lower()}</IsTruncated>")
    if "encoding-type" in query:
        fields.append("<EncodingType>url</EncodingType>")
    if more and page:
        fields.append(f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>")
    for key in page:
        stored = objects[key]
        when = stored.modified_at.strftime("%Y-%m-%dT%H:%M:%S.000Z")
        fields.append(
            f"<Contents><Key>{name(key)}</Key><LastModified>{when}</LastModified><ETag>{escape(stored.etag)}</ETag>"
            f"<Size>{stored.size_bytes}</Size><StorageClass>STANDARD</StorageClass></Contents>"
        )
    return _xml(200, f"<ListBucketResult {_NAMESPACE}>{''.join(fields)}</ListBucketResult>")


def _xml(status: int, content: str) -> Answer:
    data = f'<?xml version="1.0" encoding="UTF-8"?>\n{content}'.encode()
    return Answer(status, {"Content-Type": "application/xml"}, content=data)


def _etag(parts: int = 0) -> str:
    return f'"{secrets.token_hex(16)}{f"-{parts}" if parts else ""}"'


def _remove(objects: Iterable[Stored]) -> None:
    """Remove files; a current reader has them open."""
    for stored in objects:
        for path, _ in stored.files:
            path.unlink()
