"""API keys and transfer tokens in memory."""

from __future__ import annotations

from functions.domain import table_keys
from functions.domain.access.api_keys import ApiKey
from functions.domain.errors import WriteConflict
from functions.domain.ports import ResultPage
from functions.domain.records import TransferGrant
from functions.storage.paging import (
    keys_list,
    page,
)
from tests.twins.state import MemoryState, created_of


class MemoryTokenStore:
    """Twin of DynamoTokenStore."""

    def __init__(self, state: MemoryState) -> None:
        self._state = state

    def put_key(self, key: ApiKey) -> None:
        with self._state.lock:
            if key.id in self._state.keys:
                raise WriteConflict
            self._put(key)

    def get_key(self, key_id: str) -> ApiKey | None:
        with self._state.lock:
            return self._state.keys.get(key_id)

    def list_keys(self, tenant: str, *, limit: int, cursor: str | None = None) -> ResultPage[ApiKey]:
        listed = keys_list(tenant)
        position = listed.position(cursor)
        after = created_of(position)
        with self._state.lock:
            entries = self._state.keys_by_tenant.after(tenant, after, limit + 1)
            found = [self._state.keys[key_id] for _, key_id in entries]
        return page(found, limit, listed, lambda key: (key.created_at, key.id))

    def replace_key(self, key: ApiKey) -> None:
        with self._state.lock:
            stored = self._state.keys.get(key.id)
            if stored is None or (stored.revoked_at is not None and key.revoked_at is None):
                raise WriteConflict
            self._put(key)

    def put_grant(self, grant: TransferGrant) -> None:
        with self._state.lock:
            self._state.grants[grant.token_sha256] = grant

    def get_grant(self, token_sha256: str) -> TransferGrant | None:
        with self._state.lock:
            return self._state.grants.get(token_sha256)

    def redeem(self, token_sha256: str, now: int) -> TransferGrant | None:
        with self._state.lock:
            grant = self._state.grants.get(token_sha256)
            if grant is None or grant.purpose != "download" or grant.expires_at <= now:
                return None
            return self._state.grants.pop(token_sha256)

    def _put(self, key: ApiKey) -> None:
        self._state.keys[key.id] = key
        if key.listed:
            self._state.keys_by_tenant.put(key.id, key.tenant, table_keys.created_sk(key.created_at, key.id))
