"""Settings of the control plane, read once from the environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field

from baton.contract.leases import SWEEP_INTERVAL_S
from baton.contract.names import CHECKPOINTS_BUCKET, DATA_BUCKET
from functions.domain.jobs.attempt_end import LONGEST_URL_LIFE_S
from functions.domain.keys import TABLE_PREFIX

MAX_READY_SHARDS = 64


class Settings(BaseModel):
    """What a deployment decides. Each field is the environment variable `BATON_<NAME>`; a bad value fails at start.

    There is no value whose absence lets anything be deleted: retention is part of each job's policy.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    table_prefix: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")] = TABLE_PREFIX
    """Tables are named `<prefix>jobs`, `<prefix>heartbeats`, `<prefix>tokens`."""
    stage: Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,15}$")] | None = None
    """Name of the deployment, a dimension of its metrics; unset means that none are written."""
    data_bucket: str = DATA_BUCKET
    """Physical name of the bucket that the API calls `training-data`."""
    checkpoints_bucket: str = CHECKPOINTS_BUCKET
    """Physical name of the bucket that the API calls `training-checkpoints`."""
    s3_endpoint: str | None = None
    """Any S3-compatible endpoint; unset means AWS."""
    s3_public_endpoint: str | None = None
    """How clients reach that endpoint, when it differs: presigned URLs name it."""
    s3_region: str | None = None
    """What requests to that endpoint are signed for, `auto` for many; unset means the function's own region."""
    s3_secret: str | None = None
    """Name of a secret in AWS Secrets Manager, JSON with `access_key_id` and `secret_access_key` of that store.

    Unset means the credentials of the function's role.
    """
    multipart: bool = True
    """False for a store that cannot take uploads in parts as they are needed (store_check.py): each large file is then
    one PUT too."""
    samples_expire: bool = False
    """True where the bucket's lifecycle deletes samples of rings some day: they are stored with the tag it goes by."""
    event_bus: str = "baton-local"
    """Name of the EventBridge bus that jobs' events are published on."""
    dead_letters: str | None = None
    """URL of the queue for events that cannot be published; unset means that only the log tells of them."""
    webhook_line: str | None = None
    """URL of the FIFO queue in which events wait for their webhooks; unset means that no webhook is told."""
    webhook_test_origin: str | None = None
    """For tests: an origin, `http://127.0.0.1:8000`, that webhooks may have though it is neither https nor public."""
    ready_shards: Annotated[int, Field(ge=1, le=MAX_READY_SHARDS)] = 1
    """Partitions of each queue's ready index; one carries about 500 claims a second. More of them are safe at any time;
    with fewer than before no worker would find the jobs of the others, so `cdk` refuses to deploy fewer."""
    sweep_interval_s: Annotated[float, Field(gt=0, le=3600)] = SWEEP_INTERVAL_S
    """Seconds between two runs of the sweeper."""
    probe_url: str | None = None
    """Address to which the sweeper sends a heartbeat with an unknown key before it revokes leases: a refusal of the key
    proves that gateway, authorizer, and the function of heartbeats answer. Unset means that only the sweeper's own runs
    tell of outages."""
    url_life_s: Annotated[int, Field(ge=60, le=LONGEST_URL_LIFE_S)] = 900
    download_token_life_s: Annotated[int, Field(ge=10, le=3600)] = 300
    upload_token_life_s: Annotated[int, Field(ge=10, le=3600)] = 900
    read_protection_s: Annotated[int, Field(ge=60, le=86_400)] = 3600
    """How long retention spares a checkpoint after somebody was given URLs to read it."""
    original_progress_s: Annotated[int, Field(ge=60, le=30 * 86_400)] = 6 * 3600
    """How long heartbeats of a client of the original orchestrator are taken without `/progress`; before its first one
    twice as long. Its program may hang, or be another one than that which claimed the job: a lease token would tell."""
    version: str = "0.1.0"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        """Read `BATON_*`; names that are not settings of the control plane are left alone."""
        given = {name: environment.get(f"BATON_{name.upper()}") for name in cls.model_fields}
        return cls.model_validate({name: value for name, value in given.items() if value})
