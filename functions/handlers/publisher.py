"""Lambda entry point of the publisher: put new events on the event bus and into the queue of webhook deliveries."""

from __future__ import annotations

import os
import time
from typing import Any

from functions.handlers.startup import start_logging
from functions.publishing.bus import DeadLetterQueue, EventBridgeBus
from functions.publishing.outbox import publish
from functions.settings import ControlPlaneSettings
from functions.storage.clients import dynamodb_client, plain_client
from functions.storage.dynamodb.webhooks import DynamoWebhookStore
from functions.webhooks.event_queue import SqsDeliveryQueue, Subscribers

start_logging()
settings = ControlPlaneSettings.from_environment(os.environ)
bus = EventBridgeBus(plain_client("events"), settings.event_bus)
dead_letters = DeadLetterQueue(settings.dead_letters)
subscribers = Subscribers(
    DynamoWebhookStore(dynamodb_client(), settings.table_prefix),
    SqsDeliveryQueue(settings.webhook_line),
    time.monotonic,
)


def handler(event: dict[str, Any], lambda_context: object) -> dict[str, Any]:
    """Publish one batch of the DynamoDB stream; return the record from which Lambda repeats."""
    return publish(event["Records"], bus, dead_letters, time.sleep, subscribers.enqueue)
