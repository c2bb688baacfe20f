"""Calls of the scope `admin`, and the one that needs no key."""

from __future__ import annotations

from baton.contract.keys import HealthAnswer, KeyCreate, KeyCreated, KeyPage
from baton.contract.webhooks import (
    DeliveryPage,
    ReplayAnswer,
    ReplayRequest,
    WebhookCreate,
    WebhookCreated,
    WebhookList,
    WebhookView,
)
from gpu_client.transport.calls import ApiCalls, read_answer, segment


class AdminCalls(ApiCalls):
    """Making, listing and revoking API keys and webhooks."""

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

    def create_webhook(self, request: WebhookCreate) -> WebhookCreated:
        """A new webhook, its secret shown this once. Not tried again after a lost answer: that would make a second."""
        answer = self._send("create_webhook", "POST", "/webhooks", body=request, repeatable=False)
        return read_answer("create_webhook", answer, WebhookCreated)

    def list_webhooks(self) -> list[WebhookView]:
        """All webhooks, without their secrets."""
        answer = self._send("list_webhooks", "GET", "/webhooks")
        return read_answer("list_webhooks", answer, WebhookList).webhooks

    def delete_webhook(self, webhook_id: str) -> None:
        """It is told nothing more. Raises NotFound, too, when an earlier try's answer was lost."""
        self._send("delete_webhook", "DELETE", f"/webhooks/{segment(webhook_id)}")

    def deliveries(self, webhook_id: str, *, limit: int = 100, cursor: str | None = None) -> DeliveryPage:
        """One page of how a webhook's deliveries stand, the newest event first."""
        path = f"/webhooks/{segment(webhook_id)}/deliveries"
        answer = self._send("deliveries", "GET", path, query={"limit": limit, "cursor": cursor})
        return read_answer("deliveries", answer, DeliveryPage)

    def replay_webhook(self, webhook_id: str, job_id: str, from_seq: int = 1) -> ReplayAnswer:
        """Deliver a job's events again; not tried again after a lost answer, for each try delivers them once more."""
        body = ReplayRequest(job_id=job_id, from_seq=from_seq)
        path = f"/webhooks/{segment(webhook_id)}/replay"
        answer = self._send("replay_webhook", "POST", path, body=body, repeatable=False)
        return read_answer("replay_webhook", answer, ReplayAnswer)

    def health(self) -> HealthAnswer:
        """Whether the control plane answers, and its version."""
        return read_answer("health", self._send("health", "GET", "/health"), HealthAnswer)
