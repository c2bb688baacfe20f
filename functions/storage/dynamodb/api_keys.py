"""Read the items that the authorizer needs: API keys, and the leases from which ring tokens are derived."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from baton.contract.names import KeyKind, Scope
from functions.domain import table_keys
from functions.domain.access.api_keys import ApiKey
from functions.storage.dynamodb.items.attribute_values import Item
from functions.storage.dynamodb.reads import get_item
from functions.storage.tables import HEARTBEATS, TOKENS


class DynamoKeyReader:
    """KeyReader over a low-level DynamoDB client."""

    def __init__(self, client: Any, prefix: str) -> None:
        self._client = client
        self._table = TOKENS.name(prefix)

    def get_key(self, key_id: str) -> ApiKey | None:
        item = get_item(self._client, self._table, {"pk": {"S": table_keys.api_key_pk(key_id)}})
        return from_item(item) if item else None


@dataclass(frozen=True)
class LeaseOfRings:
    """RingLease as stored."""

    tenant: str
    ring_token_sha256: str | None
    rings: Sequence[str]
    closed: str
    expires_at: int


class DynamoRingLeaseReader:
    """RingLeaseReader over a low-level DynamoDB client."""

    def __init__(self, client: Any, prefix: str) -> None:
        self._client = client
        self._table = HEARTBEATS.name(prefix)

    def get(self, job_id: str) -> LeaseOfRings | None:
        item = get_item(self._client, self._table, {"pk": {"S": job_id}})
        if item is None:
            return None
        texts = {name: item[name]["S"] for name in ("ring_token_sha256", "rings", "closed") if name in item}
        return LeaseOfRings(
            item["tenant"]["S"],
            texts.get("ring_token_sha256"),
            texts["rings"].split(",") if "rings" in texts else [],
            texts.get("closed", ""),
            int(item["expires_at"]["N"]),
        )


def document(key: ApiKey) -> str:
    """Encode a key as JSON without None, as documents.py encodes records."""
    return json.dumps({name: value for name, value in asdict(key).items() if value is not None}, separators=(",", ":"))


def from_item(item: Item) -> ApiKey:
    """Decode the key in an item. Raises ValueError, KeyError or TypeError for a damaged item."""
    found = json.loads(item["doc"]["S"])
    queues = tuple(found["queues"]) if "queues" in found else None
    kind = KeyKind(found["kind"]) if "kind" in found else None
    scopes = tuple(Scope(scope) for scope in found["scopes"])
    return ApiKey(**{**found, "scopes": scopes, "queues": queues, "kind": kind})
