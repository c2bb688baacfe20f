"""HTTP requests as API Gateway HTTP API events (payload format 2.0), and Lambda answers as HTTP responses. Pure.

What the gateway does to a path, observed on AWS by others (README.md names the sources): the path is percent-decoded
before routing, `%2F` included, so an encoded slash separates segments like any other; `%25` alone stays as it is; a
`+` stays a plus; what follows a decoded `?` is cut off. `rawPath` and `pathParameters` both come from that path. The
query is decoded as a form (`+` is a space) and repeated names are joined with commas; `rawQueryString` is untouched.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qsl

ACCOUNT_ID = "000000000000"
API_ID = "local"
STAGE = "$default"
_ESCAPES = re.compile(r"(?:%[0-9A-Fa-f]{2})+")
_PARAMETER = re.compile(r"\{([A-Za-z0-9_.-]+)(\+?)\}")
# The content types whose bodies the gateway hands over as text; all others, and none, come in base64.
_TEXT_TYPES = frozenset(("application/json", "application/xml", "application/javascript"))


class BadAnswerError(Exception):
    """A handler returned something that API Gateway would not accept."""


@dataclass(frozen=True)
class HttpRequest:
    """A request as it arrived. `raw_path` and `raw_query` are as sent; headers keep order and repetitions."""

    method: str
    raw_path: str
    raw_query: str
    headers: Sequence[tuple[str, str]]
    body: bytes
    source_ip: str
    protocol: str = "HTTP/1.1"


@dataclass(frozen=True)
class HttpResponse:
    """A response to send; headers may repeat (set-cookie)."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes


@dataclass(frozen=True)
class RoutePattern:
    """A route's path, `/job/{id}/stop` or `/download/{bucket}/{key+}`, ready to match decoded paths."""

    expression: re.Pattern[str]
    rank: tuple[int, int]

    @classmethod
    def parse(cls, path: str) -> RoutePattern:
        """Raises ValueError for a path without a leading slash or with a greedy parameter before its end."""
        if not path.startswith("/"):
            raise ValueError(f"route path {path!r} does not start with '/'")
        pattern, position, greedy = "", 0, False
        for match in _PARAMETER.finditer(path):
            if greedy:
                raise ValueError(f"route path {path!r} goes on after a greedy parameter")
            greedy = bool(match[2])
            pattern += re.escape(path[position : match.start()])
            pattern += f"(?P<{_group(match[1])}>{'.+' if greedy else '[^/]+'})"
            position = match.end()
        if greedy and position != len(path):
            raise ValueError(f"route path {path!r} goes on after a greedy parameter")
        pattern += re.escape(path[position:])
        literals = sum("{" not in segment for segment in path.strip("/").split("/"))
        return cls(re.compile(pattern, re.DOTALL), (0 if greedy else 1, literals))

    def match(self, path: str) -> dict[str, str] | None:
        """The path parameters, or None when the decoded path is not of this route."""
        found = self.expression.fullmatch(path)
        if found is None:
            return None
        return {_name(group): value for group, value in found.groupdict().items()}


def decode_path(raw_path: str) -> str:
    """The path that the gateway routes by and reports."""
    return _ESCAPES.sub(_decode_run, raw_path).partition("?")[0]


def _decode_run(match: re.Match[str]) -> str:
    # A run of escapes is decoded together, since characters may take several; %25 stays and separates.
    pieces = re.split("(%25)", match[0])
    return "".join(
        piece if piece == "%25" else binascii.unhexlify(piece.replace("%", "")).decode("utf-8", "replace")
        for piece in pieces
    )


def common_fields(
    request: HttpRequest, route_key: str, path: str, parameters: Mapping[str, str], *, request_id: str, now_s: float
) -> dict[str, Any]:
    """The fields that authorizer events and function events share. Absent ones are left out, as the gateway does."""
    headers, cookies = _headers(request)
    query = _query(request.raw_query)
    fields: dict[str, Any] = {
        "version": "2.0",
        "routeKey": route_key,
        "rawPath": path,
        "rawQueryString": request.raw_query,
        "headers": headers,
        "requestContext": {
            "accountId": ACCOUNT_ID,
            "apiId": API_ID,
            "domainName": headers.get("host", ""),
            "domainPrefix": API_ID,
            "http": {
                "method": request.method,
                "path": path,
                "protocol": request.protocol,
                "sourceIp": request.source_ip,
                "userAgent": headers.get("user-agent", ""),
            },
            "requestId": request_id,
            "routeKey": route_key,
            "stage": STAGE,
            "time": datetime.fromtimestamp(now_s, UTC).strftime("%d/%b/%Y:%H:%M:%S +0000"),
            "timeEpoch": int(now_s * 1000),
        },
    }
    if cookies:
        fields["cookies"] = cookies
    if query:
        fields["queryStringParameters"] = query
    if parameters:
        fields["pathParameters"] = dict(parameters)
    return fields


def authorizer_event(fields: dict[str, Any], identity: str) -> dict[str, Any]:
    """The REQUEST authorizer's event, payload format 2.0; it has no body."""
    method, path = fields["requestContext"]["http"]["method"], fields["rawPath"]
    arn = f"arn:aws:execute-api:us-east-1:{ACCOUNT_ID}:{API_ID}/{STAGE}/{method}{path}"
    return {**fields, "type": "REQUEST", "routeArn": arn, "identitySource": [identity]}


def function_event(fields: dict[str, Any], body: bytes, authorizer_context: Mapping[str, Any] | None) -> dict[str, Any]:
    """The function's event, with what the authorizer said about the caller."""
    event = {**fields, "isBase64Encoded": False}
    if authorizer_context is not None:
        event["requestContext"] = {**fields["requestContext"], "authorizer": {"lambda": dict(authorizer_context)}}
    if body:
        content_type = fields["headers"].get("content-type", "").partition(";")[0].strip().lower()
        if content_type.startswith("text/") or content_type in _TEXT_TYPES:
            event["body"] = body.decode("utf-8", "replace")
        else:
            event["body"], event["isBase64Encoded"] = base64.b64encode(body).decode("ascii"), True
    return event


def http_response(answer: Any) -> HttpResponse:
    """What a function's answer becomes. Raises BadAnswerError for one that the gateway would turn into a 500.

    An answer without `statusCode` is taken as the body of a 200, as payload format 2.0 says.
    """
    try:
        as_json = json.dumps(answer)
    except (TypeError, ValueError) as error:
        raise BadAnswerError(f"the answer is not JSON: {error}") from error
    if not isinstance(answer, dict) or "statusCode" not in answer:
        return HttpResponse(200, [("content-type", "application/json")], as_json.encode())
    status = answer["statusCode"]
    if isinstance(status, bool) or not isinstance(status, int) or not 100 <= status <= 599:
        raise BadAnswerError(f"statusCode is {status!r}")
    headers = [(str(name).lower(), _header_value(value)) for name, value in (answer.get("headers") or {}).items()]
    if not any(name == "content-type" for name, _ in headers):
        headers.append(("content-type", "application/json"))
    headers += [("set-cookie", _header_value(cookie)) for cookie in answer.get("cookies") or []]
    return HttpResponse(status, headers, _body(answer))


def _body(answer: dict[str, Any]) -> bytes:
    body = answer.get("body")
    if body is None:
        return b""
    if not isinstance(body, str):
        raise BadAnswerError(f"body is {type(body).__name__}, not a string")
    if not answer.get("isBase64Encoded"):
        return body.encode()
    try:
        return base64.b64decode(body, validate=True)
    except ValueError as error:
        raise BadAnswerError(f"body is not base64: {error}") from error


def _header_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, (str, int, float)):
        raise BadAnswerError(f"a header value is {type(value).__name__}")
    text = str(value)
    if not text.isprintable() or not all(ord(character) < 256 for character in text):
        raise BadAnswerError("a header value holds control characters, or others than Latin-1")
    return text


def _headers(request: HttpRequest) -> tuple[dict[str, str], list[str]]:
    joined: dict[str, str] = {}
    cookies: list[str] = []
    for name, value in request.headers:
        lowered = name.lower()
        if lowered == "cookie":
            cookies += [cookie.strip() for cookie in value.split(";") if cookie.strip()]
        else:
            joined[lowered] = f"{joined[lowered]},{value}" if lowered in joined else value
    joined.setdefault("content-length", str(len(request.body)))
    joined["x-forwarded-for"] = _appended(joined.get("x-forwarded-for"), request.source_ip)
    joined.setdefault("x-forwarded-proto", "http")
    joined.setdefault("x-forwarded-port", joined.get("host", "").rpartition(":")[2] or "80")
    return joined, cookies


def _appended(before: str | None, value: str) -> str:
    return f"{before}, {value}" if before else value


def _query(raw_query: str) -> dict[str, str]:
    joined: dict[str, str] = {}
    for name, value in _pairs(raw_query):
        joined[name] = f"{joined[name]},{value}" if name in joined else value
    return joined


def _pairs(raw_query: str) -> Iterable[tuple[str, str]]:
    return parse_qsl(raw_query, keep_blank_values=True, errors="replace")


def _group(name: str) -> str:
    # Group names may hold fewer characters than parameter names.
    return "p_" + name.encode().hex()


def _name(group: str) -> str:
    return bytes.fromhex(group.removeprefix("p_")).decode()
