"""Conversion between HTTP and the events of API Gateway HTTP APIs (payload format 2.0). Pure.

API Gateway handles a path as follows (functions/local/README.md names the sources): percent-decoding precedes routing
and includes `%2F`, so an encoded slash separates segments; `%25` stays encoded; `+` stays a plus; a decoded `?` and the
rest of the path are cut off. `rawPath` and `pathParameters` come from the decoded path. The query is decoded as a form
(`+` is a space), and values of a repeated name are joined with commas; `rawQueryString` is unchanged.
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
# API Gateway passes bodies of these content types as text; other bodies, and bodies without a type, in base64.
_TEXT_TYPES = frozenset(("application/json", "application/xml", "application/javascript"))


class BadAnswerError(Exception):
    """A handler returned an answer that API Gateway refuses."""


@dataclass(frozen=True)
class HttpRequest:
    """A received request. `raw_path` and `raw_query` are not decoded; headers keep order and repetitions."""

    method: str
    raw_path: str
    raw_query: str
    headers: Sequence[tuple[str, str]]
    body: bytes
    source_ip: str
    protocol: str = "HTTP/1.1"


@dataclass(frozen=True)
class HttpResponse:
    """A response; header names may repeat (set-cookie)."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes


@dataclass(frozen=True)
class RoutePattern:
    """The compiled path of a route, such as `/job/{id}/stop` or `/download/{bucket}/{key+}`."""

    expression: re.Pattern[str]
    rank: tuple[int, int]

    @classmethod
    def parse(cls, path: str) -> RoutePattern:
        """Compile a path. Raises ValueError for a missing leading slash and for a greedy parameter before the end."""
        if not path.startswith("/"):
            raise ValueError(f"route path {path!r} does not start with '/'")
        pattern, position, greedy = "", 0, False
        for match in _PARAMETER.finditer(path):
            if greedy:
                raise ValueError(f"route path {path!r} continues after a greedy parameter")
            greedy = bool(match[2])
            pattern += re.escape(path[position : match.start()])
            pattern += f"(?P<{_group(match[1])}>{'.+' if greedy else '[^/]+'})"
            position = match.end()
        if greedy and position != len(path):
            raise ValueError(f"route path {path!r} continues after a greedy parameter")
        pattern += re.escape(path[position:])
        literals = sum("{" not in segment for segment in path.strip("/").split("/"))
        return cls(re.compile(pattern, re.DOTALL), (0 if greedy else 1, literals))

    def match(self, path: str) -> dict[str, str] | None:
        """Match a decoded path; return the path parameters, None without a match."""
        found = self.expression.fullmatch(path)
        if found is None:
            return None
        return {_name(group): value for group, value in found.groupdict().items()}


def decode_path(raw_path: str) -> str:
    """Decode a path as API Gateway does before routing."""
    return _ESCAPES.sub(_decode_run, raw_path).partition("?")[0]


def _decode_run(match: re.Match[str]) -> str:
    # Adjacent escapes are decoded together, since a character may consist of several bytes; %25 stays and separates.
    pieces = re.split("(%25)", match[0])
    return "".join(
        piece if piece == "%25" else binascii.unhexlify(piece.replace("%", "")).decode("utf-8", "replace")
        for piece in pieces
    )


def common_fields(
    request: HttpRequest, route_key: str, path: str, parameters: Mapping[str, str], *, request_id: str, now_s: float
) -> dict[str, Any]:
    """Build the common fields of authorizer and function events; API Gateway omits absent fields."""
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
    """Build the event of a REQUEST authorizer, payload format 2.0, without a body."""
    method, path = fields["requestContext"]["http"]["method"], fields["rawPath"]
    arn = f"arn:aws:execute-api:us-east-1:{ACCOUNT_ID}:{API_ID}/{STAGE}/{method}{path}"
    return {**fields, "type": "REQUEST", "routeArn": arn, "identitySource": [identity]}


def function_event(fields: dict[str, Any], body: bytes, authorizer_context: Mapping[str, Any] | None) -> dict[str, Any]:
    """Build the event of a function, with the context of the authorizer."""
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
    """Convert the answer of a function. Raises BadAnswerError for an answer that API Gateway turns into a 500.

    By payload format 2.0, an answer without `statusCode` is the body of a response with status 200.
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
        raise BadAnswerError("a header value contains control characters or characters outside Latin-1")
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
    # Regular expressions allow fewer characters in group names than API Gateway in parameter names.
    return "p_" + name.encode().hex()


def _name(group: str) -> str:
    return bytes.fromhex(group.removeprefix("p_")).decode()
