"""How webhooks are told: the line in which events wait, the deliverer behind it, and what nobody could deliver."""

from __future__ import annotations

from collections.abc import Mapping

from aws_cdk import Duration, RemovalPolicy
from aws_cdk import aws_lambda as lambda_
from aws_cdk import aws_sqs as sqs
from constructs import Construct

from cdk.resources.access import ACCESS
from cdk.resources.events import allow
from cdk.resources.functions import TIMEOUT_S
from cdk.resources.nag_suppressions import DEAD_LETTERS, acknowledge
from cdk.stage import Stage

KEPT = Duration.days(4)
"""Longer than a delivery is tried: one that waits behind it in its group is tried too."""
MAX_RECEIVES = 200
"""A day of tries has far fewer: only what crashes the deliverer each time is put aside."""
AT_ONCE = 50
"""Deliveries: however many servers are slow, they take no more of the account's functions from the API."""


class Webhooks(Construct):
    """The FIFO queue `baton-<stage>-webhooks.fifo`; `...-webhooks-dead.fifo` has what crashed the deliverer."""

    def __init__(self, scope: Construct, id_: str, *, stage: Stage, functions: Mapping[str, lambda_.Function]) -> None:
        super().__init__(scope, id_)
        self.dead = self._queue("Dead", f"{stage.prefix}webhooks-dead.fifo", Duration.days(14))
        acknowledge(self.dead, "SQS3", DEAD_LETTERS)
        self.line = self._queue(
            "Line",
            f"{stage.prefix}webhooks.fifo",
            KEPT,
            sqs.DeadLetterQueue(queue=self.dead, max_receive_count=MAX_RECEIVES),
        )
        for name, access in ACCESS.items():
            if access.line:
                functions[name].add_environment("BATON_WEBHOOK_LINE", self.line.queue_url)
                allow(functions[name], "sqs", access.line, self.line.queue_arn)
        deliverer = functions["deliverer"]
        feed = lambda_.EventSourceMapping(
            self,
            "Feed",
            target=deliverer,
            event_source_arn=self.line.queue_arn,
            # One at a time: what waits behind a failed delivery in its group does not count as tried.
            batch_size=1,
            report_batch_item_failures=True,
            max_concurrency=AT_ONCE,
        )
        # Lambda tries the role's rights on the queue when the mapping is made.
        if deliverer.role is not None:
            feed.node.add_dependency(deliverer.role)

    def _queue(self, id_: str, name: str, kept: Duration, dead: sqs.DeadLetterQueue | None = None) -> sqs.Queue:
        return sqs.Queue(
            self,
            id_,
            queue_name=name,
            fifo=True,
            encryption=sqs.QueueEncryption.SQS_MANAGED,
            enforce_ssl=True,
            retention_period=kept,
            # Six times the function's, as Lambda's documentation advises.
            visibility_timeout=Duration.seconds(6 * TIMEOUT_S),
            dead_letter_queue=dead,
            removal_policy=RemovalPolicy.DESTROY,
        )
