"""Settings of the control plane, read once from the environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, Json

from baton.contract.fleets.money import Budget
from baton.contract.names import CHECKPOINTS_BUCKET, DATA_BUCKET
from baton.contract.worker.lease_grace import SWEEP_INTERVAL_S
from functions.domain.jobs.attempt_end import LONGEST_URL_LIFE_S
from functions.domain.table_keys import TABLE_PREFIX

MAX_READY_SHARDS = 64


class ControlPlaneSettings(BaseModel):
    """Settings of a deployment. Each field is the environment variable `BATON_<NAME>`; a bad value fails at start.

    No missing setting causes a deletion, because retention is part of each job's policy.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    table_prefix: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")] = TABLE_PREFIX
    """Tables are named `<prefix>jobs`, `<prefix>heartbeats`, `<prefix>tokens`."""
    stage: Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,15}$")] | None = None
    """Name of the deployment and dimension of its metrics; unset: no metrics."""
    data_bucket: str = DATA_BUCKET
    """Physical name of the API's bucket `training-data`."""
    checkpoints_bucket: str = CHECKPOINTS_BUCKET
    """Physical name of the API's bucket `training-checkpoints`."""
    s3_endpoint: str | None = None
    """Any S3-compatible endpoint; unset: AWS."""
    s3_public_endpoint: str | None = None
    """Address of the S3 endpoint for clients, if different; presigned URLs name this address."""
    s3_region: str | None = None
    """Region in the signature of S3 requests, `auto` for many stores; unset: the function's own region."""
    s3_secret: str | None = None
    """Name of a secret in AWS Secrets Manager: JSON with `access_key_id` and `secret_access_key` of the S3 store.

    Unset: the credentials of the function's role.
    """
    multipart: bool = True
    """True if files are uploaded in parts; false for a store without the required multipart uploads
    (store_conformance.py), where each large file is one PUT."""
    samples_expire: bool = False
    """Expiry of ring samples by the bucket's lifecycle: if true, the uploads carry the tag that the lifecycle rule
    selects."""
    event_bus: str = "baton-local"
    """Name of the EventBridge bus for the events of jobs."""
    dead_letters: str | None = None
    """URL of the queue for events that cannot be published; unset: only the log records the events."""
    webhook_line: str | None = None
    """URL of the FIFO queue in which events wait for their webhooks; unset: no webhook receives events."""
    webhook_test_origin: str | None = None
    """Test setting: an origin such as `http://127.0.0.1:8000` that needs neither https nor a public address."""
    ready_shards: Annotated[int, Field(ge=1, le=MAX_READY_SHARDS)] = 1
    """Partitions of each queue's ready index; a partition serves about 500 claims a second. The number may grow at any
    time. With a smaller number no worker would find the jobs of the removed partitions, so `cdk` refuses to deploy
    fewer."""
    sweep_interval_s: Annotated[float, Field(gt=0, le=3600)] = SWEEP_INTERVAL_S
    """Seconds between two runs of the sweeper."""
    probe_url: str | None = None
    """Address to which the sweeper sends a heartbeat with an unknown key before revoking leases: a refusal of the key
    proves that gateway, authorizer, and the function of heartbeats answer. Unset: only gaps between the sweeper's runs
    reveal outages."""
    url_life_s: Annotated[int, Field(ge=60, le=LONGEST_URL_LIFE_S)] = 900
    download_token_life_s: Annotated[int, Field(ge=10, le=3600)] = 300
    upload_token_life_s: Annotated[int, Field(ge=10, le=3600)] = 900
    read_protection_s: Annotated[int, Field(ge=60, le=86_400)] = 3600
    """Seconds for which retention keeps a checkpoint after a client received URLs to read the checkpoint."""
    original_progress_s: Annotated[int, Field(ge=60, le=30 * 86_400)] = 6 * 3600
    """Seconds for which heartbeats of an original client renew the lease without `/progress`; before the first
    `/progress` twice as long. Without a lease token the control plane cannot recognize a hanging or a foreign
    program."""
    fleet_clock_speed: Annotated[int, Field(ge=1, le=3600)] = 1
    """Speed of the fleets' clock, for demos and tests: with 60 an hour of rent passes in a minute."""
    fleet_clock_server_s: Annotated[int, Field(ge=0)] = 0
    """Instant of the server at which the fleets' clock showed `fleet_clock_fleet_s`."""
    fleet_clock_fleet_s: Annotated[int, Field(ge=0)] = 0
    fleet_budget: Json[Budget] | None = None
    """Budget of all fleets of all tenants together as JSON, for example `{"per_month_usd": 500}`; unset: no bound
    besides the budgets of the fleets."""
    fleet_api_url: str | None = None
    """Address of the API in the environment of rented machines; required where a provider is configured."""
    provider_secret: str | None = None
    """Name of the secret in AWS Secrets Manager for the accounts at providers; `baton fleet login` creates the
    secret."""
    provider_file: str | None = None
    """File for the accounts at providers, in place of a secret; unset like `provider_secret`: no accounts."""
    loopback_directory: str | None = None
    """Directory for the machines of the provider `loopback`, which are processes; unset: no such provider."""
    version: str = "0.1.0"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        """Read `BATON_*`; ignore names that are not settings of the control plane."""
        given = {name: environment.get(f"BATON_{name.upper()}") for name in cls.model_fields}
        return cls.model_validate({name: value for name, value in given.items() if value})
