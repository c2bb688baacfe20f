"""Alarms of a stage, and a dashboard."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from aws_cdk import Duration, Stack
from aws_cdk import aws_apigatewayv2 as gateway
from aws_cdk import aws_cloudwatch as cloudwatch
from aws_cdk import aws_cloudwatch_actions as actions
from aws_cdk import aws_dynamodb as dynamodb
from aws_cdk import aws_iam as iam
from aws_cdk import aws_lambda as lambda_
from aws_cdk import aws_sns as sns
from aws_cdk import aws_sns_subscriptions as subscriptions
from aws_cdk import aws_sqs as sqs
from constructs import Construct

from cdk.stage import StageSettings
from functions.api.operations.cloudwatch_metrics import DIMENSION, NAMESPACE, UNITS
from functions.storage.tables import TABLES

PERIOD = Duration.minutes(5)
ALARMS = {
    "DeadAttempts": (
        "Sum",
        20,
        "more than 20 attempts lost their machines within 5 minutes: a provider, or our network",
    ),
    "JobsFailed": ("Sum", 0, "a job has failed for good: GET /jobs?status=failed, and its events say why"),
    "QueueAge": (
        "Maximum",
        1800,
        "a job has waited for more than 30 minutes: no worker asks for its queue, or none suits",
    ),
    "FleetTicksUnfinished": (
        "Sum",
        3,
        "ticks of the fleets' controller have not looked after every machine for 5 minutes: log of the function fleet",
    ),
    "FleetUnknownStatuses": (
        "Maximum",
        0,
        "a provider gives a machine a status that Baton does not know: log of the function fleet, then update Baton",
    ),
    "HeartbeatLag": (
        "Maximum",
        300,
        "a lease ran out more than 5 minutes ago and its job was not taken back: sweeper's log",
    ),
}
"""Alarms on Baton's metrics (functions/api/operations/cloudwatch_metrics.py): statistic, threshold, description."""
FLEET = tuple(name for name in UNITS if name.startswith("Fleet"))
"""Metrics of rented machines."""


class Alarms(Construct):
    """Alarms that notify the stage's e-mail address, if any, through a topic."""

    def __init__(
        self,
        scope: Construct,
        id_: str,
        *,
        stage: StageSettings,
        api: gateway.HttpApi,
        functions: Mapping[str, lambda_.Function],
        tables: Mapping[str, dynamodb.Table],
    ) -> None:
        super().__init__(scope, id_)
        self._prefix = stage.prefix
        self._action = _to_email(self, stage.alarm_email) if stage.alarm_email else None
        server_errors = api.metric_server_error(period=PERIOD, statistic="Sum")
        self._alarm(
            "ServerErrors", server_errors, above=5, description="the API answered 5xx more than 5 times in 5 minutes"
        )
        for name, function in functions.items():
            self._alarm(
                f"{name.capitalize()}Errors",
                function.metric_errors(period=PERIOD, statistic="Sum"),
                above=0,
                description=f"the function {name} raised: see its log",
            )
            self._alarm(
                f"{name.capitalize()}Throttles",
                function.metric_throttles(period=PERIOD, statistic="Sum"),
                above=0,
                description=f"Lambda refused to start {name}: raise the account's concurrency",
            )
        self._alarm(
            "SweeperSilent",
            functions["sweeper"].metric_invocations(period=PERIOD, statistic="Sum"),
            below=1,
            description="nobody returns the jobs of lost machines: the schedule is off",
        )
        # `FleetErrors` reports ticks that raised or timed out, `FleetTicksUnfinished` ticks that ended early.
        # The metric exists only during an outage, therefore an idle deployment pays for the alarm alone.
        self._alarm(
            "FleetSilent",
            functions["fleet"].metric_invocations(period=PERIOD, statistic="Sum"),
            below=1,
            description="nobody gives rented machines back: the schedule is off",
        )
        for place, kind, throttled in _throttled(tables):
            self._alarm(
                f"{''.join(word.capitalize() for word in re.split('[/_]', place))}{kind}Throttled",
                throttled,
                above=0,
                description=f"DynamoDB refused {kind.lower()} of the table or index {place}: a partition is too hot",
            )
        for name, (statistic, above, description) in ALARMS.items():
            self._alarm(name, _metric(stage, name, statistic), above=above, description=description)
        _dashboard(self, stage, api, functions, tables)

    def watch_events(self, publisher: lambda_.Function, dead_letters: sqs.Queue) -> None:
        """Add alarms on late events and on dead letters."""
        self._alarm(
            "EventsLate",
            publisher.metric("IteratorAge", period=PERIOD, statistic="Maximum"),
            above=PERIOD.to_milliseconds(),
            description="jobs' events wait for 5 minutes and more: see the publisher's log;"
            " after 12 hours they are given up",
        )
        self._alarm(
            "EventsDead",
            dead_letters.metric_approximate_number_of_messages_visible(period=PERIOD, statistic="Maximum"),
            above=0,
            description=f"an event was not published: look into the queue {self._prefix}dead-letters",
        )

    def watch_webhooks(self, dead: sqs.Queue) -> None:
        """Add an alarm on deliveries that crash the deliverer; a failing webhook is its owner's responsibility."""
        self._alarm(
            "WebhooksDead",
            dead.metric_approximate_number_of_messages_visible(period=PERIOD, statistic="Maximum"),
            above=0,
            description="a webhook's delivery was given up by Lambda:"
            f" look into the queue {self._prefix}webhooks-dead.fifo",
        )

    def _alarm(
        self,
        id_: str,
        metric: cloudwatch.IMetric,
        *,
        description: str,
        above: float | None = None,
        below: float | None = None,
    ) -> None:
        operators = cloudwatch.ComparisonOperator
        alarm = cloudwatch.Alarm(
            self,
            id_,
            alarm_name=f"{self._prefix}{id_}",
            alarm_description=description,
            metric=metric,
            threshold=above if above is not None else below or 0,
            comparison_operator=operators.GREATER_THAN_THRESHOLD
            if above is not None
            else operators.LESS_THAN_THRESHOLD,
            evaluation_periods=1,
            treat_missing_data=(
                cloudwatch.TreatMissingData.NOT_BREACHING
                if above is not None
                else cloudwatch.TreatMissingData.BREACHING
            ),
        )
        if self._action is not None:
            alarm.add_alarm_action(self._action)
            alarm.add_ok_action(self._action)


def _to_email(scope: Construct, address: str) -> actions.SnsAction:
    topic = sns.Topic(scope, "Topic", enforce_ssl=True)
    # `enforce_ssl` gives the topic a policy, which replaces the default policy that admits alarms.
    topic.add_to_resource_policy(
        iam.PolicyStatement(
            actions=["sns:Publish"],
            principals=[iam.ServicePrincipal("cloudwatch.amazonaws.com")],
            resources=[topic.topic_arn],
            conditions={"StringEquals": {"aws:SourceAccount": Stack.of(scope).account}},
        )
    )
    topic.add_subscription(subscriptions.EmailSubscription(address))
    return actions.SnsAction(topic)


def _metric(stage: StageSettings, name: str, statistic: str) -> cloudwatch.Metric:
    return cloudwatch.Metric(
        namespace=NAMESPACE,
        metric_name=name,
        dimensions_map={DIMENSION: stage.name},
        statistic=statistic,
        period=PERIOD,
    )


def _throttled(tables: Mapping[str, dynamodb.Table]) -> Iterator[tuple[str, str, cloudwatch.Metric]]:
    """Yield table or index, kind and metric; the metrics of a table do not include its indexes."""
    for described in TABLES:
        table = tables[described.suffix]
        for index in (None, *(index.name for index in described.indexes)):
            dimensions = {"TableName": table.table_name} | ({"GlobalSecondaryIndexName": index} if index else {})
            for kind in ("Read", "Write"):
                metric = cloudwatch.Metric(
                    namespace="AWS/DynamoDB",
                    metric_name=f"{kind}ThrottleEvents",
                    dimensions_map=dimensions,
                    statistic="Sum",
                    period=PERIOD,
                )
                yield f"{described.suffix}/{index}" if index else described.suffix, f"{kind}s", metric


def _dashboard(
    scope: Construct,
    stage: StageSettings,
    api: gateway.HttpApi,
    functions: Mapping[str, lambda_.Function],
    tables: Mapping[str, dynamodb.Table],
) -> None:
    board = cloudwatch.Dashboard(scope, "Dashboard", dashboard_name=f"baton-{stage.name}")
    board.add_widgets(
        cloudwatch.GraphWidget(
            title="Requests, refusals, failures",
            left=[api.metric_count(), api.metric_client_error(), api.metric_server_error()],
        ),
        cloudwatch.GraphWidget(
            title="Attempts that ended",
            left=[_metric(stage, name, "Sum") for name, unit in UNITS.items() if unit == "Count" and name not in FLEET],
        ),
        cloudwatch.GraphWidget(
            title="Seconds that jobs wait, and that leases are overdue",
            left=[_metric(stage, name, "Maximum") for name, unit in UNITS.items() if unit == "Seconds"],
        ),
        cloudwatch.GraphWidget(
            title="Rented machines, and USD an hour",
            left=[_metric(stage, name, "Maximum") for name in FLEET],
        ),
    )
    board.add_widgets(
        cloudwatch.GraphWidget(
            title="Latency", left=[api.metric_latency(statistic=statistic) for statistic in ("p50", "p99")]
        ),
    )
    board.add_widgets(
        cloudwatch.GraphWidget(title="Duration", left=[f.metric_duration(statistic="p99") for f in functions.values()]),
        cloudwatch.GraphWidget(
            title="Errors and throttles",
            left=[f.metric_errors() for f in functions.values()],
            right=[f.metric_throttles() for f in functions.values()],
        ),
        cloudwatch.GraphWidget(
            title="DynamoDB",
            left=[table.metric("ConsumedWriteCapacityUnits", statistic="Sum") for table in tables.values()],
            right=[metric for _, _, metric in _throttled(tables)],
        ),
    )
