"""AWS clients as the stores need them: explicit time-outs, few retries, one pool of connections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self

import botocore.session
from botocore.config import Config

from contract.transfers import CHECKPOINTS_BUCKET, DATA_BUCKET

CONNECT_TIMEOUT_S = 2
DYNAMODB_READ_TIMEOUT_S = 5
S3_READ_TIMEOUT_S = 10
MAX_ATTEMPTS = 3
MAX_CONNECTIONS = 32


class StorageSettings(Protocol):
    """What of a deployment's settings matters here. `None` endpoints are AWS's own."""

    @property
    def data_bucket(self) -> str: ...

    @property
    def checkpoints_bucket(self) -> str: ...

    @property
    def s3_endpoint(self) -> str | None: ...

    @property
    def s3_public_endpoint(self) -> str | None:
        """The name by which workers reach S3, where it is not the one used here: URLs are signed for it."""


@dataclass(frozen=True, kw_only=True)
class Clients:
    """Thread-safe low-level clients, and the physical bucket by the API's name. `s3_public` only signs URLs."""

    dynamodb: Any
    s3: Any
    s3_public: Any
    buckets: Mapping[str, str]

    @classmethod
    def from_settings(cls, settings: StorageSettings) -> Self:
        """Region, credentials and a common endpoint come from where AWS's SDKs look for them (`AWS_*`)."""
        s3 = s3_client(settings.s3_endpoint)
        public = settings.s3_public_endpoint
        return cls(
            dynamodb=dynamodb_client(),
            s3=s3,
            s3_public=s3 if public is None or public == settings.s3_endpoint else s3_client(public),
            buckets={
                DATA_BUCKET: settings.data_bucket,
                CHECKPOINTS_BUCKET: settings.checkpoints_bucket,
            },
        )


def dynamodb_client(endpoint_url: str | None = None, **credentials: str) -> Any:
    """A thread-safe client for DynamoDB. `credentials`: as botocore's `create_client` takes them."""
    return _client("dynamodb", endpoint_url, _config(DYNAMODB_READ_TIMEOUT_S), credentials)


def s3_client(endpoint_url: str | None = None, **credentials: str) -> Any:
    """A thread-safe client for S3: path-style where it has an endpoint of its own."""
    config = _config(S3_READ_TIMEOUT_S).merge(
        Config(
            signature_version="s3v4",
            s3={"addressing_style": "path" if endpoint_url else "auto"},
            # Checksums are what we say they are: signed headers must be exactly those that are sent.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
    )
    return _client("s3", endpoint_url, config, credentials)


def _config(read_timeout_s: int) -> Config:
    return Config(
        connect_timeout=CONNECT_TIMEOUT_S,
        read_timeout=read_timeout_s,
        retries={"mode": "standard", "total_max_attempts": MAX_ATTEMPTS},
        max_pool_connections=MAX_CONNECTIONS,
        tcp_keepalive=True,
    )


def _client(service: str, endpoint_url: str | None, config: Config, credentials: dict[str, str]) -> Any:
    # A session of its own, and botocore's rather than boto3's: thread-safe, and quicker to load in a cold Lambda.
    session = botocore.session.get_session()
    return session.create_client(service, endpoint_url=endpoint_url, config=config, **credentials)
