"""Consumption of one batch of the delivery queue, in order within each message group."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from functions.domain.errors import StorageUnavailable
from functions.domain.webhooks import backoff_s
from functions.webhooks.event_queue import numeric_attribute

logger = logging.getLogger("baton.webhooks")

Message = dict[str, Any]


def consume_batch(
    records: Sequence[Message],
    attempt: Callable[[Message], int | None],
    postpone: Callable[[str, int], None],
) -> dict[str, Any]:
    """Attempt each message, and return the failures in the form that Lambda expects.

    `attempt` returns the seconds until the next attempt, or None after the last one. `postpone` takes a receipt and
    seconds. A failed message blocks its group: the later messages of the group fail without an attempt.
    """
    failed: list[str] = []
    blocked_groups: set[str] = set()
    for record in records:
        group = str(record["attributes"]["MessageGroupId"])
        wait_s: int | None = 0
        if group not in blocked_groups:
            try:
                wait_s = attempt(record)
            except StorageUnavailable:
                logger.exception("a delivery failed: the store is unavailable")
                # A message with too many receives becomes a dead letter. The backoff keeps an outage of the
                # store from using up the receives.
                wait_s = backoff_s(numeric_attribute(record, "ApproximateReceiveCount"))
        if wait_s is None:
            continue
        failed.append(str(record["messageId"]))
        # SQS delivers no later message of the group before the postponed message, so one call postpones the group.
        if group not in blocked_groups:
            blocked_groups.add(group)
            postpone(str(record["receiptHandle"]), wait_s)
    return {"batchItemFailures": [{"itemIdentifier": message_id} for message_id in failed]}
