"""SQS's event source mapping on one machine: what waits in the line of webhooks is handed to the deliverer."""

from __future__ import annotations

import logging
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from functions.local.lambda_context import LambdaHandler, LocalContext
from functions.local.lifecycle import Poller, Stopper

logger = logging.getLogger(__name__)


class LineFeed(Poller):
    """Takes from the queue `url` through `client` every `interval_s` seconds in a thread, one message at a time.

    As Lambda does: what the handler does not name as failed is deleted; everything else comes again when it is visible
    again, after `postpone_s` where the handler raises.
    """

    def __init__(
        self,
        handler: LambdaHandler,
        client: Any,
        url: str,
        *,
        interval_s: float = 0.5,
        postpone_s: int = 5,
        stopper: Stopper | None = None,
    ) -> None:
        super().__init__("line", stopper, interval_s)
        self._handler = handler
        self._client = client
        self._url = url
        self._postpone_s = postpone_s

    def tick(self) -> bool:
        """Hand over one message; True if there was one."""
        try:
            taken = self._client.receive_message(QueueUrl=self._url, AttributeNames=["All"], MaxNumberOfMessages=1)
            for message in taken.get("Messages", []):
                self._hand_over(message)
        except (BotoCoreError, ClientError) as error:
            logger.warning("the line of webhooks cannot be read: %s", error)
            return False
        return bool(taken.get("Messages"))

    def _hand_over(self, message: dict[str, Any]) -> None:
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
            logger.exception("the call of the deliverer failed")
            self._client.change_message_visibility(
                QueueUrl=self._url, ReceiptHandle=receipt, VisibilityTimeout=self._postpone_s
            )
            return
        if not failed:
            self._client.delete_message(QueueUrl=self._url, ReceiptHandle=receipt)
