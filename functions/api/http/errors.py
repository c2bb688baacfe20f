"""Convert exceptions to error responses; no route builds an error response."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from pydantic_core import to_json

from baton.contract.error_body import ErrorBody, ErrorDetail, Problem
from baton.contract.errors import ErrorCode, Fault
from functions.domain.errors import Refusal

_BY_PYDANTIC_TYPE = {
    "missing": ErrorCode.MISSING_FIELD,
    "extra_forbidden": ErrorCode.UNKNOWN_FIELD,
    "invalid_key": ErrorCode.INVALID_KEY,
    "json_invalid": ErrorCode.MALFORMED_JSON,
}
_WORDS = {"model_type": "Input should be an object with fields", "extra_forbidden": "No such field exists here"}
"""In place of pydantic's messages, which name a class of this program and know no fields."""
MAX_FIELD_CHARS = 200
"""Limit of the reported field name: an unknown field's name may have any length."""

MAX_PROBLEMS = 100
"""Limit of the problems in one answer."""


def convert_validation_error(error: ValidationError) -> Refusal:
    """Return a refusal with all problems of a validation; the message names the first field."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    codes = [_BY_PYDANTIC_TYPE.get(one["type"], ErrorCode.INVALID_VALUE) for one in found]
    problems = [
        Fault(
            ".".join(str(part) for part in one["loc"])[:MAX_FIELD_CHARS],
            _WORDS.get(one["type"]) or one["msg"].removeprefix("Value error, ").rstrip("."),
            code.remedy,
        )
        for one, code in zip(found, codes, strict=True)
    ]
    first = problems[0]
    detail = f"{first.field or 'The request'}: {first.reason}."
    return Refusal(codes[0], detail, field=first.field or None, problems=problems[:MAX_PROBLEMS])


def build_error_response(
    refusal: Refusal, *, request_id: str, original: bool, retry_after_s: int | None = None
) -> dict[str, Any]:
    """Return an API Gateway response with Baton's error body; `original`: in the original orchestrator's shape."""
    problems = [Problem(**fault._asdict()) for fault in refusal.problems[:MAX_PROBLEMS]] or None
    detail = ErrorDetail(
        code=refusal.code.value, message=refusal.message, field=refusal.field, request_id=request_id, problems=problems
    )
    body = ErrorBody(error=detail).model_dump(mode="json", exclude_none=True)
    if original:
        body = {"error": refusal.message, **body["error"]}
        del body["message"]
    headers = {"content-type": "application/json", "cache-control": "no-store"}
    if retry_after_s is not None:
        headers["retry-after"] = str(retry_after_s)
    return {
        "statusCode": refusal.code.status,
        "headers": headers,
        "body": to_json(body).decode(),
        "isBase64Encoded": False,
    }
