"""What becomes of jobs' transitions: the jobs table's stream, the publisher behind it, the bus, the dead letters."""

from __future__ import annotations

import json
from collections.abc import Sequence

import jsii
from aws_cdk import Duration, RemovalPolicy
from aws_cdk import aws_dynamodb as dynamodb
from aws_cdk import aws_events as events
from aws_cdk import aws_iam as iam
from aws_cdk import aws_lambda as lambda_
from aws_cdk import aws_sqs as sqs
from constructs import Construct

from cdk.resources.access import ACCESS
from cdk.resources.nag_suppressions import DEAD_LETTERS, acknowledge
from cdk.stage import Stage
from functions.storage.stream import FILTER

BATCH_RECORDS = 100
GIVE_UP_AFTER = Duration.hours(12)
"""A record that old becomes a dead letter. The stream keeps it for as long again: time to look, and to start over."""
DEAD_LETTERS_KEPT = Duration.days(14)


class Events(Construct):
    """The bus `baton-<stage>`, for everybody's rules, and the queue `baton-<stage>-dead-letters`."""

    def __init__(
        self, scope: Construct, id_: str, *, stage: Stage, publisher: lambda_.Function, jobs: dynamodb.Table
    ) -> None:
        super().__init__(scope, id_)
        self.bus = events.EventBus(self, "Bus", event_bus_name=stage.bus, description="Every transition of every job")
        self.dead_letters = sqs.Queue(
            self,
            "DeadLetters",
            queue_name=f"{stage.prefix}dead-letters",
            encryption=sqs.QueueEncryption.SQS_MANAGED,
            enforce_ssl=True,
            retention_period=DEAD_LETTERS_KEPT,
            removal_policy=RemovalPolicy.DESTROY,
        )
        acknowledge(self.dead_letters, "SQS3", DEAD_LETTERS)
        publisher.add_environment("BATON_EVENT_BUS", stage.bus)
        publisher.add_environment("BATON_DEAD_LETTERS", self.dead_letters.queue_url)
        access = ACCESS["publisher"]
        stream = str(jobs.table_stream_arn)
        allow(publisher, "dynamodb", access.streams["jobs"], stream)
        allow(publisher, "events", access.bus, self.bus.event_bus_arn)
        allow(publisher, "sqs", access.dead_letters, self.dead_letters.queue_arn)
        feed = lambda_.EventSourceMapping(
            self,
            "Feed",
            target=publisher,
            event_source_arn=stream,
            starting_position=lambda_.StartingPosition.TRIM_HORIZON,
            batch_size=BATCH_RECORDS,
            # For anything but a new event Lambda invokes nobody.
            filters=[{"pattern": json.dumps(FILTER)}],
            report_batch_item_failures=True,
            bisect_batch_on_error=True,
            max_record_age=GIVE_UP_AFTER,
            on_failure=_To(self.dead_letters),
        )
        # Lambda tries the role's rights on the stream when the mapping is made.
        feed.node.add_dependency(publisher.role)


def allow(function: lambda_.Function, service: str, actions: Sequence[str], resource: str) -> None:
    """Add to what a function's role may do."""
    function.add_to_role_policy(
        iam.PolicyStatement(actions=[f"{service}:{action}" for action in actions], resources=[resource])
    )


@jsii.implements(lambda_.IEventSourceDlq)
class _To:
    """What Lambda gives up goes to a queue. Grants nothing: cdk/resources/access.py does."""

    def __init__(self, queue: sqs.Queue) -> None:
        self._queue = queue

    def bind(self, _target: lambda_.IEventSourceMapping, _handler: lambda_.IFunction) -> lambda_.DlqDestinationConfig:
        """The queue's ARN."""
        return lambda_.DlqDestinationConfig(destination=self._queue.queue_arn)
