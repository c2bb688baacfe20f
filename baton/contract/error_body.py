"""The body of an error answer.

{"error": {"code": "lease_lost", "message": "...", "field": "x-lease-token", "request_id": "..."}}

Clients of the original orchestrator expect a text in `error`: for them `error` is the message, and the other fields
are its siblings.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Problem(BaseModel):
    """Fault of a request that has several faults.

    Example: `{"field": "parameters.steps", "reason": "must be at least 1", "remedy": "Give a larger number."}`
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    field: str = Field(description="Dotted path; empty for the whole")
    reason: str
    remedy: str = ""
    line: int | None = Field(default=None, description="In a document, from 1")
    column: int | None = None


class ErrorDetail(BaseModel):
    """Error of one request.

    Example: `{"code": "missing_field", "message": "...", "field": "parameters.steps", "request_id": "r-1"}`
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    code: str = Field(description="Stable code, one of ErrorCode")
    message: str = Field(description="What was wrong, where, and what would be right")
    field: str | None = Field(default=None, description="Dotted path of the offending field or header")
    problems: list[Problem] | None = Field(default=None, description="All that is wrong, where that is known")
    request_id: str = Field(default="", description="Quote this when reporting a problem")


class ErrorBody(BaseModel):
    """The body of every answer with a status of 400 or more.

    Example: `{"error": {"code": "job_not_found", "message": "No such job: ...", "request_id": "r-1"}}`
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    error: ErrorDetail
