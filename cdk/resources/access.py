"""What each function may do: nothing else is allowed to its role. Compared in the tests with what it really does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cdk.resources.storage import CHECKPOINTS, DATA


@dataclass(frozen=True, kw_only=True)
class Access:
    """Of one function: DynamoDB actions by table suffix or `<table>/<index>`, S3 actions by bucket.

    A transaction needs the actions of its parts. What `OF_BUCKET` names is of the bucket, the other S3 actions are of
    its objects; without `ListBucket` S3 answers 403 instead of 404 to who asks for an object that is not there. A
    presigned URL carries the rights of the function that signed it. A table's stream is read by Lambda, with the
    function's rights.
    """

    tables: Mapping[str, tuple[str, ...]]
    buckets: Mapping[str, tuple[str, ...]]
    objects: str = "*"
    """Which objects of its buckets the actions on objects are for, as IAM writes it. Those on a bucket itself are for
    all of it: to who may list only a part, S3 answers 403 for whatever is not there."""
    streams: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """DynamoDB actions on the stream of a table, by its suffix."""
    bus: tuple[str, ...] = ()
    """EventBridge actions on the stage's bus."""
    dead_letters: tuple[str, ...] = ()
    """SQS actions on the queue of what cannot be published."""
    line: tuple[str, ...] = ()
    """SQS actions on the queue in which events wait for their webhooks; some of them Lambda's, with these rights."""


OF_BUCKET = ("ListBucket", "ListBucketMultipartUploads")
"""S3 actions whose resource is the bucket itself."""
STORE_SECRET = ("GetSecretValue",)
"""Where the stage has an object store of its own, its functions may read that store's one secret, instead of what
`buckets` says here: what its credentials may do is decided there. Functions without `buckets` may not even do that."""
TAGGING = ("PutObjectTagging",)
"""Where the stage lets samples of rings expire, who signs the URLs to store them may tag them."""

_PARTS = ("ListBucketMultipartUploads", "ListMultipartUploadParts")
_UPLOADS = ("AbortMultipartUpload", "DeleteObject", "GetObject", "ListBucket", "PutObject", *_PARTS)

ACCESS: Mapping[str, Access] = {
    "authorizer": Access(tables={"tokens": ("GetItem",), "heartbeats": ("GetItem",)}, buckets={}),
    "submitter": Access(
        tables={
            "jobs": ("BatchGetItem", "DeleteItem", "GetItem", "PutItem", "Query", "UpdateItem"),
            "jobs/by_tenant": ("Query",),
            "jobs/by_state": ("Query",),
            "heartbeats": ("BatchGetItem", "GetItem", "UpdateItem"),
            "webhooks": ("GetItem",),
            "recipes": ("GetItem", "PutItem", "Query"),
        },
        buckets={CHECKPOINTS: ("GetObject", "ListBucket")},
    ),
    "worker": Access(
        tables={
            "jobs": ("BatchGetItem", "DeleteItem", "GetItem", "PutItem", "Query", "UpdateItem"),
            "jobs/ready": ("Query",),
            "jobs/timers": ("Query",),
            # Of a group that a rule scales, its jobs.
            "jobs/by_state": ("Query",),
            "heartbeats": ("ConditionCheckItem", "GetItem", "PutItem", "UpdateItem"),
        },
        buckets={
            DATA: ("GetObject", "ListBucket"),
            CHECKPOINTS: ("DeleteObject", "GetObject", "ListBucket", "PutObject", *_PARTS),
        },
    ),
    "transfer": Access(
        tables={"tokens": ("DeleteItem", "GetItem", "PutItem"), "jobs": ("GetItem", "UpdateItem")},
        buckets={DATA: _UPLOADS, CHECKPOINTS: _UPLOADS},
    ),
    "rings": Access(
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
        buckets={DATA: ("DeleteObject", "GetObject", "ListBucket", "PutObject")},
        objects="*/rings/*",
    ),
    "admin": Access(
        tables={
            "tokens": ("GetItem", "PutItem"),
            "tokens/keys_by_tenant": ("Query",),
            "jobs": ("GetItem", "Query"),
            "webhooks": ("DeleteItem", "GetItem", "PutItem", "Query"),
        },
        buckets={},
        line=("SendMessage",),
    ),
    "sweeper": Access(
        tables={
            # All but the first two and the bucket: what jobs that ended without a worker's call do not keep.
            "jobs": ("GetItem", "PutItem", "BatchGetItem", "DeleteItem", "Query", "UpdateItem"),
            "jobs/timers": ("Query",),
            "jobs/by_state": ("Query",),
            # Of what waits, how long: the index has nothing else.
            "jobs/ready": ("Scan",),
            "heartbeats": ("BatchGetItem", "GetItem", "PutItem", "UpdateItem"),
            "heartbeats/due": ("Query",),
        },
        buckets={CHECKPOINTS: ("DeleteObject", "GetObject", "ListBucket")},
    ),
    "publisher": Access(
        tables={"webhooks": ("Query",)},
        buckets={},
        streams={"jobs": ("DescribeStream", "GetRecords", "GetShardIterator", "ListStreams")},
        bus=("PutEvents",),
        dead_letters=("SendMessage",),
        line=("SendMessage",),
    ),
    "deliverer": Access(
        tables={"webhooks": ("GetItem", "PutItem")},
        buckets={},
        line=("ChangeMessageVisibility", "DeleteMessage", "GetQueueAttributes", "ReceiveMessage"),
    ),
}
