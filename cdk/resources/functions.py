"""The Lambda functions: one for each privilege group, each with a role and a log of its own."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from aws_cdk import ArnFormat, Duration, Stack
from aws_cdk import aws_iam as iam
from aws_cdk import aws_lambda as lambda_
from constructs import Construct

from cdk.bundling import PYTHON_VERSION, code
from cdk.resources.access import ACCESS, OF_BUCKET, STORE_SECRET, TAGGING, Access
from cdk.resources.logs import log_group
from cdk.resources.nag_suppressions import OBJECTS, RUNTIME, acknowledge, acknowledge_wildcard
from cdk.resources.storage import CHECKPOINTS, DATA, Buckets, Tables
from cdk.stage import DEFAULT_STORE_REGION, Stage
from functions.domain.packs import FUNCTION_TIMEOUT_S, SWEEPER_TIMEOUT_S

MEMORY_MIB = 512
"""Lambda gives CPU by memory; with less, importing takes seconds."""
TIMEOUT_S = FUNCTION_TIMEOUT_S
"""Below the 30 s after which API Gateway gives up: the caller hears of it from us."""


class Functions(Construct):
    """`by_name["worker"]`, as in functions/handlers."""

    def __init__(self, scope: Construct, id_: str, *, stage: Stage, tables: Tables, buckets: Buckets) -> None:
        super().__init__(scope, id_)
        bundle = code(stage.target)
        environment = {
            "BATON_STAGE": stage.name,
            "BATON_TABLE_PREFIX": stage.prefix,
            "BATON_DATA_BUCKET": buckets.physical_names[DATA],
            "BATON_CHECKPOINTS_BUCKET": buckets.physical_names[CHECKPOINTS],
            "BATON_ORIGINAL_PROGRESS_S": str(stage.original_progress_s),
            **_own_store(stage),
            **({"BATON_READY_SHARDS": str(stage.ready_shards)} if stage.ready_shards > 1 else {}),
            **({} if stage.s3_multipart else {"BATON_MULTIPART": "false"}),
            **({"BATON_SAMPLES_EXPIRE": "true"} if stage.ring_sample_days else {}),
        }
        self.by_name: dict[str, lambda_.Function] = {}
        for name, access in ACCESS.items():
            log = log_group(self, f"{name.capitalize()}Log", stage=stage, service="lambda", name=name)
            role = iam.Role(self, f"{name.capitalize()}Role", assumed_by=iam.ServicePrincipal("lambda.amazonaws.com"))
            log.grant_write(role)
            _grant(role, access, tables, buckets)
            if name == "rings" and stage.ring_sample_days:
                _allow(role, "s3", TAGGING, buckets.by_name[DATA].arn_for_objects(access.objects))
            if stage.has_own_store and access.buckets:
                _allow(role, "secretsmanager", STORE_SECRET, _secret_arn(self, stage.s3_secret))
            self.by_name[name] = lambda_.Function(
                self,
                name.capitalize(),
                function_name=f"{stage.prefix}{name}",
                code=bundle,
                handler=f"functions.handlers.{name}.handler",
                runtime=_runtime(stage),
                architecture=lambda_.Architecture.ARM_64 if stage.target == "lambda" else lambda_.Architecture.X86_64,
                memory_size=MEMORY_MIB,
                timeout=Duration.seconds(SWEEPER_TIMEOUT_S if name == "sweeper" else TIMEOUT_S),
                environment=environment,
                role=role,
                log_group=log,
                # Lambda's own repeats, of a call for which nobody waits: the next minute's sweep is one.
                retry_attempts=0 if name == "sweeper" else None,
            )
            acknowledge(self.by_name[name], "L1", RUNTIME)


def _runtime(stage: Stage) -> lambda_.Runtime:
    version = PYTHON_VERSION if stage.target == "lambda" else f"{sys.version_info.major}.{sys.version_info.minor}"
    return lambda_.Runtime(f"python{version}", lambda_.RuntimeFamily.PYTHON)


def _grant(role: iam.Role, access: Access, tables: Tables, buckets: Buckets) -> None:
    for place, actions in access.tables.items():
        suffix, _, index = place.partition("/")
        arn = tables.by_suffix[suffix].table_arn
        _allow(role, "dynamodb", actions, f"{arn}/index/{index}" if index else arn)
    for bucket_name, bucket in buckets.by_name.items():
        if bucket_name not in access.buckets:
            continue
        actions = access.buckets[bucket_name]
        _allow(role, "s3", [action for action in actions if action in OF_BUCKET], bucket.bucket_arn)
        _allow(
            role,
            "s3",
            [action for action in actions if action not in OF_BUCKET],
            bucket.arn_for_objects(access.objects),
        )
        acknowledge_wildcard(role, bucket, f"/{access.objects}", OBJECTS)


def _own_store(stage: Stage) -> dict[str, str]:
    """Settings for a store that is not AWS's: none where it is."""
    if not stage.has_own_store:
        return {}
    return {
        "BATON_S3_ENDPOINT": stage.s3_endpoint,
        "BATON_S3_REGION": stage.s3_region or DEFAULT_STORE_REGION,
        "BATON_S3_SECRET": stage.s3_secret,
    }


def _secret_arn(scope: Construct, name: str) -> str:
    """Secrets Manager puts six characters of its own behind the name."""
    return Stack.of(scope).format_arn(
        service="secretsmanager",
        resource="secret",
        resource_name=f"{name}-??????",
        arn_format=ArnFormat.COLON_RESOURCE_NAME,
    )


def _allow(role: iam.Role, service: str, actions: Sequence[str], resource: str) -> None:
    if actions:
        role.add_to_policy(
            iam.PolicyStatement(actions=[f"{service}:{action}" for action in actions], resources=[resource])
        )
