"""Construction of the stores from the settings, once per execution environment."""

from __future__ import annotations

import os
import secrets
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from functions.api.http.context import Context
from functions.api.operations.cloudwatch_metrics import CloudWatchMetrics, count_ends
from functions.domain.jobs.transaction import Transaction
from functions.domain.ports import RingStore
from functions.handlers.startup import ServerClock
from functions.settings import ControlPlaneSettings
from functions.storage.clients import Clients, dynamodb_client, plain_client
from functions.storage.dynamodb.jobs import DynamoJobStore
from functions.storage.dynamodb.leases import DynamoLeaseStore
from functions.storage.dynamodb.packs import DynamoPackStore
from functions.storage.dynamodb.recipes import DynamoRecipeStore
from functions.storage.dynamodb.sharing import DynamoSharedStore
from functions.storage.dynamodb.tokens import DynamoTokenStore
from functions.storage.dynamodb.webhooks import DynamoWebhookStore
from functions.storage.s3.objects import S3ObjectStore
from functions.webhooks.event_queue import SqsDeliveryQueue

if TYPE_CHECKING:
    # The other functions do not load the records of fleets.
    from functions.fleet.accounts import CachedAccounts
    from functions.fleet.clock import FleetClock
    from functions.fleet.drivers.configured import ConfiguredDrivers
    from functions.fleet.store import FleetStore


class SystemRandomness:
    """Random source of the operating system."""

    def token(self) -> str:
        """Return 256 random bits, URL-safe."""
        return secrets.token_urlsafe(32)

    def job_id(self) -> str:
        """Return a random UUID."""
        return str(uuid.uuid4())

    def key_id(self) -> str:
        """Return 80 random bits as lower-case letters and digits."""
        return secrets.token_hex(10)

    def below(self, bound: int) -> int:
        """Return a random number from 0 to bound - 1."""
        return secrets.randbelow(bound)


class MeasuredJobStore(DynamoJobStore):
    """Job store that emits metrics of ended attempts; every transaction of a job passes here."""

    def __init__(self, client: Any, prefix: str, metrics: CloudWatchMetrics) -> None:
        super().__init__(client, prefix)
        self._metrics = metrics

    def apply(self, change: Transaction) -> None:
        super().apply(change)
        self._metrics.put(count_ends(change))


def build_metrics(environment: Mapping[str, str] = os.environ) -> CloudWatchMetrics:
    """Build the metrics of a deployed function, on the stream of its log."""
    return CloudWatchMetrics(ControlPlaneSettings.from_environment(environment).stage, sys.stderr, ServerClock())


def build_context(environment: Mapping[str, str] = os.environ, dynamodb: Any = None) -> Context:
    """Build the context of a deployed function from `BATON_*` variables. A bad setting fails here, at the start.

    `dynamodb`: client that the function's other stores use, too. A second client takes a twentieth of a cold start.
    """
    settings = ControlPlaneSettings.from_environment(environment)
    clients = Clients.from_settings(settings, dynamodb)
    return Context(
        jobs=MeasuredJobStore(clients.dynamodb, settings.table_prefix, build_metrics(environment)),
        leases=DynamoLeaseStore(clients.dynamodb, settings.table_prefix),
        packs=DynamoPackStore(clients.dynamodb, settings.table_prefix),
        shared=DynamoSharedStore(clients.dynamodb, settings.table_prefix),
        tokens=DynamoTokenStore(clients.dynamodb, settings.table_prefix),
        objects=S3ObjectStore(clients.s3, clients.s3_public, clients.buckets),
        webhooks=DynamoWebhookStore(clients.dynamodb, settings.table_prefix),
        recipes=DynamoRecipeStore(clients.dynamodb, settings.table_prefix),
        delivery_queue=SqsDeliveryQueue(settings.webhook_line),
        clock=ServerClock(),
        random=SystemRandomness(),
        settings=settings,
    )


def build_rings(dynamodb: Any) -> RingStore:
    """Build the ring store, which only the function `rings` loads."""
    from functions.storage.dynamodb.rings import DynamoRings

    settings = ControlPlaneSettings.from_environment(os.environ)
    return DynamoRings(dynamodb, settings.table_prefix)


def build_fleet_store(dynamodb: Any) -> FleetStore:
    """Build the store of fleets, which only the functions `admin`, `fleet`, `machines` and `submitter` load."""
    from functions.storage.dynamodb.fleet import DynamoFleetStore

    settings = ControlPlaneSettings.from_environment(os.environ)
    return DynamoFleetStore(dynamodb, settings.table_prefix)


@dataclass(frozen=True, kw_only=True)
class FleetParts:
    """Parts that only the functions `fleet` and `machines` load: store, clock, accounts and drivers of fleets.

    `dynamodb`: client of the store.
    """

    dynamodb: Any
    store: FleetStore
    clock: FleetClock
    accounts: CachedAccounts | None
    drivers: ConfiguredDrivers


@cache
def build_fleet() -> FleetParts:
    """Build the parts of fleets from the environment, once in a process, so that a login is in force at once."""
    from functions.api.fleet.store import clock_of
    from functions.fleet.drivers.configured import ConfiguredDrivers

    settings = ControlPlaneSettings.from_environment(os.environ)
    dynamodb = dynamodb_client()
    store = build_fleet_store(dynamodb)
    clock = clock_of(settings)
    accounts = build_accounts(settings)

    def now() -> int:
        # The calls of machines count in whole seconds of the server, therefore the tick does, too.
        return clock.at(ServerClock().now())

    drivers = ConfiguredDrivers(accounts, loopback_directory=settings.loopback_directory, now=now)
    return FleetParts(dynamodb=dynamodb, store=store, clock=clock, accounts=accounts, drivers=drivers)


def build_accounts(settings: ControlPlaneSettings) -> CachedAccounts | None:
    """Build the store of the accounts at providers; None for a deployment whose settings name no place for them."""
    from functions.fleet.accounts import CachedAccounts, ProviderAccounts
    from functions.storage.provider_accounts import FileAccounts, SecretsManagerAccounts

    store: ProviderAccounts
    if settings.provider_secret is not None:
        store = SecretsManagerAccounts(partial(plain_client, "secretsmanager"), settings.provider_secret)
    elif settings.provider_file is not None:
        store = FileAccounts(Path(settings.provider_file))
    else:
        return None
    return CachedAccounts(store, time.time)
