"""Calls of the scope `admin`, and the one that needs no key."""

from __future__ import annotations

from contract.keys import HealthAnswer, KeyCreate, KeyCreated, KeyPage
from gpu_client.transport.calls import ApiCalls, read_answer, segment


class AdminCalls(ApiCalls):
    """Making, listing and revoking API keys."""

    def create_key(self, request: KeyCreate) -> KeyCreated:
        """A new key, shown this once. Not tried again after a lost answer: that would leave a second live key."""
        answer = self._send("create_key", "POST", "/keys", body=request, repeatable=False)
        return read_answer("create_key", answer, KeyCreated)

    def list_keys(self, *, limit: int = 100, cursor: str | None = None) -> KeyPage:
        """One page of keys, without their secrets."""
        answer = self._send("list_keys", "GET", "/keys", query={"limit": limit, "cursor": cursor})
        return read_answer("list_keys", answer, KeyPage)

    def revoke_key(self, key_id: str) -> None:
        """From now on the key is refused."""
        self._send("revoke_key", "DELETE", f"/keys/{segment(key_id)}")

    def health(self) -> HealthAnswer:
        """Whether the control plane answers, and its version."""
        return read_answer("health", self._send("health", "GET", "/health"), HealthAnswer)
