"""API keys as items, and reading one: all of the tokens table that the authorizer needs, quick to load."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from contract.names import Scope
from functions.domain.api_keys import ApiKey
from functions.storage import keys
from functions.storage.items import Item
from functions.storage.reads import get_item
from functions.storage.tables import TOKENS


class DynamoKeyReader:
    """KeyReader over a low-level DynamoDB client."""

    def __init__(self, client: Any, prefix: str) -> None:
        self._client = client
        self._table = TOKENS.name(prefix)

    def get_key(self, key_id: str) -> ApiKey | None:
        item = get_item(self._client, self._table, {"pk": {"S": keys.api_key_pk(key_id)}})
        return from_item(item) if item else None


def document(key: ApiKey) -> str:
    """The key as the other records' documents are: JSON without what is None."""
    return json.dumps({name: value for name, value in asdict(key).items() if value is not None}, separators=(",", ":"))


def from_item(item: Item) -> ApiKey:
    """The key in an item. Raises ValueError, KeyError or TypeError for one that is damaged."""
    found = json.loads(item["doc"]["S"])
    return ApiKey(**{**found, "scopes": tuple(Scope(scope) for scope in found["scopes"])})
