"""Interpret answers of S3 and compatible stores: refusals, bodies piece by piece, ranges."""

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
    """Limit and counter of one try's bytes."""

    def allow(self, wanted_bytes: int) -> int:
        """Wait for and return the number of granted bytes, from 1 to `wanted_bytes`. Raises TransferCanceled."""
        ...

    def moved(self, size_bytes: int) -> None:
        """Count transferred bytes."""
        ...

    def passed(self, size_bytes: int) -> None:
        """Count transferred bytes that the caller discards."""
        ...


@dataclass(frozen=True, kw_only=True)
class RefusedRequest:
    """Request with an answer of 300 or more. `name`: the object's name in messages."""

    name: str
    method: str
    url: str
    status: int
    body: bytes
    retry_after: str | None
    date: str | None


def judge_refusal(refused: RefusedRequest) -> Failure | TransferError:
    """Return a Failure if a retry may succeed, else the error to raise."""
    name, method, status = refused.name, refused.method, refused.status
    code, message = _code_and_message(refused.body)
    summary = f"{status} {code or ''} {message or ''}".strip()
    retry_after_s = parse_retry_after(refused.retry_after, date=refused.date)
    passing = status in RETRIED_STATUSES or code in _PASSING_CODES
    if passing or (status == 409 and method == "PUT"):
        # 409 on a create-only PUT means that another upload of the object is in progress.
        overload = status in (429, 503) or code in _OVERLOAD_CODES
        return Failure(reason=summary, status=503, code=code, retry_after_s=retry_after_s, overload=overload)
    if code in _DIGEST_CODES:
        return ChecksumMismatch(f"{name}: the store received other bytes than declared ({summary})")
    if status in (400, 401, 403) and (code in _EXPIRED_CODES or "expired" in summary.lower()):
        return UrlExpired(f"{name}: the presigned URL has run out ({summary})")
    if status == 403 and _ran_out(refused.url, refused.date):
        return UrlExpired(f"{name}: the presigned URL has run out ({summary})")
    if status == 412:
        # The version that the URL may replace no longer exists; an earlier unanswered try may have replaced the
        # version.
        return UrlExpired(f"{name}: the object has changed since the URL was made ({summary})")
    if code == "NoSuchUpload":
        # Another client has completed the multipart upload, or a lifecycle rule has ended it.
        return UrlExpired(f"{name}: the upload that the URL is for has ended ({summary})")
    if status == 404 and method == "GET":
        return ObjectMissing(f"{name}: not in the store ({summary})")
    return TransferError(f"{name}: the store refused the {method} ({summary})")


def _code_and_message(body: bytes) -> tuple[str | None, str | None]:
    text = body.decode("utf-8", "replace")
    code = re.search(r"<Code>([^<]{1,100})</Code>", text)
    message = re.search(r"<Message>([^<]{1,300})</Message>", text)
    return (code.group(1) if code else None), (message.group(1) if message else None)


def url_life_s(url: str) -> int | None:
    """Return the lifetime of a presigned URL in seconds; None if the URL does not contain it."""
    try:
        return int(parse_qs(urlsplit(url).query)["X-Amz-Expires"][0])
    except (KeyError, ValueError):
        return None


def _ran_out(url: str, date: str | None) -> bool:
    """Return True if the URL has expired by the store's clock, which not every store states in its answer."""
    query = parse_qs(urlsplit(url).query)
    try:
        signed_at = datetime.strptime(query["X-Amz-Date"][0], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
        life = timedelta(seconds=int(query["X-Amz-Expires"][0]))
        return date is not None and parsedate_to_datetime(date) >= signed_at + life
    except (KeyError, ValueError, TypeError, OverflowError):
        return False  # The URL is not AWS-style, Date has no zone, or numbers are out of bounds.


def require_success(response: HTTPResponse, *, name: str, method: str, url: str) -> None:
    """Raise the error of an answer other than a success (200 of S3; 201 or 204 of compatible stores to a PUT)."""
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
    """Read the rest of a short answer, so that the connection can be reused."""
    response.read(MAX_ERROR_BYTES)


def pieces(response: HTTPResponse, pace: Pace) -> Iterator[memoryview]:
    """Yield the body's pieces, each valid until the next piece. Raises BrokenConnection if bytes are missing."""
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
    """Return the Range header for the bytes from `offset` up to `end`; no header for the whole object."""
    return {} if (offset, end) == (0, object_bytes) else {"Range": f"bytes={offset}-{end - 1}"}


def begins_at(response: HTTPResponse, *, name: str, url: str, offset: int, end: int, object_bytes: int) -> int:
    """Return the body's offset in the object: `offset`, or 0 if the store sends the whole object.

    Raises ChecksumMismatch for another range or an object of another size, and the error of a refusal.
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
    """Discard the next bytes of the body, which count for the bandwidth cap but not for the progress."""
    view = memoryview(bytearray(CHUNK_BYTES))
    while size_bytes:
        got = response.readinto(view[: pace.allow(min(size_bytes, CHUNK_BYTES))])
        if not got:
            raise BrokenConnection("cut short before the bytes that were asked for")
        pace.passed(got)
        size_bytes -= got


def require_end(response: HTTPResponse, *, name: str) -> None:
    """Raise ChecksumMismatch if more bytes follow. A body without a length ends with its connection."""
    if response.length is None and response.read(1):
        raise ChecksumMismatch(f"{name}: the store sends more bytes than were asked for")
