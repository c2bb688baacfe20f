"""The FIFO queue of events that await delivery: one message group for each webhook and job or fleet."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from baton.contract.fleets.events import PublishedFleetEvent
from baton.contract.jobs.events import JobEvent
from functions.domain.ports import DeliveryQueue, WebhookStore
from functions.domain.webhooks import Webhook
from functions.storage.clients import plain_client
from functions.storage.failures import failures_translated

if TYPE_CHECKING:
    # Only the function `publisher` loads the entries, and with the entries the records of fleets.
    from functions.publishing.entries import Entry

MAX_MESSAGE_BYTES = 250_000
"""Size limit of a message; SQS takes 256 KiB, attributes included."""
WEBHOOK_CACHE_S = 60
"""Lifetime of the cached webhooks of a tenant. A new webhook that no job names may miss events for so long; a deleted
webhook may still get messages."""


@dataclass(frozen=True)
class QueuedEvent:
    """A message of the queue: one event for one webhook."""

    tenant: str
    webhook_id: str
    event: JobEvent | PublishedFleetEvent

    def as_json(self) -> str:
        """Encode the message in ASCII; an event too large for the queue loses its data."""
        body = self._with(self.event)
        if len(body) > MAX_MESSAGE_BYTES and isinstance(self.event, JobEvent):
            body = self._with(self.event.model_copy(update={"data": {}, "data_omitted": True}))
        return body

    def _with(self, event: JobEvent | PublishedFleetEvent) -> str:
        document = {"tenant": self.tenant, "webhook_id": self.webhook_id, "event": event.model_dump(mode="json")}
        return json.dumps(document, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> QueuedEvent:
        """Decode a message. Raises ValueError or KeyError."""
        document = json.loads(text)
        kind = PublishedFleetEvent if "fleet" in document["event"] else JobEvent
        return cls(str(document["tenant"]), str(document["webhook_id"]), kind.model_validate(document["event"]))


class SqsDeliveryQueue:
    """DeliveryQueue in a FIFO queue of SQS; with `url` None every event is dropped.

    The first message creates the client.
    """

    def __init__(self, url: str | None, client: Any = None) -> None:
        self._url = url
        self._client = client

    def put(self, webhook: Webhook, event: JobEvent | PublishedFleetEvent, *, repetition: str = "") -> None:
        """Send one message."""
        if self._url is None:
            return
        if self._client is None:
            self._client = plain_client("sqs")
        group = f"{webhook.id}.{event.subject}"
        with failures_translated():
            self._client.send_message(
                QueueUrl=self._url,
                MessageBody=QueuedEvent(webhook.tenant, webhook.id, event).as_json(),
                MessageGroupId=group,
                MessageDeduplicationId=f"{group}.{event.seq}{repetition and '.' + repetition}",
            )


class Subscribers:
    """Webhooks that receive published events, by the queue. `monotonic`: clock in seconds, for the cache."""

    def __init__(self, webhooks: WebhookStore, queue: DeliveryQueue, monotonic: Callable[[], float]) -> None:
        self._webhooks = webhooks
        self._queue = queue
        self._monotonic = monotonic
        self._cache: dict[str, tuple[float, Sequence[Webhook]]] = {}

    def enqueue(self, entries: Sequence[Entry]) -> None:
        """Queue each event for each webhook that wants the event. Raises StorageUnavailable."""
        for entry in entries:
            kind = PublishedFleetEvent if entry.of_fleet else JobEvent
            for webhook in self._webhooks_of(entry.tenant, entry.webhook):
                wants = webhook.wants_of_fleets if entry.of_fleet else partial(webhook.wants, named=entry.webhook)
                if wants(entry.type):
                    self._queue.put(webhook, kind.model_validate_json(entry.detail))

    def _webhooks_of(self, tenant: str, named: str | None) -> Sequence[Webhook]:
        """Return the tenant's webhooks; read them again if the cache lacks the webhook that the job names."""
        now_s = self._monotonic()
        since_s, cached = self._cache.get(tenant, (float("-inf"), ()))
        is_new = named is not None and all(webhook.id != named for webhook in cached)
        if is_new or now_s - since_s > WEBHOOK_CACHE_S:
            cached = self._webhooks.of_tenant(tenant)
            self._cache[tenant] = (now_s, cached)
        return cached


def numeric_attribute(record: Mapping[str, Any], name: str) -> int:
    """Return a numeric attribute that SQS adds to a message."""
    return int(record["attributes"][name])
