"""What an answer of the object store means to a transfer. Pure; knows S3 and its look-alikes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from urllib.parse import parse_qs, urlsplit

from gpu_client.transport.errors import ChecksumMismatch, ObjectMissing, TransferError, UrlExpired
from gpu_client.transport.retry import RETRIED_STATUSES, Failure, parse_retry_after

MAX_ERROR_BYTES = 16 * 1024

_PASSING_CODES = frozenset({"RequestTimeout", "SlowDown", "OperationAborted", "ConditionalRequestConflict"})
_OVERLOAD_CODES = frozenset({"SlowDown", "RequestTimeout"})
_DIGEST_CODES = frozenset({"BadDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch"})
_EXPIRED_CODES = frozenset({"ExpiredToken", "RequestExpired", "ExpiredRequest", "TokenRefreshRequired"})


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
