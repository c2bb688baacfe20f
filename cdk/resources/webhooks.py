"""Queue of webhook deliveries, the deliverer's feed, and the queue of messages that crash the deliverer."""

from __future__ import annotations

from collections.abc import Mapping

from aws_cdk import Duration, RemovalPolicy
from aws_cdk import aws_lambda as lambda_
from aws_cdk import aws_sqs as sqs
from constructs import Construct

from cdk.resources.access import ACCESS
from cdk.resources.functions import TIMEOUT_S, allow
from cdk.resources.nag_suppressions import DEAD_LETTERS, acknowledge
from cdk.stage import StageSettings

RETENTION = Duration.days(4)
"""Longer than the retries of one delivery, since later deliveries of the group wait for the end of the retries."""
MAX_RECEIVES = 200
"""Far more receives than the retries of a day, so only a message that crashes the deliverer becomes a dead letter."""
MAX_CONCURRENCY = 50
"""Limit of concurrent deliveries, so that slow servers leave the account's functions to the API."""


class Webhooks(Construct):
    """The FIFO queue `baton-<stage>-webhooks.fifo`, with dead letters in `baton-<stage>-webhooks-dead.fifo`."""

    def __init__(
        self, scope: Construct, id_: str, *, stage: StageSettings, functions: Mapping[str, lambda_.Function]
    ) -> None:
        super().__init__(scope, id_)
        self.dead = self._queue("Dead", f"{stage.prefix}webhooks-dead.fifo", Duration.days(14))
        acknowledge(self.dead, "SQS3", DEAD_LETTERS)
        self.queue = self._queue(
            "Line",
            f"{stage.prefix}webhooks.fifo",
            RETENTION,
            sqs.DeadLetterQueue(queue=self.dead, max_receive_count=MAX_RECEIVES),
        )
        for name, access in ACCESS.items():
            if access.delivery_queue:
                functions[name].add_environment("BATON_WEBHOOK_LINE", self.queue.queue_url)
                allow(functions[name], "sqs", access.delivery_queue, self.queue.queue_arn)
        deliverer = functions["deliverer"]
        feed = lambda_.EventSourceMapping(
            self,
            "Feed",
            target=deliverer,
            event_source_arn=self.queue.queue_arn,
            # One message per batch: a message behind a failed delivery of its group must not count as received.
            batch_size=1,
            report_batch_item_failures=True,
            max_concurrency=MAX_CONCURRENCY,
        )
        # Lambda checks the role's permissions on the queue when CloudFormation creates the mapping.
        if deliverer.role is not None:
            feed.node.add_dependency(deliverer.role)

    def _queue(self, id_: str, name: str, retention: Duration, dead: sqs.DeadLetterQueue | None = None) -> sqs.Queue:
        return sqs.Queue(
            self,
            id_,
            queue_name=name,
            fifo=True,
            encryption=sqs.QueueEncryption.SQS_MANAGED,
            enforce_ssl=True,
            retention_period=retention,
            # Lambda's documentation recommends six times the timeout of the function.
            visibility_timeout=Duration.seconds(6 * TIMEOUT_S),
            dead_letter_queue=dead,
            removal_policy=RemovalPolicy.DESTROY,
        )
