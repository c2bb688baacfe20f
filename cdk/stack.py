"""The stack of a stage, composed of the constructs in cdk/resources."""

from __future__ import annotations

from aws_cdk import CfnOutput, Duration, Stack, Tags
from aws_cdk import aws_scheduler as scheduler
from aws_cdk import aws_scheduler_targets as targets
from constructs import Construct

from baton.contract.worker.lease_grace import SWEEP_INTERVAL_S
from cdk.resources.alarms import Alarms
from cdk.resources.api import Api
from cdk.resources.events import Events
from cdk.resources.functions import Functions
from cdk.resources.nag_suppressions import VERSIONS, acknowledge_wildcard
from cdk.resources.nudges import Nudges
from cdk.resources.storage import Buckets, Tables
from cdk.resources.webhooks import Webhooks
from cdk.stage import StageSettings
from functions.api.operations.service_probe import PROBED_PATH

SWEEP_INTERVAL = Duration.seconds(SWEEP_INTERVAL_S)
SCHEDULES = (
    ("sweeper", "Sweep", "Returns the jobs of lost machines to their queues"),
    ("fleet", "Fleet", "Rents the machines that fleets lack, and gives machines back"),
)
"""Functions that run once a minute, with the id and the description of the schedule."""


class BatonStack(Stack):
    """All resources of one stage. The synthesis reads nothing from AWS and needs no account."""

    def __init__(self, scope: Construct, id_: str, *, stage: StageSettings) -> None:
        super().__init__(
            scope, id_, stack_name=f"baton-{stage.name}", description="Baton: training jobs for GPUs that may vanish"
        )
        tables = Tables(self, "Tables", stage=stage)
        buckets = Buckets(self, "Buckets", stage=stage)
        functions = Functions(self, "Functions", stage=stage, tables=tables, buckets=buckets)
        events = Events(self, "Events", stage=stage, publisher=functions.by_name["publisher"], tables=tables.by_suffix)
        Nudges(self, "Nudges", controller=functions.by_name["fleet"], tables=tables.by_suffix)
        api = Api(self, "Api", stage=stage, functions=functions.by_name)
        buckets.permit_reads_from(api.url)
        if stage.target == "lambda":
            # The URL of the API is valid on AWS only; the emulated cloud has a URL of its own.
            functions.by_name["sweeper"].add_environment("BATON_PROBE_URL", f"{api.url}{PROBED_PATH}")
            functions.by_name["fleet"].add_environment("BATON_FLEET_API_URL", api.url)
        for name, schedule, description in SCHEDULES:
            scheduler.Schedule(
                self,
                schedule,
                schedule_name=f"{stage.prefix}{schedule.lower()}",
                description=description,
                schedule=scheduler.ScheduleExpression.rate(SWEEP_INTERVAL),
                # The next minute's call continues after a failed call, so retries would only accumulate.
                target=targets.LambdaInvoke(functions.by_name[name], retry_attempts=0),
            )
            # CDK creates the role of the schedule under the stack instead of the schedule.
            acknowledge_wildcard(self, functions.by_name[name], ":*", VERSIONS)
        alarms = Alarms(self, "Alarms", stage=stage, api=api.http, functions=functions.by_name, tables=tables.by_suffix)
        alarms.watch_events(functions.by_name["publisher"], events.dead_letters)
        alarms.watch_webhooks(Webhooks(self, "Webhooks", stage=stage, functions=functions.by_name).dead)
        Tags.of(self).add("baton-stage", stage.name)
        CfnOutput(self, "Url", value=api.url, description="The API's address, for users and workers")
        CfnOutput(self, "TablePrefix", value=stage.prefix)
        CfnOutput(self, "EventBus", value=events.bus.event_bus_name, description="What happens to jobs is told here")
        for name, physical_name in buckets.physical_names.items():
            CfnOutput(self, "".join(word.capitalize() for word in name.split("-")), value=physical_name)
