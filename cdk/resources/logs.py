"""Log groups with the stage in the name and a limited retention."""

from __future__ import annotations

from aws_cdk import RemovalPolicy
from aws_cdk import aws_logs as logs
from constructs import Construct

from cdk.stage import StageSettings

RETENTION = {
    1: logs.RetentionDays.ONE_DAY,
    7: logs.RetentionDays.ONE_WEEK,
    14: logs.RetentionDays.TWO_WEEKS,
    30: logs.RetentionDays.ONE_MONTH,
    90: logs.RetentionDays.THREE_MONTHS,
    180: logs.RetentionDays.SIX_MONTHS,
    365: logs.RetentionDays.ONE_YEAR,
}
"""CDK's retention by `StageSettings.log_retention_days`."""


def log_group(scope: Construct, id_: str, *, stage: StageSettings, service: str, name: str) -> logs.LogGroup:
    """Create `/aws/<service>/baton-<stage>-<name>`; the log group is deleted with the stack."""
    return logs.LogGroup(
        scope,
        id_,
        log_group_name=f"/aws/{service}/{stage.prefix}{name}",
        retention=RETENTION[stage.log_retention_days],
        removal_policy=RemovalPolicy.DESTROY,
    )
