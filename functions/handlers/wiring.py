"""What the Lambda functions share: the stores, built once per execution environment from the settings."""

from __future__ import annotations

import logging
import os
import secrets
import sys
import time
import uuid

from aws_lambda_powertools import Logger

from functions.api.context import Context
from functions.api.settings import Settings
from functions.storage.clients import Clients
from functions.storage.dynamo_jobs import DynamoJobStore
from functions.storage.dynamo_leases import DynamoLeaseStore
from functions.storage.dynamo_tokens import DynamoTokenStore
from functions.storage.s3_objects import S3ObjectStore


class ServerClock:
    """The machine's clock. Lambda's machines are synchronised by AWS."""

    def now(self) -> int:
        """Whole seconds since 1970."""
        return int(time.time())


class SystemRandomness:
    """The operating system's random source."""

    def token(self) -> str:
        """256 bits, URL-safe."""
        return secrets.token_urlsafe(32)

    def job_id(self) -> str:
        """A random UUID."""
        return str(uuid.uuid4())

    def key_id(self) -> str:
        """80 bits, lower-case letters and digits."""
        return secrets.token_hex(10)

    def below(self, bound: int) -> int:
        """A number from 0 to bound - 1."""
        return secrets.randbelow(bound)


def build_context(environment: dict[str, str] | None = None) -> Context:
    """The context of a deployed function: everything from `BATON_*` variables. A bad setting fails here, at start."""
    settings = Settings.from_environment(os.environ if environment is None else environment)
    clients = Clients.from_settings(settings)
    return Context(
        jobs=DynamoJobStore(clients.dynamodb, settings.table_prefix),
        leases=DynamoLeaseStore(clients.dynamodb, settings.table_prefix),
        tokens=DynamoTokenStore(clients.dynamodb, settings.table_prefix),
        objects=S3ObjectStore(clients.s3, clients.s3_public, clients.buckets),
        clock=ServerClock(),
        random=SystemRandomness(),
        settings=settings,
    )


def start_logging() -> None:
    """Structured logs for everything under `baton`."""
    # Lambda keeps both streams; a program that runs the handlers itself may want standard output for its own.
    powertools = Logger(service="baton", stream=sys.stderr)
    root = logging.getLogger("baton")
    root.handlers = list(powertools.handlers)
    root.setLevel(os.environ.get("BATON_LOG_LEVEL", "INFO").upper())
    root.propagate = False
