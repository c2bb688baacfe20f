"""From an exception to an answer: one place, no route handles errors itself."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from contract.error_body import ErrorBody, ErrorDetail
from contract.errors import ErrorCode
from functions.domain.errors import Refusal

_BY_PYDANTIC_TYPE = {
    "missing": ErrorCode.MISSING_FIELD,
    "extra_forbidden": ErrorCode.UNKNOWN_FIELD,
    "invalid_key": ErrorCode.INVALID_KEY,
    "json_invalid": ErrorCode.MALFORMED_JSON,
}
MAX_FIELD_CHARS = 200
"""Of the name of an offending field: unknown ones may have any length."""


def refusal_of(error: ValidationError) -> Refusal:
    """The first problem of a validation, as a refusal naming the field."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    field = ".".join(str(part) for part in first["loc"])[:MAX_FIELD_CHARS] or None
    code = _BY_PYDANTIC_TYPE.get(first["type"], ErrorCode.INVALID_VALUE)
    message = first["msg"].removeprefix("Value error, ").rstrip(".")
    return Refusal(code, f"{field or 'The request'}: {message}.", field=field)


def error_response(refusal: Refusal, *, request_id: str, retry_after_s: int | None = None) -> dict[str, Any]:
    """An API Gateway response carrying our error body."""
    detail = ErrorDetail(code=refusal.code.value, message=refusal.message, field=refusal.field, request_id=request_id)
    body = ErrorBody(error=detail)
    headers = {"content-type": "application/json", "cache-control": "no-store"}
    if retry_after_s is not None:
        headers["retry-after"] = str(retry_after_s)
    return {
        "statusCode": refusal.code.status,
        "headers": headers,
        "body": body.model_dump_json(exclude_none=True),
        "isBase64Encoded": False,
    }
