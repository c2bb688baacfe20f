"""Answer API Gateway events: authorize, parse, validate, call the route, map the result or the error."""

from __future__ import annotations

import base64
import binascii
import gzip
import json
import logging
import re
from collections.abc import Mapping
from functools import partial
from hashlib import blake2b
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import from_json, to_json

from baton.contract.base import JOB_ID_PATTERN, MAX_STEP, path_problem
from baton.contract.errors import ErrorCode
from baton.contract.names import (
    FLEET_NAME_PATTERN,
    KEY_ID_PATTERN,
    MACHINE_NAME_PATTERN,
    OPERATOR_TENANT,
    REGISTRY_PATTERN,
    RING_NAME_PATTERN,
    Scope,
)
from baton.contract.recipes.calls import RECIPE_ID_PATTERN
from functions.api.http.context import ApiCall, Context, NoContent, NotModified, Principal, WithHeaders, is_original
from functions.api.http.errors import build_error_response, convert_validation_error
from functions.api.http.route import Function, Route, routes_of
from functions.domain.errors import Refusal, StorageUnavailable

logger = logging.getLogger("baton.api")

MAX_BODY_BYTES = 5 * 1024 * 1024
"""Lambda refuses requests above 6 MB without an explanation; therefore this limit is below."""

MIN_COMPRESSED_BYTES = 1400
"""Shorter answers fit into one packet."""

RETRY_AFTER_S = 2
"""Value of `Retry-After` while storage is unavailable."""

_JOB_ID = re.compile(JOB_ID_PATTERN)
_KEY_ID = re.compile(KEY_ID_PATTERN)
_IDS = {"keys": (_KEY_ID, ErrorCode.KEY_NOT_FOUND), "webhooks": (_KEY_ID, ErrorCode.WEBHOOK_NOT_FOUND)}
"""Pattern and refusal of `{id}` by the first segment of the path; any other path names a job."""
_NAMES = {
    "recipe": (re.compile(RECIPE_ID_PATTERN), ErrorCode.RECIPE_NOT_FOUND, "A recipe is named like digits@1."),
    "ring": (
        re.compile(RING_NAME_PATTERN),
        ErrorCode.RING_NOT_FOUND,
        "A ring's name has small letters, digits and '-'.",
    ),
    "fleet": (
        re.compile(FLEET_NAME_PATTERN),
        ErrorCode.FLEET_NOT_FOUND,
        "A fleet's name has small letters, digits and '-', at most 32.",
    ),
    "registry": (
        re.compile(REGISTRY_PATTERN),
        ErrorCode.REGISTRY_NOT_FOUND,
        "A registry is named by its host, like ghcr.io, perhaps with a port.",
    ),
    "machine": (
        re.compile(MACHINE_NAME_PATTERN),
        ErrorCode.MACHINE_NOT_FOUND,
        "A machine's name has small letters, digits and '-', at most 60.",
    ),
}
"""Pattern, refusal and form of the names in paths."""
_STEP = re.compile(r"[0-9]{1,13}")
_HEADER_VALUE = re.compile(r"[\x21-\x7e]{1,255}")
_QUIET = frozenset({"POST /heartbeat/{id}"})
"""Calls without a log line: at their frequency the line would cost as much as their write."""

Event = Mapping[str, Any]
_ANY: TypeAdapter[Any] = TypeAdapter(Any)


def dispatch(event: Event, context: Context, function: Function) -> dict[str, Any]:
    """Answer one API Gateway HTTP API event (payload version 2.0) for one privilege group."""
    request_id = str(event.get("requestContext", {}).get("requestId", ""))
    route_key = str(event.get("routeKey", ""))
    refused = partial(build_error_response, request_id=request_id, original=sent_by_original(event))
    try:
        route = routes_of(function).get(route_key)
        if route is None:
            raise Refusal(ErrorCode.NOT_FOUND, f"No route {route_key}.")
        call = _build_call(event, route, context, request_id)
        response = _respond(route, route.call(context, call))
        if route.revalidates:
            response = _compress(_drop_known_body(response, call), call)
        if route.method == "HEAD":
            response = {**response, "body": "", "isBase64Encoded": False}
    except Refusal as refusal:
        response = refused(refusal)
    except StorageUnavailable:
        logger.exception("storage is unavailable", extra={"action": route_key, "request_id": request_id})
        response = refused(Refusal(ErrorCode.UNAVAILABLE), retry_after_s=RETRY_AFTER_S)
    except Exception:  # the boundary of a request: the log receives the defect, the caller only a request id
        logger.exception("unexpected failure", extra={"action": route_key, "request_id": request_id})
        response = refused(Refusal(ErrorCode.INTERNAL))
    if route_key not in _QUIET:
        logger.info("answered", extra={"action": route_key, "status": response["statusCode"], "request_id": request_id})
    return response


def sent_by_original(event: Event) -> bool:
    """Return True if the event is a call of an original client, which reads errors in another shape."""
    return is_original(
        frozenset(str(_read_authorizer_context(event).get("scopes", "")).split(",")), _read_headers(event)
    )


def _build_call(event: Event, route: Route, context: Context, request_id: str) -> ApiCall:
    headers = _read_headers(event)
    principal = _require_principal(event, route)
    for name in route.headers:
        if name in headers and not _HEADER_VALUE.fullmatch(headers[name]):
            raise Refusal(
                ErrorCode.INVALID_VALUE, f"The header {name} must be 1 to 255 visible ASCII characters.", field=name
            )
    return ApiCall(
        principal=principal,
        path=_parse_path(event.get("pathParameters") or {}, route),
        query=_parse_query(event.get("queryStringParameters") or {}, route),
        body=_parse_body(event, route),
        headers=headers,
        cookies=_read_cookies(event),
        request_id=request_id,
        now=context.clock.now(),
        source_address=str(event.get("requestContext", {}).get("http", {}).get("sourceIp", "")),
    )


def _read_headers(event: Event) -> dict[str, str]:
    return {str(name).lower(): str(value) for name, value in (event.get("headers") or {}).items()}


def _read_cookies(event: Event) -> dict[str, str]:
    """Return the cookies by name; of a repeated name the first, which has the most specific path."""
    # API Gateway moves the cookies out of the header; emulated gateways leave them there.
    cookies = event.get("cookies") or _read_headers(event).get("cookie", "").split("; ")
    pairs = [str(cookie).partition("=") for cookie in cookies]
    return {name: value for name, _, value in reversed(pairs)}


def _read_authorizer_context(event: Event) -> Mapping[str, Any]:
    """Return the authorizer's context of the caller; empty for a route without a key."""
    return event.get("requestContext", {}).get("authorizer", {}).get("lambda") or {}


def _require_principal(event: Event, route: Route) -> Principal:
    """Return the caller that the authorizer identified; refuse a caller without the route's scopes or tenant."""
    if not route.scopes:
        return Principal(tenant="", key_id="", scopes=frozenset())
    found = _read_authorizer_context(event)
    if "auth_error" in found:
        code = ErrorCode(found["auth_error"])
        if code is ErrorCode.UNAVAILABLE:
            raise StorageUnavailable("the authorizer could not read the key")
        raise Refusal(code, field="x-api-key")
    if not found.get("tenant"):
        raise Refusal(ErrorCode.UNAUTHORIZED, field="x-api-key")
    scopes = frozenset(Scope(scope) for scope in str(found.get("scopes", "")).split(",") if scope)
    if "job" in found:
        _confine_to_job(str(found["job"]), event, route)
    elif not scopes & route.scopes:
        needed = " or ".join(sorted(route.scopes))
        raise Refusal(ErrorCode.WRONG_SCOPE, f"This call needs the scope {needed}.", field="x-api-key")
    if route.operator and found["tenant"] != OPERATOR_TENANT:
        raise Refusal(ErrorCode.OPERATOR_ONLY, f"The key's tenant is {found['tenant']}.", field="x-api-key")
    rings = frozenset(str(found["rings"]).split(",")) if "rings" in found else None
    return Principal(
        tenant=str(found["tenant"]),
        key_id=str(found.get("key_id", "")),
        scopes=scopes,
        rings=rings,
        machine=found.get("machine"),
        queues=str(found["queues"]).split(",") if "queues" in found else None,
        tags=json.loads(found["tags"]) if "tags" in found else {},
    )


def _confine_to_job(job_id: str, event: Event, route: Route) -> None:
    """Refuse a share key for every call but the reads of its job; another job is as unknown as another tenant's."""
    if not route.shared:
        detail = f"The key shows job {job_id} and permits nothing else."
        remedy = "Use a key of your own; an admin issues keys."
        raise Refusal(ErrorCode.WRONG_SCOPE, detail, field="x-api-key", remedy=remedy)
    asked = (event.get("pathParameters") or {}).get("id", "")
    if asked != job_id:
        raise Refusal(ErrorCode.JOB_NOT_FOUND, "The key shows another job.", field="id")


def _parse_path(given: Mapping[str, str], route: Route) -> dict[str, str]:
    # The gateway decodes every percent escape except %25.
    path = {name.rstrip("+"): value.replace("%25", "%") for name, value in given.items()}
    if "id" in path:
        pattern, unknown = _IDS.get(route.path.split("/")[1], (_JOB_ID, ErrorCode.JOB_NOT_FOUND))
        if not pattern.fullmatch(path["id"]):
            raise Refusal(unknown, "The id in the path has not the form of an id.", field="id")
    for name, (pattern, unknown, form) in _NAMES.items():
        if name in path and not pattern.fullmatch(path[name]):
            raise Refusal(unknown, form, field=name)
    if "step" in path and not (_STEP.fullmatch(path["step"]) and int(path["step"]) <= MAX_STEP):
        raise Refusal(ErrorCode.INVALID_VALUE, f"The step must be a whole number up to {MAX_STEP}.", field="step")
    if "key" in path:
        problem = path_problem(path["key"])
        if problem:
            raise Refusal(ErrorCode.INVALID_KEY, f"The key {problem}.", field="key")
    return path


def _parse_query(given: Mapping[str, str], route: Route) -> BaseModel | None:
    if route.query is None:
        if given:
            name = min(given)
            raise Refusal(ErrorCode.UNKNOWN_FIELD, f"{name}: this call takes no query parameters.", field=name)
        return None
    try:
        return route.query.model_validate(dict(given))
    except ValidationError as error:
        raise convert_validation_error(error) from None


def _parse_body(event: Event, route: Route) -> BaseModel | bytes | None:
    if route.takes_bytes:
        return _decode_body(event)
    if not route.body:
        return None
    raw = _decode_body(event)
    if len(raw) > MAX_BODY_BYTES:
        raise Refusal(
            ErrorCode.PAYLOAD_TOO_LARGE, f"The body has {len(raw)} bytes; at most {MAX_BODY_BYTES} are allowed."
        )
    if not raw.strip():
        if route.body_required:
            raise Refusal(ErrorCode.MALFORMED_JSON, "The body is empty.")
        return None
    try:
        document = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise Refusal(ErrorCode.MALFORMED_JSON, f"The body is not valid JSON: {error}.") from None
    if not isinstance(document, dict):
        raise Refusal(ErrorCode.INVALID_VALUE, "The body must be a JSON object.")
    try:
        return _validate(_select_model(document, route.body), raw, document)
    except ValidationError as error:
        raise convert_validation_error(error) from None


def _validate(model: type[BaseModel], raw: bytes, document: dict[str, Any]) -> BaseModel:
    """Validate the body strictly: "5" and true are not numbers, but 5.0 is an integer, as in JSON Schema."""
    try:
        # Strict validation accepts a string for an enum only in JSON text, not in a parsed document.
        return model.model_validate_json(raw, strict=True)
    except ValidationError as error:
        whole = [
            one["loc"]
            for one in error.errors(include_url=False)
            if one["type"] == "int_type" and isinstance(one["input"], float) and one["input"].is_integer()
        ]
        if not whole:
            raise
    for loc in whole:
        place: Any = document
        for part in loc:
            if isinstance(place[part], float):
                # A union field adds the name of the failed member behind the value's place.
                place[part] = int(place[part])
                break
            place = place[part]
    return model.model_validate_json(to_json(document), strict=True)


def _select_model(document: dict[str, Any], models: tuple[type[BaseModel], ...]) -> type[BaseModel]:
    """Return the first body model of which the document has a required field; the route's first model otherwise."""
    for model in models[1:]:
        required = [name for name, field in model.model_fields.items() if field.is_required()]
        if any(name in document for name in required):
            return model
    return models[0]


def _decode_body(event: Event) -> bytes:
    body = event.get("body") or ""
    if not event.get("isBase64Encoded"):
        return str(body).encode("utf-8", "surrogatepass")
    try:
        return base64.b64decode(body, validate=True)
    except binascii.Error:
        raise Refusal(ErrorCode.MALFORMED_JSON, "The body's base64 is damaged.") from None


def _drop_known_body(response: dict[str, Any], call: ApiCall) -> dict[str, Any]:
    """Return the answer 304 without a body if the caller has the answer of this ETag already."""
    headers = response["headers"]
    known = {tag.strip().removeprefix("W/") for tag in call.headers.get("if-none-match", "").split(",")}
    if headers.get("etag", "").removeprefix("W/") not in known - {""}:
        return response
    kept = {name: value for name, value in headers.items() if name not in ("content-type", "content-encoding")}
    return {"statusCode": 304, "headers": kept, "body": "", "isBase64Encoded": False}


def _compress(response: dict[str, Any], call: ApiCall) -> dict[str, Any]:
    """Compress a large JSON answer for a caller that accepts gzip: egress is the larger part of its price."""
    if response.get("isBase64Encoded") or len(response["body"]) < MIN_COMPRESSED_BYTES or not call.accepts_gzip:
        return response
    body = base64.b64encode(gzip.compress(response["body"].encode(), compresslevel=5, mtime=0)).decode()
    headers = {**response["headers"], "content-encoding": "gzip", "vary": "accept-encoding"}
    return {**response, "headers": headers, "body": body, "isBase64Encoded": True}


def _respond(route: Route, result: Any) -> dict[str, Any]:
    headers = {"cache-control": "no-store"}
    if isinstance(result, WithHeaders):
        answer = _respond(route, result.value)
        cookies = {"cookies": list(result.cookies)} if result.cookies else {}
        return {**answer, **cookies, "headers": {**answer["headers"], **result.headers}}
    if isinstance(result, NotModified):
        return {"statusCode": 304, "headers": {**headers, "etag": result.etag}, "body": ""}
    if isinstance(result, NoContent):
        return {"statusCode": 204, "headers": headers, "body": ""}
    if isinstance(result, bytes):
        headers["content-type"] = "application/octet-stream"
        body = base64.b64encode(result).decode()
        return {"statusCode": route.status, "headers": headers, "body": body, "isBase64Encoded": True}
    raw = _ANY.dump_json(result)
    body = raw.decode()
    headers["content-type"] = "application/json"
    if route.revalidates:
        # Weak, because a gateway or a proxy may compress the body.
        headers["etag"] = f'W/"{blake2b(raw, digest_size=12).hexdigest()}"'
    return {"statusCode": route.status, "headers": headers, "body": body, "isBase64Encoded": False}
