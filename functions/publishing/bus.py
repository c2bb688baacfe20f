"""The event bus is EventBridge's, the dead letters are a queue of SQS."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from baton.contract.events import EVENT_SOURCE
from functions.publishing.entries import Entry
from functions.storage.clients import plain_client
from functions.storage.failures import failures_translated

logger = logging.getLogger("baton.publishing")


class EventBridgeBus:
    """EventBus over a low-level client of EventBridge. `name`: the bus's."""

    def __init__(self, client: Any, name: str) -> None:
        self._client = client
        self._name = name

    def put(self, entries: Sequence[Entry]) -> list[str | None]:
        """One PutEvents."""
        asked = [
            {
                "EventBusName": self._name,
                "Source": EVENT_SOURCE,
                "DetailType": entry.type,
                "Detail": entry.detail,
                "Time": entry.at,
            }
            for entry in entries
        ]
        with failures_translated():
            answer = self._client.put_events(Entries=asked)
        return [result.get("ErrorCode") for result in answer["Entries"]]


class DeadLetterQueue:
    """DeadLetters in a queue. `url` None: there is no queue, and the log is all that tells of them.

    The client is made when the first letter is written, which most deployments never see.
    """

    def __init__(self, url: str | None, client: Any = None) -> None:
        self._url = url
        self._client = client

    def put(self, keys: Mapping[str, str], why: str) -> None:
        """One SendMessage."""
        if self._url is None:
            logger.error("there is no queue for dead letters", extra={"why": why, "keys": dict(keys)})
            return
        if self._client is None:
            self._client = plain_client("sqs")
        with failures_translated():
            self._client.send_message(QueueUrl=self._url, MessageBody=json.dumps({"why": why, "keys": dict(keys)}))
