"""A batch of the line: in order within each group, and what is to come again when."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from functions.domain.errors import StorageUnavailable
from functions.domain.webhooks import backoff_s
from functions.webhooks.event_queue import attribute

logger = logging.getLogger("baton.webhooks")

Message = dict[str, Any]


def serve(
    records: Sequence[Message],
    attempt: Callable[[Message], int | None],
    postpone: Callable[[str, int], None],
) -> dict[str, Any]:
    """Attempt each message; what Lambda wants to be told: those that come again.

    `attempt`: seconds until the next try, or None when it is done with. `postpone`: receipt, seconds. Behind a message
    that comes again nothing of its group is attempted: those come again with it.
    """
    again: list[str] = []
    held: set[str] = set()
    for record in records:
        group = str(record["attributes"]["MessageGroupId"])
        wait_s: int | None = 0
        if group not in held:
            try:
                wait_s = attempt(record)
            except StorageUnavailable:
                logger.exception("a delivery could not be looked after")
                # As after a failed delivery: an outage must not use up the tries that a crash is known by.
                wait_s = backoff_s(attribute(record, "ApproximateReceiveCount"))
        if wait_s is None:
            continue
        again.append(str(record["messageId"]))
        # Those behind it in its group wait with it, by the queue's own rule.
        if group not in held:
            held.add(group)
            postpone(str(record["receiptHandle"]), wait_s)
    return {"batchItemFailures": [{"itemIdentifier": message_id} for message_id in again]}
