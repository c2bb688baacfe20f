"""Reading the store's answers: success or not, bodies piece by piece, and whether a range is the one asked for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from http.client import HTTPResponse

from gpu_client.transport.connections import BrokenConnection
from gpu_client.transport.errors import ChecksumMismatch
from gpu_client.transport.files import CHUNK_BYTES
from gpu_client.transport.lane import Flow
from gpu_client.transport.retry import Failure
from gpu_client.transport.store_answers import MAX_ERROR_BYTES, RefusedRequest, judge_refusal
from gpu_client.transport.tries import NotNow

_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)")


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
        raise NotNow(outcome)
    raise outcome


def read_to_end(response: HTTPResponse) -> None:
    """What is left of a short answer, so that the connection can be used again."""
    response.read(MAX_ERROR_BYTES)


def pieces(response: HTTPResponse, flow: Flow) -> Iterator[memoryview]:
    """The body, piece by piece (valid until the next one). BrokenConnection if it is shorter than announced."""
    view = memoryview(bytearray(CHUNK_BYTES))
    announced = response.length
    received = 0
    while size_bytes := response.readinto(view[: flow.allow(CHUNK_BYTES)]):
        received += size_bytes
        flow.moved(size_bytes)
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


def skip(response: HTTPResponse, size_bytes: int, flow: Flow) -> None:
    """Leave out the next bytes of the body. They do not count as moved, but the cap counts them."""
    view = memoryview(bytearray(CHUNK_BYTES))
    while size_bytes:
        got = response.readinto(view[: flow.allow(min(size_bytes, CHUNK_BYTES))])
        if not got:
            raise BrokenConnection("cut short before the bytes that were asked for")
        flow.passed(got)
        size_bytes -= got


def require_end(response: HTTPResponse, *, name: str) -> None:
    """Without a length only the end of the connection tells: ChecksumMismatch if more follows."""
    if response.length is None and response.read(1):
        raise ChecksumMismatch(f"{name}: the store sends more bytes than were asked for")
