"""Delivery of one queued event: send, record the outcome, schedule the next attempt."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Protocol

from baton.contract.admin.webhooks import DeliveryState
from functions.domain.errors import Refusal
from functions.domain.ports import WebhookStore
from functions.domain.webhooks import (
    GIVE_UP_AFTER_S,
    Delivery,
    Webhook,
    WebhookTarget,
    backoff_s,
    parse_target,
    signature,
)
from functions.webhooks.event_queue import QueuedEvent, numeric_attribute
from functions.webhooks.http_delivery import PostOutcome

logger = logging.getLogger("baton.webhooks")

GONE = 410
"""Status by which a receiver ends the delivery of an event for good."""


class Post(Protocol):
    """Function that sends one body to a webhook."""

    def __call__(self, target: WebhookTarget, headers: Mapping[str, str], body: bytes) -> PostOutcome: ...


def deliver(
    record: Mapping[str, Any], webhooks: WebhookStore, post: Post, now: int, *, test_origin: str | None = None
) -> int | None:
    """Attempt one message of the queue, and record the attempt in the log of deliveries.

    Returns None after the last attempt, delivered or not; else the seconds until the next attempt, for which the later
    messages of the same group wait too. Raises StorageUnavailable, and ValueError or KeyError for a foreign message.
    """
    queued = QueuedEvent.from_json(record["body"])
    webhook = webhooks.get(queued.tenant, queued.webhook_id)
    if webhook is None:
        # The tenant deleted the webhook after the event was queued.
        return None
    attempts = numeric_attribute(record, "ApproximateReceiveCount")
    outcome = _send(webhook, queued, post, now, test_origin)
    sent_at = numeric_attribute(record, "SentTimestamp") // 1000
    final = outcome.forbidden or outcome.status == GONE or now - sent_at >= GIVE_UP_AFTER_S
    state = DeliveryState.FAILED if final else DeliveryState.WAITING
    event = queued.event
    webhooks.record(
        Delivery(
            webhook_id=webhook.id,
            job_id=event.subject,
            seq=event.seq,
            type=event.type,
            at=event.at,
            state=DeliveryState.DELIVERED if outcome.delivered else state,
            attempts=attempts,
            last_at=now,
            status=outcome.status,
            problem=outcome.problem,
        )
    )
    if outcome.delivered:
        return None
    logger.warning(
        "a webhook was not delivered",
        extra={"webhook_id": webhook.id, "event_id": event.id, "problem": outcome.problem, "attempts": attempts},
    )
    return None if final else backoff_s(attempts)


def _send(webhook: Webhook, queued: QueuedEvent, post: Post, now: int, test_origin: str | None) -> PostOutcome:
    body = queued.event.model_dump_json().encode()
    try:
        target = parse_target(webhook.url, test_origin)
    except Refusal as refusal:
        # An earlier version accepted the URL by rules that have changed since.
        return PostOutcome(problem=refusal.message, forbidden=True)
    headers = {
        "content-type": "application/json",
        "user-agent": "baton-webhooks/1",
        "baton-webhook-id": webhook.id,
        "baton-event-id": queued.event.id,
        "baton-event-type": queued.event.type.value,
        "baton-signature": signature(webhook.secret, now, body),
    }
    return post(target, headers, body)
