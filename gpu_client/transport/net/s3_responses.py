"""The object store's answers: what they mean, their bodies piece by piece, whether a range is the one asked for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from http.client import HTTPResponse
from typing import Protocol
from urllib.parse import parse_qs, urlsplit

from gpu_client.transport.errors import ChecksumMismatch, ObjectMissing, TransferError, UrlExpired
from gpu_client.transport.net.connections import BrokenConnection
from gpu_client.transport.net.files import CHUNK_BYTES
from gpu_client.transport.retry import RETRIED_STATUSES, Failure, RetryLater, parse_retry_after

MAX_ERROR_BYTES = 16 * 1024

_PASSING_CODES = frozenset({"RequestTimeout", "SlowDown", "OperationAborted", "ConditionalRequestConflict"})
_OVERLOAD_CODES = frozenset({"SlowDown", "RequestTimeout"})
_DIGEST_CODES = frozenset({"BadDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch"})
_EXPIRED_CODES = frozenset({"ExpiredToken", "RequestExpired", "ExpiredRequest", "TokenRefreshRequired"})
_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)")


class Pace(Protocol):
    """Limits and counts the bytes of one try."""

    def allow(self, wanted_bytes: int) -> int:
        """Return how many of the next `wanted_bytes` may move now, at least 1. Waits; raises TransferCanceled."""
        ...

    def moved(self, size_bytes: int) -> None:
        """Count bytes that have moved."""
        ...

    def passed(self, size_bytes: int) -> None:
        """Count bytes that have moved and that the caller discards."""
        ...


@dataclass(frozen=True, kw_only=True)
class RefusedRequest:
    """A request that was answered with 300 or more, and that answer. `name` stands for the object in messages."""

    name: str
    method: str
    url: str
    status: int
    body: bytes
    retry_after: str | None
    date: str | None


def judge_refusal(refused: RefusedRequest) -> Failure | TransferError:
    """A Failure if it may pass by itself, else the error to raise."""
    name, method, status = refused.name, refused.method, refused.status
    code, message = _code_and_message(refused.body)
    said = f"{status} {code or ''} {message or ''}".strip()
    retry_after_s = parse_retry_after(refused.retry_after, date=refused.date)
    passing = status in RETRIED_STATUSES or code in _PASSING_CODES
    if passing or (status == 409 and method == "PUT"):
        # 409 on a create-only PUT: another upload of the same object was under way
        overload = status in (429, 503) or code in _OVERLOAD_CODES
        return Failure(reason=said, status=503, code=code, retry_after_s=retry_after_s, overload=overload)
    if code in _DIGEST_CODES:
        return ChecksumMismatch(f"{name}: the store received other bytes than declared ({said})")
    if status in (400, 401, 403) and (code in _EXPIRED_CODES or "expired" in said.lower()):
        return UrlExpired(f"{name}: the presigned URL has run out ({said})")
    if status == 403 and _ran_out(refused.url, refused.date):
        return UrlExpired(f"{name}: the presigned URL has run out ({said})")
    if status == 412:
        # the version that the URL was to replace is gone, or our own unanswered try has replaced it
        return UrlExpired(f"{name}: the object has changed since the URL was made ({said})")
    if code == "NoSuchUpload":
        # an upload in parts that somebody else has completed, or a lifecycle rule has ended
        return UrlExpired(f"{name}: the upload that the URL is for has ended ({said})")
    if status == 404 and method == "GET":
        return ObjectMissing(f"{name}: not in the store ({said})")
    return TransferError(f"{name}: the store refused the {method} ({said})")


def _code_and_message(body: bytes) -> tuple[str | None, str | None]:
    text = body.decode("utf-8", "replace")
    code = re.search(r"<Code>([^<]{1,100})</Code>", text)
    message = re.search(r"<Message>([^<]{1,300})</Message>", text)
    return (code.group(1) if code else None), (message.group(1) if message else None)


def url_life_s(url: str) -> int | None:
    """For how many seconds a presigned URL was made; None if it does not say."""
    try:
        return int(parse_qs(urlsplit(url).query)["X-Amz-Expires"][0])
    except (KeyError, ValueError):
        return None


def _ran_out(url: str, date: str | None) -> bool:
    """True if by the store's own clock the URL's time is over: not every store says so in its answer."""
    query = parse_qs(urlsplit(url).query)
    try:
        signed_at = datetime.strptime(query["X-Amz-Date"][0], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
        life = timedelta(seconds=int(query["X-Amz-Expires"][0]))
        return date is not None and parsedate_to_datetime(date) >= signed_at + life
    except (KeyError, ValueError, TypeError, OverflowError):
        return False  # not an AWS-style URL, or a Date without a zone, or numbers beyond all bounds


def require_success(response: HTTPResponse, *, name: str, method: str, url: str) -> None:
    """Raise what the answer means unless it is a success (S3 says 200; look-alikes 201 or 204 to a PUT)."""
    if response.status in (200, 201, 204):
        return
    outcome = judge_refusal(
        RefusedRequest(
            name=name,
            method=method,
            url=url,
            status=response.status,
            body=response.read(MAX_ERROR_BYTES),
            retry_after=response.headers.get("Retry-After"),
            date=response.headers.get("Date"),
        )
    )
    if isinstance(outcome, Failure):
        raise RetryLater(outcome)
    raise outcome


def read_to_end(response: HTTPResponse) -> None:
    """What is left of a short answer, so that the connection can be used again."""
    response.read(MAX_ERROR_BYTES)


def pieces(response: HTTPResponse, pace: Pace) -> Iterator[memoryview]:
    """The body, piece by piece (valid until the next one). BrokenConnection if it is shorter than announced."""
    view = memoryview(bytearray(CHUNK_BYTES))
    announced = response.length
    received = 0
    while size_bytes := response.readinto(view[: pace.allow(CHUNK_BYTES)]):
        received += size_bytes
        pace.moved(size_bytes)
        yield view[:size_bytes]
    if announced is not None and received < announced:
        raise BrokenConnection(f"cut short after {received} of {announced} bytes")


def range_headers(offset: int, end: int, object_bytes: int) -> dict[str, str]:
    """What asks for the bytes from `offset` up to `end`; nothing when that is the whole object."""
    return {} if (offset, end) == (0, object_bytes) else {"Range": f"bytes={offset}-{end - 1}"}


def begins_at(response: HTTPResponse, *, name: str, url: str, offset: int, end: int, object_bytes: int) -> int:
    """Where in the object the body begins: at `offset`, or at 0 if the store sends all of it.

    Raises ChecksumMismatch for any other part of any other object, and what a refusal means.
    """
    if response.status == 416:
        raise ChecksumMismatch(f"{name}: has fewer than the {end} bytes that it should have")
    if response.status == 206 or (response.status == 200 and "Content-Range" in response.headers):
        text = response.headers.get("Content-Range", "")
        found = _CONTENT_RANGE.fullmatch(text.strip())
        wanted = (str(offset), str(end - 1))
        if found is None or found.groups()[:2] != wanted or found[3] not in (str(object_bytes), "*"):
            asked = f"bytes {offset}-{end - 1}/{object_bytes}"
            raise ChecksumMismatch(f"{name}: the store sends {text[:80]!r} instead of {asked!r}")
        begin = offset
    else:
        require_success(response, name=name, method="GET", url=url)
        begin, end = 0, object_bytes
    if response.length not in (None, end - begin):
        raise ChecksumMismatch(f"{name}: has {response.length} bytes instead of {end - begin}")
    return begin


def skip(response: HTTPResponse, size_bytes: int, pace: Pace) -> None:
    """Leave out the next bytes of the body. They do not count as moved, but the cap counts them."""
    view = memoryview(bytearray(CHUNK_BYTES))
    while size_bytes:
        got = response.readinto(view[: pace.allow(min(size_bytes, CHUNK_BYTES))])
        if not got:
            raise BrokenConnection("cut short before the bytes that were asked for")
        pace.passed(got)
        size_bytes -= got


def require_end(response: HTTPResponse, *, name: str) -> None:
    """Without a length only the end of the connection tells: ChecksumMismatch if more follows."""
    if response.length is None and response.read(1):
        raise ChecksumMismatch(f"{name}: the store sends more bytes than were asked for")
