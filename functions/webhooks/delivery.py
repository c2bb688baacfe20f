"""One message of the line: deliver it, note how it went, and say whether and when it is tried again."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Protocol

from baton.contract.webhooks import DeliveryState
from functions.domain.errors import Refusal
from functions.domain.ports import WebhookStore
from functions.domain.webhooks import GIVE_UP_AFTER_S, Delivery, Target, Webhook, backoff_s, signature, target_of
from functions.webhooks.event_queue import Waiting, attribute
from functions.webhooks.http_delivery import Outcome

logger = logging.getLogger("baton.webhooks")

GONE = 410
"""Who answers so wants to hear nothing more of this event."""


class Post(Protocol):
    """How something is sent."""

    def __call__(self, target: Target, headers: Mapping[str, str], body: bytes) -> Outcome: ...


def deliver(
    record: Mapping[str, Any], webhooks: WebhookStore, post: Post, now: int, *, test_origin: str | None = None
) -> int | None:
    """Deliver one message of the line, as Lambda hands it over, and note it in the log of deliveries.

    None if it is done with, delivered or not; else seconds until it is to be tried again, and whatever waits behind it
    in its group with it. Raises StorageUnavailable, ValueError, KeyError (no message of ours).
    """
    waiting = Waiting.from_json(record["body"])
    webhook = webhooks.get(waiting.tenant, waiting.webhook_id)
    if webhook is None:
        # It was deleted: nobody wants this any more.
        return None
    attempts = attribute(record, "ApproximateReceiveCount")
    outcome = _send(webhook, waiting, post, now, test_origin)
    sent_at = attribute(record, "SentTimestamp") // 1000
    final = outcome.forbidden or outcome.status == GONE or now - sent_at >= GIVE_UP_AFTER_S
    state = DeliveryState.FAILED if final else DeliveryState.WAITING
    event = waiting.event
    webhooks.record(
        Delivery(
            webhook_id=webhook.id,
            job_id=event.job_id,
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


def _send(webhook: Webhook, waiting: Waiting, post: Post, now: int, test_origin: str | None) -> Outcome:
    body = waiting.event.model_dump_json().encode()
    try:
        target = target_of(webhook.url, test_origin)
    except Refusal as refusal:
        # It was accepted by rules that have changed since.
        return Outcome(problem=refusal.message, forbidden=True)
    headers = {
        "content-type": "application/json",
        "user-agent": "baton-webhooks/1",
        "baton-webhook-id": webhook.id,
        "baton-event-id": waiting.event.id,
        "baton-event-type": waiting.event.type.value,
        "baton-signature": signature(webhook.secret, now, body),
    }
    return post(target, headers, body)
