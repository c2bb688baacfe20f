"""The Lambda functions: one for each privilege group, each with its own role and log group."""

from __future__ import annotations

from collections.abc import Sequence

from aws_cdk import ArnFormat, Duration, Stack
from aws_cdk import aws_iam as iam
from aws_cdk import aws_lambda as lambda_
from constructs import Construct

from baton.contract.names import CHECKPOINTS_BUCKET, DATA_BUCKET
from cdk.bundling import code, python_version
from cdk.resources.access import ACCESS, BUCKET_ACTIONS, STORE_SECRET, TAGGING, FunctionAccess
from cdk.resources.logs import log_group
from cdk.resources.nag_suppressions import OBJECTS, RUNTIME, acknowledge, acknowledge_wildcard
from cdk.resources.storage import Buckets, Tables
from cdk.stage import DEFAULT_STORE_REGION, StageSettings
from functions.domain.checkpoints.packs import FUNCTION_TIMEOUT_S, SWEEPER_TIMEOUT_S

MEMORY_MIB = 512
"""Lambda assigns CPU in proportion to memory; with less memory a cold start takes seconds."""
SCHEDULED = ("sweeper", "fleet")
"""Functions that a schedule invokes each minute. The next invocation replaces a retry."""
TIMEOUT_S = FUNCTION_TIMEOUT_S
"""Below the timeout of API Gateway, 30 s, so that the caller receives the error of the API."""


class Functions(Construct):
    """The functions by the name of their module in functions/handlers: `by_name["worker"]`."""

    def __init__(self, scope: Construct, id_: str, *, stage: StageSettings, tables: Tables, buckets: Buckets) -> None:
        super().__init__(scope, id_)
        bundle = code(stage.target)
        runtime = lambda_.Runtime(f"python{python_version(stage.target)}", lambda_.RuntimeFamily.PYTHON)
        environment = {
            "BATON_STAGE": stage.name,
            "BATON_TABLE_PREFIX": stage.prefix,
            "BATON_DATA_BUCKET": buckets.physical_names[DATA_BUCKET],
            "BATON_CHECKPOINTS_BUCKET": buckets.physical_names[CHECKPOINTS_BUCKET],
            "BATON_ORIGINAL_PROGRESS_S": str(stage.original_progress_s),
            **_own_store(stage),
            **({"BATON_READY_SHARDS": str(stage.ready_shards)} if stage.ready_shards > 1 else {}),
            **({} if stage.s3_multipart else {"BATON_MULTIPART": "false"}),
            **({"BATON_SAMPLES_EXPIRE": "true"} if stage.ring_sample_days else {}),
            **({"BATON_FLEET_BUDGET": stage.fleet_budget} if stage.fleet_budget else {}),
        }
        self.by_name: dict[str, lambda_.Function] = {}
        for name, access in ACCESS.items():
            log = log_group(self, f"{name.capitalize()}Log", stage=stage, service="lambda", name=name)
            role = iam.Role(self, f"{name.capitalize()}Role", assumed_by=iam.ServicePrincipal("lambda.amazonaws.com"))
            log.grant_write(role)
            _grant(role, access, tables, buckets)
            if name == "rings" and stage.ring_sample_days:
                allow(role, "s3", TAGGING, buckets.by_name[DATA_BUCKET].arn_for_objects(access.objects))
            if stage.has_own_store and access.buckets:
                allow(role, "secretsmanager", STORE_SECRET, _secret_arn(self, stage.s3_secret))
            allow(role, "secretsmanager", access.provider_secret, _secret_arn(self, stage.provider_secret))
            self.by_name[name] = lambda_.Function(
                self,
                name.capitalize(),
                function_name=f"{stage.prefix}{name}",
                code=bundle,
                handler=f"functions.handlers.{name}.handler",
                runtime=runtime,
                architecture=lambda_.Architecture.ARM_64 if stage.target == "lambda" else lambda_.Architecture.X86_64,
                memory_size=MEMORY_MIB,
                timeout=Duration.seconds(SWEEPER_TIMEOUT_S if name in SCHEDULED else TIMEOUT_S),
                environment=environment
                | ({"BATON_PROVIDER_SECRET": stage.provider_secret} if access.provider_secret else {}),
                role=role,
                log_group=log,
                # Retries of Lambda for asynchronous calls.
                retry_attempts=0 if name in SCHEDULED else None,
                # Lambda keeps a call that cannot start for 6 hours by default, and would start all kept calls at once.
                max_event_age=Duration.minutes(1) if name in SCHEDULED else None,
            )
            acknowledge(self.by_name[name], "L1", RUNTIME)


def _grant(role: iam.Role, access: FunctionAccess, tables: Tables, buckets: Buckets) -> None:
    for place, actions in access.tables.items():
        suffix, _, index = place.partition("/")
        arn = tables.by_suffix[suffix].table_arn
        allow(role, "dynamodb", actions, f"{arn}/index/{index}" if index else arn)
    for bucket_name, bucket in buckets.by_name.items():
        if bucket_name not in access.buckets:
            continue
        actions = access.buckets[bucket_name]
        allow(role, "s3", [action for action in actions if action in BUCKET_ACTIONS], bucket.bucket_arn)
        for pattern in dict.fromkeys((access.objects, access.written or access.objects)):
            allow(
                role,
                "s3",
                [
                    action
                    for action in actions
                    if action not in BUCKET_ACTIONS and _key_pattern(access, action) == pattern
                ],
                bucket.arn_for_objects(pattern),
            )
            acknowledge_wildcard(role, bucket, f"/{pattern}", OBJECTS)


def _key_pattern(access: FunctionAccess, action: str) -> str:
    return access.written or access.objects if action == "PutObject" else access.objects


def _own_store(stage: StageSettings) -> dict[str, str]:
    """Return the settings of the stage's own object store; empty if the stage uses buckets of AWS."""
    if not stage.has_own_store:
        return {}
    return {
        "BATON_S3_ENDPOINT": stage.s3_endpoint,
        "BATON_S3_REGION": stage.s3_region or DEFAULT_STORE_REGION,
        "BATON_S3_SECRET": stage.s3_secret,
    }


def _secret_arn(scope: Construct, name: str) -> str:
    """Return the ARN pattern of a secret; Secrets Manager appends six characters to the name."""
    return Stack.of(scope).format_arn(
        service="secretsmanager",
        resource="secret",
        resource_name=f"{name}-??????",
        arn_format=ArnFormat.COLON_RESOURCE_NAME,
    )


def allow(grantee: iam.IGrantable, service: str, actions: Sequence[str], resource: str) -> None:
    """Permit actions on a resource to a role, or to the role of a function."""
    if actions:
        grantee.grant_principal.add_to_principal_policy(
            iam.PolicyStatement(actions=[f"{service}:{action}" for action in actions], resources=[resource])
        )
