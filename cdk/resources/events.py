"""Event bus, dead letters, and the publisher's feeds from the streams of the tables of jobs and fleets."""

from __future__ import annotations

import json
from collections.abc import Mapping

import jsii
from aws_cdk import Duration, RemovalPolicy
from aws_cdk import aws_dynamodb as dynamodb
from aws_cdk import aws_events as events
from aws_cdk import aws_lambda as lambda_
from aws_cdk import aws_sqs as sqs
from constructs import Construct

from cdk.resources.access import ACCESS
from cdk.resources.functions import allow
from cdk.resources.nag_suppressions import DEAD_LETTERS, acknowledge
from cdk.stage import StageSettings
from functions.storage.stream import FILTER

BATCH_RECORDS = 100
GIVE_UP_AFTER = Duration.hours(12)
"""Age at which a record becomes a dead letter. The stream keeps a record for 24 hours, so time remains for a repair."""
DEAD_LETTER_RETENTION = Duration.days(14)
FEEDS = (("Feed", "jobs"), ("FleetFeed", "fleet"))
"""Ids of the feeds, and the suffixes of the tables."""


class Events(Construct):
    """The bus `baton-<stage>`, for the rules of users, and the queue `baton-<stage>-dead-letters`."""

    def __init__(
        self,
        scope: Construct,
        id_: str,
        *,
        stage: StageSettings,
        publisher: lambda_.Function,
        tables: Mapping[str, dynamodb.Table],
    ) -> None:
        super().__init__(scope, id_)
        self.bus = events.EventBus(
            self, "Bus", event_bus_name=stage.bus, description="Every transition of every job and machine"
        )
        self.dead_letters = sqs.Queue(
            self,
            "DeadLetters",
            queue_name=f"{stage.prefix}dead-letters",
            encryption=sqs.QueueEncryption.SQS_MANAGED,
            enforce_ssl=True,
            retention_period=DEAD_LETTER_RETENTION,
            removal_policy=RemovalPolicy.DESTROY,
        )
        acknowledge(self.dead_letters, "SQS3", DEAD_LETTERS)
        publisher.add_environment("BATON_EVENT_BUS", stage.bus)
        publisher.add_environment("BATON_DEAD_LETTERS", self.dead_letters.queue_url)
        access = ACCESS["publisher"]
        allow(publisher, "events", access.bus, self.bus.event_bus_arn)
        allow(publisher, "sqs", access.dead_letters, self.dead_letters.queue_arn)
        for id_of_feed, suffix in FEEDS:
            self._feed(id_of_feed, publisher, tables[suffix], suffix)

    def _feed(self, id_: str, publisher: lambda_.Function, table: dynamodb.Table, suffix: str) -> None:
        """Let Lambda invoke the publisher with the new events of a table."""
        stream = str(table.table_stream_arn)
        allow(publisher, "dynamodb", ACCESS["publisher"].streams[suffix], stream)
        feed = lambda_.EventSourceMapping(
            self,
            id_,
            target=publisher,
            event_source_arn=stream,
            starting_position=lambda_.StartingPosition.TRIM_HORIZON,
            batch_size=BATCH_RECORDS,
            # Lambda invokes the publisher for new events only.
            filters=[{"pattern": json.dumps(FILTER)}],
            report_batch_item_failures=True,
            bisect_batch_on_error=True,
            max_record_age=GIVE_UP_AFTER,
            on_failure=_DeadLetterTarget(self.dead_letters),
        )
        # Lambda checks the role's permissions on the stream when CloudFormation creates the mapping.
        feed.node.add_dependency(publisher.role)


@jsii.implements(lambda_.IEventSourceDlq)
class _DeadLetterTarget:
    """Queue for the batches that Lambda abandons; grants no permission, since `access.py` lists all permissions."""

    def __init__(self, queue: sqs.Queue) -> None:
        self._queue = queue

    def bind(self, _target: lambda_.IEventSourceMapping, _handler: lambda_.IFunction) -> lambda_.DlqDestinationConfig:
        """Return the ARN of the queue."""
        return lambda_.DlqDestinationConfig(destination=self._queue.queue_arn)
