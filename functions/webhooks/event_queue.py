"""The line in which events wait for their webhooks: a FIFO queue, one group for each webhook and job."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.contract.events import JobEvent
from functions.domain.ports import DeliveryQueue, WebhookStore
from functions.domain.webhooks import Webhook
from functions.publishing.entries import Entry
from functions.storage.clients import plain_client
from functions.storage.failures import failures_translated

MAX_MESSAGE_BYTES = 250_000
"""Below what SQS takes everywhere, with room for what is around the event."""
KNOWN_FOR_S = 60
"""So long may a new webhook that no job names hear nothing yet, and a deleted one still be put in line."""


@dataclass(frozen=True)
class Waiting:
    """A message in the line: one event for one webhook."""

    tenant: str
    webhook_id: str
    event: JobEvent

    def as_json(self) -> str:
        """The message's body, in ASCII; an event too large for the queue goes without its data."""
        body = self._with(self.event)
        if len(body) > MAX_MESSAGE_BYTES:
            body = self._with(self.event.model_copy(update={"data": {}, "data_omitted": True}))
        return body

    def _with(self, event: JobEvent) -> str:
        told = {"tenant": self.tenant, "webhook_id": self.webhook_id, "event": event.model_dump(mode="json")}
        return json.dumps(told, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Waiting:
        """The inverse. Raises ValueError or KeyError."""
        told = json.loads(text)
        return cls(str(told["tenant"]), str(told["webhook_id"]), JobEvent.model_validate(told["event"]))


class SqsLine:
    """DeliveryQueue in a FIFO queue. `url` None: there is none, and nobody is told of anything.

    The client is made when it is first needed.
    """

    def __init__(self, url: str | None, client: Any = None) -> None:
        self._url = url
        self._client = client

    def put(self, webhook: Webhook, event: JobEvent, *, repetition: str = "") -> None:
        """One SendMessage."""
        if self._url is None:
            return
        if self._client is None:
            self._client = plain_client("sqs")
        group = f"{webhook.id}.{event.job_id}"
        with failures_translated():
            self._client.send_message(
                QueueUrl=self._url,
                MessageBody=Waiting(webhook.tenant, webhook.id, event).as_json(),
                MessageGroupId=group,
                MessageDeduplicationId=f"{group}.{event.seq}{repetition and '.' + repetition}",
            )


class Subscribers:
    """Puts published events in line for those who want them. `monotonic`: seconds, for how long webhooks are known."""

    def __init__(self, webhooks: WebhookStore, line: DeliveryQueue, monotonic: Callable[[], float]) -> None:
        self._webhooks = webhooks
        self._line = line
        self._monotonic = monotonic
        self._known: dict[str, tuple[float, Sequence[Webhook]]] = {}

    def tell(self, entries: Sequence[Entry]) -> None:
        """Put each of the events in line for each webhook that wants it. Raises StorageUnavailable."""
        for entry in entries:
            for webhook in self._of(entry.tenant, entry.webhook):
                if webhook.wants(entry.type, entry.webhook):
                    self._line.put(webhook, JobEvent.model_validate_json(entry.detail))

    def _of(self, tenant: str, named: str | None) -> Sequence[Webhook]:
        """Those of the tenant; looked up anew if the one that the job names is not among those that are known."""
        now_s = self._monotonic()
        since_s, known = self._known.get(tenant, (float("-inf"), ()))
        is_new = named is not None and all(webhook.id != named for webhook in known)
        if is_new or now_s - since_s > KNOWN_FOR_S:
            known = self._webhooks.of_tenant(tenant)
            self._known[tenant] = (now_s, known)
        return known


def attribute(record: Mapping[str, Any], name: str) -> int:
    """A number that SQS tells about a message."""
    return int(record["attributes"][name])
