"""Webhooks and their deliveries in memory."""

from __future__ import annotations

from functions.domain.ports import ResultPage
from functions.domain.webhooks import Delivery, Webhook
from functions.storage.paging import deliveries_list, page
from tests.twins.state import MemoryState


class MemoryWebhookStore:
    """Twin of DynamoWebhookStore."""

    def __init__(self, state: MemoryState) -> None:
        self._state = state

    def put(self, webhook: Webhook) -> None:
        with self._state.lock:
            self._state.webhooks[webhook.tenant, webhook.id] = webhook

    def get(self, tenant: str, webhook_id: str) -> Webhook | None:
        with self._state.lock:
            return self._state.webhooks.get((tenant, webhook_id))

    def of_tenant(self, tenant: str) -> list[Webhook]:
        with self._state.lock:
            return [found for (owner, _), found in sorted(self._state.webhooks.items()) if owner == tenant]

    def delete(self, tenant: str, webhook_id: str) -> bool:
        with self._state.lock:
            return self._state.webhooks.pop((tenant, webhook_id), None) is not None

    def record(self, delivery: Delivery) -> None:
        with self._state.lock:
            self._state.deliveries.setdefault(delivery.webhook_id, {})[delivery.place] = delivery

    def deliveries(self, webhook_id: str, *, limit: int, cursor: str | None = None) -> ResultPage[Delivery]:
        listed = deliveries_list(webhook_id)
        position = listed.position(cursor)
        before = None if position is None else (int(position[0]), str(position[1]), int(position[2]))
        with self._state.lock:
            kept = self._state.deliveries.get(webhook_id, {})
            places = [place for place in sorted(kept, reverse=True) if before is None or place < before]
            found = [kept[place] for place in places[: limit + 1]]
        return page(found, limit, listed, lambda delivery: delivery.place)
