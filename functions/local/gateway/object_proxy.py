"""Proxy for the bytes of uploads and downloads between clients and the emulated object store.

Lambda limits a payload to 6 MB, so the deployed functions store small parts and return small objects. The local stack
has no such limit: the gateway requests a presigned URL from the transfer function, as clients do, and transfers the
bytes. Therefore workers of the original orchestrator need no relay, and the store receives none of their headers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import IO
from urllib.parse import parse_qsl, urlencode

import urllib3

from baton.contract.errors import ErrorCode
from functions.domain.errors import Refusal
from functions.local.gateway.lambda_events import HttpRequest, HttpResponse

PUT_PART = "PUT /upload/{bucket}/{key+}"
PRESIGN_PART = "POST /upload/{bucket}/{key+}"
GET_OBJECT = "GET /download/{bucket}/{key+}"
BLOCK_BYTES = 256 * 1024
STORE_TIMEOUT_S = 60.0
CONNECTIONS = 64


@dataclass(frozen=True)
class StreamedResponse:
    """A response with status 200 whose body is sent while the proxy reads."""

    headers: list[tuple[str, str]]
    pieces: Iterator[bytes]


@dataclass(frozen=True)
class ProxiedTransfer:
    """A call whose bytes pass the proxy. `route_key` and `request` get a presigned URL from the transfer function."""

    route_key: str
    request: HttpRequest
    part_number: str | None = None


def plan_transfer(request: HttpRequest, route_key: str, size_bytes: int) -> ProxiedTransfer | None:
    """Plan the transfer of a call's bytes; None for a call that the function answers without the proxy."""
    query = dict(parse_qsl(request.raw_query, keep_blank_values=True))
    if route_key == PUT_PART and size_bytes and query.get("action", "mpu-uploadpart") == "mpu-uploadpart":
        presign_query = urlencode({**query, "action": "mpu-presign"})
        return ProxiedTransfer(
            PRESIGN_PART, replace(request, method="POST", raw_query=presign_query), query.get("partNumber")
        )
    if route_key == GET_OBJECT and "as" not in query:
        return ProxiedTransfer(route_key, replace(request, raw_query=urlencode({**query, "as": "url"})))
    return None


class ObjectProxy:
    """HTTP client of the store; thread-safe."""

    def __init__(self) -> None:
        timeout = urllib3.Timeout(STORE_TIMEOUT_S)
        self._http = urllib3.PoolManager(maxsize=CONNECTIONS, timeout=timeout, retries=False)

    def close(self) -> None:
        """Close all connections to the store."""
        self._http.clear()

    def transfer(
        self, call: ProxiedTransfer, presigned: HttpResponse, body: IO[bytes], size_bytes: int
    ) -> HttpResponse | StreamedResponse:
        """Transfer the bytes to or from the URL in the answer of the transfer function. Raises Refusal."""
        url: str = json.loads(presigned.body)["url"]
        try:
            if call.part_number is None:
                return self._get(url)
            return self._put(url, body, size_bytes, int(call.part_number))
        except urllib3.exceptions.HTTPError as error:
            raise Refusal(ErrorCode.UNAVAILABLE, f"The object store does not answer: {error}.") from error

    def _put(self, url: str, body: IO[bytes], size_bytes: int, number: int) -> HttpResponse:
        headers = {"content-length": str(size_bytes)}
        answer = self._http.request("PUT", url, body=body, headers=headers, redirect=False)
        if answer.status == 404:
            raise Refusal(ErrorCode.UPLOAD_NOT_FOUND, field="uploadId")
        _require_ok(answer)
        part = {"etag": answer.headers["etag"].strip('"'), "partNumber": number}
        return HttpResponse(200, [("content-type", "application/json")], json.dumps(part).encode())

    def _get(self, url: str) -> StreamedResponse:
        answer = self._http.request("GET", url, preload_content=False, redirect=False)
        if answer.status != 200:
            answer.close()
            if answer.status == 404:
                raise Refusal(ErrorCode.OBJECT_NOT_FOUND, field="key")
            _require_ok(answer)
        names = ("content-length", "content-type", "etag")
        headers = [(name, answer.headers[name]) for name in names if name in answer.headers]
        return StreamedResponse(headers, _pieces(answer))


def _pieces(answer: urllib3.BaseHTTPResponse) -> Iterator[bytes]:
    with closing(answer):
        yield from answer.stream(BLOCK_BYTES)


def _require_ok(answer: urllib3.BaseHTTPResponse) -> None:
    if answer.status != 200:
        raise Refusal(ErrorCode.UNAVAILABLE, f"The object store answered {answer.status}.")
