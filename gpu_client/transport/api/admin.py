"""Call the API for API keys, webhooks and rings, and the health call, which needs no key."""

from __future__ import annotations

from baton.contract.admin.keys import HealthAnswer, KeyCreate, KeyCreated, KeyPage
from baton.contract.admin.sessions import SessionLink
from baton.contract.admin.shares import ShareCreated, ShareRequest
from baton.contract.admin.webhooks import (
    DeliveryPage,
    FleetReplayRequest,
    ReplayAnswer,
    ReplayRequest,
    WebhookCreate,
    WebhookCreated,
    WebhookList,
    WebhookView,
)
from baton.contract.objects.rings import (
    DeleteRequest,
    RecordsAnswer,
    RecordsRequest,
    RemovalAnswer,
    RingKeysPage,
    RingKeysQuery,
    RingsPage,
    UrlsAnswer,
    UrlsRequest,
)
from gpu_client.transport.api.calls import ApiCalls, segment


class AdminCalls(ApiCalls):
    """Calls about API keys, sessions, webhooks and the health of the control plane."""

    def create_key(self, request: KeyCreate) -> KeyCreated:
        """Create a key, shown only in this answer. Without retries, because a retry could leave a second valid key."""
        return self._read(KeyCreated, "create_key", "POST", "/keys", body=request, repeatable=False)

    def list_keys(self, *, limit: int = 100, cursor: str | None = None) -> KeyPage:
        """Return one page of keys, without their secrets."""
        return self._read(KeyPage, "list_keys", "GET", "/keys", query={"limit": limit, "cursor": cursor})

    def revoke_key(self, key_id: str) -> None:
        """Revoke a key, which the API refuses afterwards."""
        self._send("revoke_key", "DELETE", f"/keys/{segment(key_id)}")

    def make_session_link(self) -> SessionLink:
        """Issue a one-time link to the console; an unused link expires within a minute."""
        return self._read(SessionLink, "make_session_link", "POST", "/sessions/links")

    def share_job(self, job_id: str, request: ShareRequest) -> ShareCreated:
        """Issue a link that shows one job. Without retries, because a retry could leave a second valid link."""
        path = f"/job/{segment(job_id)}/share"
        return self._read(ShareCreated, "share_job", "POST", path, body=request, repeatable=False)

    def create_webhook(self, request: WebhookCreate) -> WebhookCreated:
        """Create a webhook; only this answer has its secret. Without retries, which could create a second webhook."""
        return self._read(WebhookCreated, "create_webhook", "POST", "/webhooks", body=request, repeatable=False)

    def list_webhooks(self) -> list[WebhookView]:
        """Return all webhooks, without their secrets."""
        return self._read(WebhookList, "list_webhooks", "GET", "/webhooks").webhooks

    def delete_webhook(self, webhook_id: str) -> None:
        """Delete a webhook. Raises NotFound for a deleted webhook, also after a lost answer of an earlier try."""
        self._send("delete_webhook", "DELETE", f"/webhooks/{segment(webhook_id)}")

    def deliveries(self, webhook_id: str, *, limit: int = 100, cursor: str | None = None) -> DeliveryPage:
        """Return one page of the states of a webhook's deliveries, newest event first."""
        path = f"/webhooks/{segment(webhook_id)}/deliveries"
        return self._read(DeliveryPage, "deliveries", "GET", path, query={"limit": limit, "cursor": cursor})

    def replay_webhook(self, webhook_id: str, job_id: str, from_seq: int = 1) -> ReplayAnswer:
        """Deliver a job's events again. Without retries, because each try delivers the events again."""
        return self._replay(webhook_id, ReplayRequest(job_id=job_id, from_seq=from_seq))

    def replay_fleet(self, webhook_id: str, fleet: str, from_at: int = 0) -> ReplayAnswer:
        """Deliver a fleet's events again. Without retries, because each try delivers the events again."""
        return self._replay(webhook_id, FleetReplayRequest(fleet=fleet, from_at=from_at))

    def _replay(self, webhook_id: str, body: ReplayRequest | FleetReplayRequest) -> ReplayAnswer:
        path = f"/webhooks/{segment(webhook_id)}/replay"
        return self._read(ReplayAnswer, "replay_webhook", "POST", path, body=body, repeatable=False)

    def health(self) -> HealthAnswer:
        """Return the health and the version of the control plane."""
        return self._read(HealthAnswer, "health", "GET", "/health")


class RingCalls(ApiCalls):
    """Calls about records of rings and URLs of their objects. Idempotent, because equal writes have equal versions."""

    def ring_records(self, ring: str, request: RecordsRequest) -> RecordsAnswer:
        """Write one record and read other records, in one call."""
        return self._read(RecordsAnswer, "ring_records", "POST", f"{_ring(ring)}/records", body=request)

    def ring_urls(self, ring: str, request: UrlsRequest) -> UrlsAnswer:
        """Return URLs for storing and fetching objects."""
        return self._read(UrlsAnswer, "ring_urls", "POST", f"{_ring(ring)}/urls", body=request)

    def ring_keys(self, ring: str, query: RingKeysQuery) -> RingKeysPage:
        """Return one page of the keys below a prefix."""
        return self._read(RingKeysPage, "ring_keys", "GET", f"{_ring(ring)}/keys", query=query)

    def ring_delete(self, ring: str, request: DeleteRequest) -> None:
        """Delete records and objects."""
        self._send("ring_delete", "POST", f"{_ring(ring)}/delete", body=request)

    def rings(self, *, limit: int = 100, cursor: str | None = None) -> RingsPage:
        """Return one page of the tenant's rings, by name."""
        return self._read(RingsPage, "rings", "GET", "/rings", query={"limit": limit, "cursor": cursor})

    def remove_ring(self, ring: str) -> RemovalAnswer:
        """Remove a part of a ring; repeat until the answer reports completion. Raises NotFound for a missing ring."""
        return self._read(RemovalAnswer, "remove_ring", "DELETE", _ring(ring))


def _ring(name: str) -> str:
    return f"/rings/{segment(name)}"
