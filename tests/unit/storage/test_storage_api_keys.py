"""API keys as items: without pydantic, but as the items that pydantic wrote."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields, replace

import pytest

from baton.contract.names import Scope
from functions.domain.access.api_keys import ApiKey
from functions.storage.dynamodb.api_keys import document, from_item

WRITTEN_BEFORE = (
    '{"id":"k3f9a0b1","tenant":"acme","name":"laptop ü","secret_sha256":"' + "a" * 64 + '",'
    '"scopes":["submit","worker"],"created_at":1790000000,"expires_at":1800000000}'
)
KEY = ApiKey(
    id="k3f9a0b1",
    tenant="acme",
    name="laptop \u00fc",
    secret_sha256="a" * 64,
    scopes=(Scope.SUBMIT, Scope.WORKER),
    created_at=1_790_000_000,
    expires_at=1_800_000_000,
)


def test_items_of_earlier_versions_are_read() -> None:
    assert from_item({"doc": {"S": WRITTEN_BEFORE}}) == KEY


def test_what_is_written_is_what_was_written_before() -> None:
    assert json.loads(document(KEY)) == json.loads(WRITTEN_BEFORE)
    revoked = replace(KEY, expires_at=None, revoked_at=1_790_000_001)
    assert from_item({"doc": {"S": document(revoked)}}) == revoked


def test_what_may_be_none_is_none_when_it_is_left_out() -> None:
    optional = {field.name for field in fields(ApiKey) if field.default is not MISSING}
    assert optional == {"expires_at", "revoked_at", "machine", "queues", "tags", "kind", "parent", "job"}
    assert all(field.default is None for field in fields(ApiKey) if field.default is not MISSING)


@pytest.mark.parametrize("damage", ['{"id":"k"}', '{"scopes":["root"]}', '{"scopes":[],"more":1}', "", "[]"])
def test_a_damaged_item_is_no_key(damage: str) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        from_item({"doc": {"S": damage}})
