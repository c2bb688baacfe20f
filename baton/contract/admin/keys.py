"""API keys: `<prefix>_<id>_<secret>`. The control plane stores only a SHA-256 of the secret."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from baton.contract.base import AnswerModel, EpochSeconds, WireModel
from baton.contract.names import KEY_ID_PATTERN, KeyKind, Scope


class KeyCreate(WireModel):
    """Body of `POST /keys`. Example: `{"name": "laptop", "scopes": ["submit"], "expires_in_s": 2592000}`

    `replaces` names a key that stops working `overlap_s` from now: a rotation.
    """

    name: Annotated[str, Field(min_length=1, max_length=64)]
    scopes: Annotated[list[Scope], Field(min_length=1, max_length=len(Scope))]
    expires_in_s: Annotated[int, Field(ge=60, le=10 * 365 * 86_400)] | None = None
    replaces: Annotated[str, Field(pattern=KEY_ID_PATTERN)] | None = None
    overlap_s: Annotated[int, Field(ge=0, le=30 * 86_400)] = 3600


class KeyView(AnswerModel):
    """A key without its secret. Example: `{"id": "k3f9...", "name": "laptop", "scopes": ["submit"], ...}`"""

    id: str
    name: str
    tenant: str
    scopes: list[Scope]
    created_at: EpochSeconds
    expires_at: EpochSeconds | None = None
    revoked_at: EpochSeconds | None = None
    kind: KeyKind | None = None
    """None: an ordinary key."""
    parent: str | None = None
    """Id of the key with which this key ends."""
    job: str | None = None
    """The only job that the key reads."""


class KeyCreated(KeyView):
    """The only answer that shows the whole key.

    Example: `{"key": "baton_k3f9..._...", "id": "k3f9...", "name": "laptop", "scopes": ["submit"], ...}`
    """

    key: str


class KeyPage(AnswerModel):
    """Example: `{"keys": [], "next_cursor": null}`"""

    keys: list[KeyView]
    next_cursor: str | None = None


class HealthAnswer(AnswerModel):
    """Answer to `GET /health`. Example: `{"status": "ok", "version": "0.1.0", "server_time": 1790000000}`"""

    status: str = "ok"
    version: str
    server_time: EpochSeconds
