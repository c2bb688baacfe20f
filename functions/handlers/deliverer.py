"""Lambda entry point of the deliverer: send queued events to webhooks."""

from __future__ import annotations

import os
from typing import Any

from functions.handlers.startup import ServerClock, start_logging
from functions.settings import ControlPlaneSettings
from functions.storage.clients import dynamodb_client, plain_client
from functions.storage.dynamodb.webhooks import DynamoWebhookStore
from functions.webhooks.batch_consumer import consume_batch
from functions.webhooks.delivery import deliver
from functions.webhooks.http_delivery import WebhookSender

start_logging()
settings = ControlPlaneSettings.from_environment(os.environ)
webhooks = DynamoWebhookStore(dynamodb_client(), settings.table_prefix)
sender = WebhookSender()
sqs = plain_client("sqs")
clock = ServerClock()


def handler(event: dict[str, Any], lambda_context: object) -> dict[str, Any]:
    """Deliver one batch of the queue; return the messages that SQS repeats."""

    def attempt(record: dict[str, Any]) -> int | None:
        return deliver(record, webhooks, sender.post, clock.now(), test_origin=settings.webhook_test_origin)

    def postpone(receipt: str, wait_s: int) -> None:
        sqs.change_message_visibility(QueueUrl=settings.webhook_line, ReceiptHandle=receipt, VisibilityTimeout=wait_s)

    return consume_batch(event["Records"], attempt, postpone)
