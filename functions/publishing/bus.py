"""The event bus on EventBridge and the dead letters on SQS."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from baton.contract.jobs.events import EVENT_SOURCE
from functions.publishing.entries import Entry
from functions.storage.clients import plain_client
from functions.storage.failures import failures_translated

logger = logging.getLogger("baton.publishing")


class EventBridgeBus:
    """EventBus on a boto3 client of EventBridge. `name`: name of the bus."""

    def __init__(self, client: Any, name: str) -> None:
        self._client = client
        self._name = name

    def put(self, entries: Sequence[Entry]) -> list[str | None]:
        """Send one PutEvents request."""
        request = [
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
            answer = self._client.put_events(Entries=request)
        return [result.get("ErrorCode") for result in answer["Entries"]]


class DeadLetterQueue:
    """DeadLetters in a queue of SQS; with `url` None a dead letter is an entry in the log.

    The first dead letter creates the client, so most deployments never load the client.
    """

    def __init__(self, url: str | None, client: Any = None) -> None:
        self._url = url
        self._client = client

    def put(self, keys: Mapping[str, str], why: str) -> None:
        """Send one message."""
        if self._url is None:
            logger.error("there is no queue for dead letters", extra={"why": why, "keys": dict(keys)})
            return
        if self._client is None:
            self._client = plain_client("sqs")
        with failures_translated():
            self._client.send_message(QueueUrl=self._url, MessageBody=json.dumps({"why": why, "keys": dict(keys)}))
