"""Sessions of web browsers: a one-time link opens a session, and the session's cookie issues short-lived tokens."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from baton.contract.base import AnswerModel, EpochSeconds, WireModel
from baton.contract.names import Scope

SESSION_COOKIE = "baton_session"


class SessionLink(AnswerModel):
    """Answer to `POST /sessions/links`.

    Example: `{"url": "https://abc.example.com/console#code=baton_k3f9a0b1_...", "expires_at": 1790000060}`
    """

    url: str
    """Address of the console; the fragment carries the code, so no server and no log receives the code."""
    expires_at: EpochSeconds


class SessionByCode(WireModel):
    """Body of `POST /sessions` with the code of a one-time link. Example: `{"code": "baton_k3f9a0b1_s3cr3t"}`"""

    code: Annotated[str, Field(min_length=1, max_length=255)]


class SessionPreview(AnswerModel):
    """Answer to `POST /sessions/preview`: the tenant and the key that a one-time link signs in to.

    Example: `{"tenant": "acme", "key_id": "k3f9a0b1", "key_name": "laptop", "scopes": ["submit"],
    "expires_at": 1790000060}`
    """

    tenant: str
    key_id: str
    key_name: str
    scopes: list[Scope]
    """Scopes of the session."""
    expires_at: EpochSeconds
    """End of the link."""


class SessionByKey(WireModel):
    """Body of `POST /sessions` with an API key. Example: `{"key": "baton_k3f9a0b1_s3cr3t"}`"""

    key: Annotated[str, Field(min_length=1, max_length=255)]


class SessionToken(AnswerModel):
    """Answer to `POST /sessions/token`: a key for the header x-api-key, with the session's id as `key_id`.

    Example: `{"token": "baton_k3f9a0b1_...", "expires_at": 1790000900, "scopes": ["submit"], "tenant": "acme",
    "key_id": "k3f9a0b1"}`
    """

    token: str
    expires_at: EpochSeconds
    scopes: list[Scope]
    tenant: str
    key_id: str
