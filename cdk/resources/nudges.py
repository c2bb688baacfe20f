"""Feeds of the fleets' controller: the writes after which a tick follows at once."""

from __future__ import annotations

import json
from collections.abc import Mapping

from aws_cdk import Duration
from aws_cdk import aws_dynamodb as dynamodb
from aws_cdk import aws_lambda as lambda_
from constructs import Construct

from cdk.resources.access import ACCESS
from cdk.resources.functions import allow
from functions.storage.stream import NUDGES

BATCH_RECORDS = 1000
WINDOW = Duration.seconds(2)
"""Time in which Lambda gathers writes, so that many jobs submitted at once cause one tick."""
LATEST_AFTER = Duration.minutes(1)
"""Age of a write at which the scheduled tick has replaced the nudge."""


class Nudges(Construct):
    """The second and last reader of each shard that DynamoDB permits (docs/decisions/0023)."""

    def __init__(
        self, scope: Construct, id_: str, *, controller: lambda_.Function, tables: Mapping[str, dynamodb.Table]
    ) -> None:
        super().__init__(scope, id_)
        for suffix, filters in NUDGES.items():
            stream = str(tables[suffix].table_stream_arn)
            allow(controller, "dynamodb", ACCESS["fleet"].streams[suffix], stream)
            feed = lambda_.EventSourceMapping(
                self,
                suffix.capitalize(),
                target=controller,
                event_source_arn=stream,
                starting_position=lambda_.StartingPosition.TRIM_HORIZON,
                batch_size=BATCH_RECORDS,
                max_batching_window=WINDOW,
                filters=[{"pattern": json.dumps(one)} for one in filters],
                # The scheduled tick replaces a retry.
                retry_attempts=0,
                max_record_age=LATEST_AFTER,
            )
            # Lambda checks the role's permissions on the stream when CloudFormation creates the mapping.
            if controller.role is not None:
                feed.node.add_dependency(controller.role)
