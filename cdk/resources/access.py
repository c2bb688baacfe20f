"""Permissions of each function's role. Tests compare the table with the requests that the functions send."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.contract.names import CHECKPOINTS_BUCKET, DATA_BUCKET


@dataclass(frozen=True, kw_only=True)
class FunctionAccess:
    """Permissions of one function: DynamoDB actions by table suffix or `<table>/<index>`, S3 actions by bucket.

    A transaction requires the actions of its parts. The S3 actions in `BUCKET_ACTIONS` apply to the bucket, the others
    to objects. Without `ListBucket` S3 answers 403 instead of 404 for a missing object. A presigned URL has the
    permissions of the function that signed the URL. Lambda reads the stream of a table with the permissions of the
    function.
    """

    tables: Mapping[str, tuple[str, ...]]
    buckets: Mapping[str, tuple[str, ...]]
    objects: str = "*"
    """IAM pattern of the object keys that the object actions apply to. Bucket actions apply to the whole bucket: with
    permission to list a part only, S3 answers 403 for a missing object."""
    written: str | None = None
    """IAM pattern of the only object keys that the function may put; None: `objects`."""
    streams: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """DynamoDB actions on the stream of a table, by table suffix."""
    bus: tuple[str, ...] = ()
    """EventBridge actions on the bus of the stage."""
    dead_letters: tuple[str, ...] = ()
    """SQS actions on the queue of unpublishable events."""
    provider_secret: tuple[str, ...] = ()
    """Secrets Manager actions on the one secret with the stage's accounts at providers."""
    delivery_queue: tuple[str, ...] = ()
    """SQS actions on the queue of webhook deliveries; Lambda performs some actions with the function's permissions."""


BUCKET_ACTIONS = ("ListBucket", "ListBucketMultipartUploads")
"""S3 actions whose resource is the bucket."""
STORE_SECRET = ("GetSecretValue",)
"""Secrets Manager actions on the secret of the stage's own object store. With such a store these actions replace the S3
actions: the store decides the permissions of its credentials. Functions without `buckets` may not read the secret."""
TAGGING = ("PutObjectTagging",)
"""S3 actions that the function which signs uploads of ring samples needs in addition if samples expire."""

STREAM_READS = ("DescribeStream", "GetRecords", "GetShardIterator", "ListStreams")
"""DynamoDB actions of Lambda on a stream, with the permissions of the function that the stream invokes."""

_PARTS = ("ListBucketMultipartUploads", "ListMultipartUploadParts")
_UPLOADS = ("AbortMultipartUpload", "DeleteObject", "GetObject", "ListBucket", "PutObject", *_PARTS)

ACCESS: Mapping[str, FunctionAccess] = {
    "authorizer": FunctionAccess(tables={"tokens": ("GetItem",), "heartbeats": ("GetItem",)}, buckets={}),
    "submitter": FunctionAccess(
        tables={
            "jobs": ("BatchGetItem", "DeleteItem", "GetItem", "PutItem", "Query", "UpdateItem"),
            "jobs/by_tenant": ("Query",),
            "jobs/by_state": ("Query",),
            "heartbeats": ("BatchGetItem", "GetItem", "UpdateItem"),
            "webhooks": ("GetItem",),
            "recipes": ("GetItem", "PutItem", "Query"),
            # The fleets of jobs that rent their own machines.
            "fleet": ("GetItem", "PutItem", "Query"),
        },
        buckets={CHECKPOINTS_BUCKET: ("GetObject", "ListBucket", "PutObject")},
        # Summaries of metric points.
        written="*/jobs/*/curves/*",
    ),
    "worker": FunctionAccess(
        tables={
            "jobs": ("BatchGetItem", "DeleteItem", "GetItem", "PutItem", "Query", "UpdateItem"),
            "jobs/ready": ("Query",),
            "jobs/timers": ("Query",),
            # The jobs of a group that a rule scales.
            "jobs/by_state": ("Query",),
            # BatchGetItem reads the leases of an elastic job's seats.
            "heartbeats": ("BatchGetItem", "ConditionCheckItem", "GetItem", "PutItem", "UpdateItem"),
        },
        buckets={
            DATA_BUCKET: ("GetObject", "ListBucket"),
            CHECKPOINTS_BUCKET: ("DeleteObject", "GetObject", "ListBucket", "PutObject", *_PARTS),
        },
    ),
    "transfer": FunctionAccess(
        tables={"tokens": ("DeleteItem", "GetItem", "PutItem"), "jobs": ("GetItem", "UpdateItem")},
        buckets={DATA_BUCKET: _UPLOADS, CHECKPOINTS_BUCKET: _UPLOADS},
    ),
    "rings": FunctionAccess(
        tables={
            "rings": (
                "BatchGetItem",
                "BatchWriteItem",
                "DeleteItem",
                "GetItem",
                "PutItem",
                "Query",
                "UpdateItem",
            )
        },
        buckets={DATA_BUCKET: ("DeleteObject", "GetObject", "ListBucket", "PutObject")},
        objects="*/rings/*",
    ),
    "machines": FunctionAccess(
        tables={
            "fleet": ("GetItem", "PutItem", "Query", "UpdateItem"),
            # The leases of the jobs that machines say they hold.
            "heartbeats": ("GetItem",),
            # A plan reads waiting jobs, the running times of completed jobs, and the recipe of a job; the cost of a job
            # follows from its attempts.
            "jobs": ("BatchGetItem", "GetItem", "Query"),
            "jobs/ready": ("Query",),
            "jobs/by_state": ("Query",),
            "recipes": ("GetItem",),
            # The keys of the workers of machines that enrol; a second enrolment revokes the former key.
            "tokens": ("GetItem", "PutItem"),
        },
        # The object whose download a machine times.
        buckets={CHECKPOINTS_BUCKET: ("GetObject", "ListBucket", "PutObject")},
        objects="*/preflight/*",
        provider_secret=("CreateSecret", "GetSecretValue", "PutSecretValue", "UpdateSecretVersionStage"),
    ),
    "admin": FunctionAccess(
        tables={
            "tokens": ("GetItem", "PutItem"),
            "tokens/keys_by_tenant": ("Query",),
            "jobs": ("GetItem", "Query"),
            "fleet": ("GetItem", "Query"),
            "webhooks": ("DeleteItem", "GetItem", "PutItem", "Query"),
        },
        buckets={},
        delivery_queue=("SendMessage",),
    ),
    # The files lie in the function's bundle.
    "console": FunctionAccess(tables={}, buckets={}),
    "sweeper": FunctionAccess(
        tables={
            # GetItem and PutItem serve the sweep; the other actions and the bucket serve the retention of jobs that
            # ended without a call of their worker.
            "jobs": ("GetItem", "PutItem", "BatchGetItem", "DeleteItem", "Query", "UpdateItem"),
            "jobs/timers": ("Query",),
            "jobs/by_state": ("Query",),
            # The longest wait of a job; the index contains waiting jobs only.
            "jobs/ready": ("Scan",),
            "heartbeats": ("BatchGetItem", "GetItem", "PutItem", "UpdateItem"),
            "heartbeats/due": ("Query",),
        },
        buckets={CHECKPOINTS_BUCKET: ("DeleteObject", "GetObject", "ListBucket")},
    ),
    "fleet": FunctionAccess(
        tables={
            "fleet": ("ConditionCheckItem", "DeleteItem", "GetItem", "PutItem", "Query", "UpdateItem"),
            "jobs/ready": ("Query",),
            # The jobs that rent their own machines, their worlds, and completed jobs for the running times of recipes.
            "jobs": ("BatchGetItem", "GetItem"),
            "jobs/by_state": ("Query",),
            # The progress of an elastic job, before one of its nodes is replaced.
            "heartbeats": ("BatchGetItem",),
            # The enrolment keys of machines, and the revocation of the keys of ended machines.
            "tokens": ("GetItem", "PutItem"),
        },
        buckets={},
        # The writes after which a tick follows at once.
        streams=dict.fromkeys(("jobs", "fleet"), STREAM_READS),
        provider_secret=("GetSecretValue",),
    ),
    "publisher": FunctionAccess(
        tables={"webhooks": ("Query",)},
        buckets={},
        streams=dict.fromkeys(("jobs", "fleet"), STREAM_READS),
        bus=("PutEvents",),
        dead_letters=("SendMessage",),
        delivery_queue=("SendMessage",),
    ),
    "deliverer": FunctionAccess(
        tables={"webhooks": ("GetItem", "PutItem")},
        buckets={},
        delivery_queue=("ChangeMessageVisibility", "DeleteMessage", "GetQueueAttributes", "ReceiveMessage"),
    ),
}
