"""Tables and buckets, which outlive the stack unless the stage is disposable."""

from __future__ import annotations

from aws_cdk import Duration, RemovalPolicy, Tags
from aws_cdk import aws_dynamodb as dynamodb
from aws_cdk import aws_s3 as s3
from constructs import Construct

from baton.contract.names import BUCKETS, CHECKPOINTS_BUCKET, DATA_BUCKET
from cdk.resources.nag_suppressions import ACCESS_LOGS, acknowledge
from cdk.stage import READY_SHARDS_TAG, StageSettings
from functions.storage.s3.object_headers import EXPIRING_TAG
from functions.storage.tables import JOBS, TABLES, KeySchema

ABANDONED_UPLOAD_DAYS = 7
CORS_MAX_AGE_S = 3600
"""Time for which a browser may keep the answer of a bucket about its permission."""
_TYPES = {"S": dynamodb.AttributeType.STRING, "N": dynamodb.AttributeType.NUMBER}
_PROJECTIONS = {"ALL": dynamodb.ProjectionType.ALL, "KEYS_ONLY": dynamodb.ProjectionType.KEYS_ONLY}


class Tables(Construct):
    """The tables of functions/storage/tables.py, by suffix: `by_suffix["jobs"]`."""

    def __init__(self, scope: Construct, id_: str, *, stage: StageSettings) -> None:
        super().__init__(scope, id_)
        self.by_suffix: dict[str, dynamodb.Table] = {}
        for table in TABLES:
            partition, sort = _keys(table.key)
            made = dynamodb.Table(
                self,
                table.suffix.capitalize(),
                table_name=table.name(stage.prefix),
                partition_key=partition,
                sort_key=sort,
                billing_mode=dynamodb.BillingMode.PAY_PER_REQUEST,
                time_to_live_attribute=table.ttl_attribute,
                stream=dynamodb.StreamViewType.NEW_IMAGE if table.stream else None,
                point_in_time_recovery_specification=dynamodb.PointInTimeRecoverySpecification(
                    point_in_time_recovery_enabled=True
                ),
                deletion_protection=not stage.disposable,
                removal_policy=RemovalPolicy.DESTROY if stage.disposable else RemovalPolicy.RETAIN,
            )
            for index in table.indexes:
                partition, sort = _keys(index.key)
                made.add_global_secondary_index(
                    index_name=index.name,
                    partition_key=partition,
                    sort_key=sort,
                    projection_type=_PROJECTIONS[index.projection],
                )
            self.by_suffix[table.suffix] = made
        if stage.ready_shards > 1:
            Tags.of(self.by_suffix[JOBS.suffix]).add(READY_SHARDS_TAG, str(stage.ready_shards))


class Buckets(Construct):
    """The two buckets by their names in the API. `by_name` is empty if the stage has its own object store."""

    def __init__(self, scope: Construct, id_: str, *, stage: StageSettings) -> None:
        super().__init__(scope, id_)
        self.by_name: dict[str, s3.Bucket] = {}
        self.physical_names = {DATA_BUCKET: stage.data_bucket, CHECKPOINTS_BUCKET: stage.checkpoints_bucket}
        if not stage.has_own_store:
            self.by_name = {name: self._bucket(name, stage) for name in BUCKETS}
            self.physical_names = {name: bucket.bucket_name for name, bucket in self.by_name.items()}

    def permit_reads_from(self, origin: str) -> None:
        """Let pages of an origin GET objects by presigned URLs; a browser hides the answers from all other pages.

        A download that the console verifies needs the permission; pictures and links need none. The download of a
        checkpoint's file reads ranges, for which some browsers need a permission of their own.
        """
        for bucket in self.by_name.values():
            bucket.add_cors_rule(
                allowed_methods=[s3.HttpMethods.GET],
                allowed_headers=["range"],
                allowed_origins=[origin],
                max_age=CORS_MAX_AGE_S,
            )

    def _bucket(self, name: str, stage: StageSettings) -> s3.Bucket:
        bucket = s3.Bucket(
            self,
            "".join(word.capitalize() for word in name.split("-")),
            # No physical name: bucket names are globally unique.
            block_public_access=s3.BlockPublicAccess.BLOCK_ALL,
            encryption=s3.BucketEncryption.S3_MANAGED,
            enforce_ssl=True,
            minimum_tls_version=1.2,
            object_ownership=s3.ObjectOwnership.BUCKET_OWNER_ENFORCED,
            # A failed first deployment deletes its buckets, because the next deployment cannot adopt unnamed buckets.
            removal_policy=RemovalPolicy.DESTROY if stage.disposable else RemovalPolicy.RETAIN_ON_UPDATE_OR_DELETE,
            lifecycle_rules=[
                s3.LifecycleRule(
                    id="abandoned-uploads",
                    abort_incomplete_multipart_upload_after=Duration.days(ABANDONED_UPLOAD_DAYS),
                ),
                *_sample_expiry(name, stage),
            ],
        )
        acknowledge(bucket, "S1", ACCESS_LOGS)
        return bucket


def _sample_expiry(name: str, stage: StageSettings) -> list[s3.LifecycleRule]:
    """Return the expiry rule for ring samples that no maintenance deletes."""
    if name != DATA_BUCKET or not stage.ring_sample_days:
        return []
    key, value = EXPIRING_TAG
    return [
        s3.LifecycleRule(id="ring-samples", expiration=Duration.days(stage.ring_sample_days), tag_filters={key: value})
    ]


def _keys(schema: KeySchema) -> tuple[dynamodb.Attribute, dynamodb.Attribute | None]:
    partition = dynamodb.Attribute(name=schema.partition, type=dynamodb.AttributeType.STRING)
    if schema.sort is None:
        return partition, None
    return partition, dynamodb.Attribute(name=schema.sort, type=_TYPES[schema.sort_type])
