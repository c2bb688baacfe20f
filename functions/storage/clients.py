"""Create AWS clients for the stores, with explicit timeouts, few retries and one pool of connections."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from threading import Lock
from typing import Any, Protocol, Self

import botocore.loaders
import botocore.session
from botocore.config import Config

from baton.contract.names import CHECKPOINTS_BUCKET, DATA_BUCKET
from functions.storage.s3.store_secret import keep_credentials_in

CONNECT_TIMEOUT_S = 2
DYNAMODB_READ_TIMEOUT_S = 5
S3_READ_TIMEOUT_S = 10
MAX_ATTEMPTS = 3
MAX_CONNECTIONS = 32


class StorageSettings(Protocol):
    """Settings of the AWS clients. An endpoint of None is AWS's endpoint."""

    @property
    def data_bucket(self) -> str: ...

    @property
    def checkpoints_bucket(self) -> str: ...

    @property
    def s3_endpoint(self) -> str | None: ...

    @property
    def s3_public_endpoint(self) -> str | None:
        """Endpoint in presigned URLs, if workers reach S3 by another endpoint than the functions; else None."""

    @property
    def s3_region(self) -> str | None: ...

    @property
    def s3_secret(self) -> str | None:
        """Name of the secret with the credentials of a store outside AWS (store_secret.py); None for AWS."""


@dataclass(frozen=True, kw_only=True)
class Clients:
    """Thread-safe low-level clients, and the physical buckets by API name. `s3_public` only signs URLs."""

    dynamodb: Any
    s3: Any
    s3_public: Any
    buckets: Mapping[str, str]

    @classmethod
    def from_settings(cls, settings: StorageSettings, dynamodb: Any = None) -> Self:
        """Create the clients of a deployment; `dynamodb`: client to use in place of a new one.

        botocore's defaults (`AWS_*`) supply region, credentials and endpoint where the settings name none.
        """
        region, secret = settings.s3_region, settings.s3_secret
        s3 = _WhenNeeded(partial(s3_client, settings.s3_endpoint, region=region, secret=secret))
        public = settings.s3_public_endpoint
        return cls(
            dynamodb=dynamodb or dynamodb_client(),
            s3=s3,
            s3_public=s3
            if public is None or public == settings.s3_endpoint
            else _WhenNeeded(partial(s3_client, public, region=region, secret=secret)),
            buckets={
                DATA_BUCKET: settings.data_bucket,
                CHECKPOINTS_BUCKET: settings.checkpoints_bucket,
            },
        )


class _WhenNeeded:
    """Proxy of a client that the first access to an attribute creates.

    The creation of a client takes a tenth of a cold start; heartbeats, most claims and two functions never use S3. The
    DynamoDB client needs no proxy, because every function uses DynamoDB at once.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._making = Lock()
        self._client: Any = None

    def __getattr__(self, name: str) -> Any:
        with self._making:
            if self._client is None:
                self._client = self._make()
        return getattr(self._client, name)


def dynamodb_client(endpoint_url: str | None = None, **credentials: str) -> Any:
    """Create a thread-safe client for DynamoDB. `credentials`: keyword arguments of botocore's `create_client`."""
    return _client("dynamodb", endpoint_url, _config(DYNAMODB_READ_TIMEOUT_S), credentials)


def s3_client(
    endpoint_url: str | None = None, *, region: str | None = None, secret: str | None = None, **credentials: str
) -> Any:
    """Create a thread-safe client for S3; with an endpoint the client uses path-style URLs.

    `secret`: name of the secret with the credentials, which the client reads before its first signature.
    """
    config = _config(S3_READ_TIMEOUT_S).merge(
        Config(
            signature_version="s3v4",
            s3={"addressing_style": "path" if endpoint_url else "auto"},
            # Clients send exactly the signed headers, therefore botocore must add no checksum header of its own.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
    )
    if region:
        credentials["region_name"] = region
    return _client("s3", endpoint_url, config, credentials, secret)


def plain_client(service: str) -> Any:
    """Create a thread-safe client for a service without special settings: `events`, `sqs`."""
    return _client(service, None, _config(DYNAMODB_READ_TIMEOUT_S), {})


def _config(read_timeout_s: int) -> Config:
    return Config(
        connect_timeout=CONNECT_TIMEOUT_S,
        read_timeout=read_timeout_s,
        retries={"mode": "standard", "total_max_attempts": MAX_ATTEMPTS},
        max_pool_connections=MAX_CONNECTIONS,
        tcp_keepalive=True,
    )


def new_session() -> botocore.session.Session:
    """Create the session of one client, because sessions are not thread-safe. botocore loads faster than boto3."""
    session = botocore.session.get_session()
    session.register_component("data_loader", _descriptions())
    return session


@cache
def _descriptions() -> Any:
    """Return botocore's loader of service descriptions; all sessions share the loader, so each file is read once."""
    return botocore.loaders.create_loader()


def _client(
    service: str, endpoint_url: str | None, config: Config, credentials: dict[str, str], secret: str | None = None
) -> Any:
    session = new_session()
    if secret is not None:
        keep_credentials_in(secret, session)
    return session.create_client(service, endpoint_url=endpoint_url, config=config, **credentials)
