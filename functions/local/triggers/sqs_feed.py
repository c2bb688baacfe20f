"""Invocation of the deliverer with the messages of its queue, as Lambda's event source mapping for SQS does."""

from __future__ import annotations

import logging
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from functions.local.lambda_context import LambdaHandler, LocalContext
from functions.local.lifecycle import PollingLoop, StopSignal

logger = logging.getLogger(__name__)

POSTPONE_S = 5


class SqsFeed(PollingLoop):
    """Thread that polls the queue `url` through `client` every `interval_s` seconds or less often, message by message.

    As with Lambda, a message that the handler does not report as failed is deleted. A failed message repeats once it is
    visible again; if the handler raises, after POSTPONE_S seconds.
    """

    full_batch = 1

    def __init__(
        self,
        handler: LambdaHandler,
        client: Any,
        url: str,
        *,
        interval_s: float = 0.5,
        stopper: StopSignal | None = None,
    ) -> None:
        super().__init__("SQS feed", stopper, interval_s)
        self._handler = handler
        self._client = client
        self._url = url

    def tick(self) -> int:
        """Process one message; return 0 if the queue had none."""
        try:
            answer = self._client.receive_message(QueueUrl=self._url, AttributeNames=["All"], MaxNumberOfMessages=1)
            for message in answer.get("Messages", []):
                self._invoke(message)
        except (BotoCoreError, ClientError) as error:
            logger.warning("the queue of webhook deliveries cannot be read: %s", error)
            return 0
        return len(answer.get("Messages", []))

    def _invoke(self, message: dict[str, Any]) -> None:
        receipt = message["ReceiptHandle"]
        record = {
            "messageId": message["MessageId"],
            "receiptHandle": receipt,
            "body": message["Body"],
            "attributes": message["Attributes"],
            "messageAttributes": {},
            "md5OfBody": message["MD5OfBody"],
            "eventSource": "aws:sqs",
            "eventSourceARN": "arn:aws:sqs:us-east-1:000000000000:baton-webhooks.fifo",
            "awsRegion": "us-east-1",
        }
        try:
            failed = self._handler({"Records": [record]}, LocalContext("deliverer"))["batchItemFailures"]
        except Exception:  # the boundary at which Lambda reports a failed invocation
            logger.exception("the deliverer failed")
            self._client.change_message_visibility(
                QueueUrl=self._url, ReceiptHandle=receipt, VisibilityTimeout=POSTPONE_S
            )
            return
        if not failed:
            self._client.delete_message(QueueUrl=self._url, ReceiptHandle=receipt)
