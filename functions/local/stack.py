"""The control plane on one machine: the emulated cloud, the deployed handlers, the gateway and the triggers."""

from __future__ import annotations

import json
import os
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from baton.contract.fleets.money import Budget
from baton.contract.names import OPERATOR_TENANT, Scope
from functions.api.admin.keys import generate_key
from functions.api.http.route import all_routes
from functions.api.operations.service_probe import PROBED_PATH
from functions.domain.access.api_keys import ApiKey
from functions.domain.checkpoints.packs import SWEEPER_TIMEOUT_S
from functions.fleet.clock import FleetClock, anchor_at_speed
from functions.fleet.store import DamagedRecord, FleetStore
from functions.local.emulator import Emulator
from functions.local.gateway.http_gateway import GatewayRoute, GatewayServer, build_gateway
from functions.local.lifecycle import Lifecycle, bind_socket
from functions.local.machines import describe_machines, end_machines, list_machines
from functions.local.triggers.schedule import Schedule
from functions.local.triggers.sqs_feed import SqsFeed
from functions.local.triggers.stream_feed import StreamFeed
from functions.settings import ControlPlaneSettings
from functions.storage.dynamodb.fleet import DynamoFleetStore
from functions.storage.stream import NUDGES
from functions.storage.tables import FLEET, JOBS, create_tables

KEYS_FILE = "keys.json"
DELIVERY_QUEUE = "baton-webhooks.fifo"
TICK_S = 60.0
"""Interval of the fleets' controller, by the clock of the fleets, besides the ticks that follow at once."""
_KEYS: tuple[tuple[str, tuple[Scope, ...]], ...] = (
    ("submit", (Scope.SUBMIT,)),
    ("worker", (Scope.WORKER,)),
    ("admin", (Scope.ADMIN, Scope.SUBMIT, Scope.WORKER)),
)


class LocalStack(Lifecycle):
    """Control plane on this machine; one per process, since the handlers read their settings at import.

    `state_dir` keeps the state across restarts, keys included; None keeps the state in memory, and ends the rented
    machines with the stack. `fleet_clock_speed`: speed of the fleets' clock.
    `fleet_budget`: budget of all fleets together.
    """

    def __init__(
        self,
        *,
        state_dir: Path | None,
        port: int = 0,
        sweep_interval_s: float = 60.0,
        fleet_clock_speed: int = 1,
        fleet_budget: Budget | None = None,
    ) -> None:
        self._state_dir = state_dir
        self._port = port
        self._sweep_interval_s = sweep_interval_s
        self._fleet_clock_speed = fleet_clock_speed
        self._fleet_budget = fleet_budget
        self._stack = ExitStack()
        self._emulator: Emulator | None = None
        self.url = ""
        self.cloud_url = ""
        """Endpoint of the emulated cloud for AWS clients: DynamoDB, S3, EventBridge, SQS, ..."""
        self.keys: dict[str, str] = {}
        self.fleet_clock = FleetClock()
        self._fleets: FleetStore | None = None

    def start(self) -> None:
        """Start all parts, the cloud first; a failure stops the parts that have started."""
        with ExitStack() as started:
            if self._port:
                # A port in use ends the start before the cloud starts, which takes seconds.
                bind_socket(self._port).close()
            if self._state_dir is not None:
                self._state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
            fleet_dir = self._state_dir or Path(started.enter_context(TemporaryDirectory(prefix="baton-fleets-")))
            machines_dir = (
                fleet_dir / "machines"
                if self._state_dir
                else Path(started.enter_context(TemporaryDirectory(prefix="baton-machines-")))
            )
            cloud_dir = self._state_dir / "cloud" if self._state_dir else None
            emulator = self._emulator = started.enter_context(Emulator(state_dir=cloud_dir))
            settings = ControlPlaneSettings(s3_endpoint=emulator.endpoint_url)
            _create_resources(emulator, settings)
            queue_url = _create_delivery_queue(emulator)
            self._export(settings, emulator, queue_url, machines_dir, fleet_dir / "providers.json")
            # A handler reads its settings and creates its clients at import, so the import follows the export.
            from functions.handlers import (
                admin,
                authorizer,
                console,
                deliverer,
                machines,
                publisher,
                rings,
                submitter,
                transfer,
                worker,
            )

            handlers = {
                module.__name__.rpartition(".")[2]: module.handler
                for module in (submitter, worker, transfer, admin, rings, machines, console)
            }
            routes = [
                GatewayRoute(
                    method=route.method, path=route.path, handler=handlers[route.function], guarded=bool(route.scopes)
                )
                for route in all_routes()
            ]
            self.keys = self._issue_keys(admin.context.tokens, admin.context.random, admin.context.clock)
            gateway = build_gateway(routes, authorizer.handler)
            server = started.enter_context(GatewayServer(gateway, port=self._port))
            os.environ.setdefault("BATON_PROBE_URL", f"{server.url}{PROBED_PATH}")
            os.environ["BATON_FLEET_API_URL"] = server.url
            from functions.handlers import fleet, sweeper

            if self._state_dir is None:
                # No later stack knows the machines.
                started.callback(end_machines, fleet.drivers, f"{fleet.store.deployment()}-")
            started.enter_context(Schedule(sweeper.handler, interval_s=self._sweep_interval_s))
            started.enter_context(Schedule(fleet.handler, interval_s=TICK_S / self._fleet_clock_speed))
            started.enter_context(SqsFeed(deliverer.handler, emulator.client("sqs"), queue_url))
            for table in (JOBS, FLEET):
                stream = _stream_of(emulator, table.name(settings.table_prefix))
                started.enter_context(StreamFeed(publisher.handler, *stream))
                started.enter_context(
                    StreamFeed(
                        fleet.handler,
                        *stream,
                        function="fleet",
                        timeout_s=SWEEPER_TIMEOUT_S,
                        filters=NUDGES[table.suffix],
                        repeats=False,
                    )
                )
            self.url = server.url
            self.cloud_url = emulator.endpoint_url
            self._stack = started.pop_all()

    def check(self) -> None:
        """Raise EmulatorError if the emulated cloud has ended, since no request can succeed without the cloud."""
        if self._emulator is not None:
            self._emulator.check()

    def describe_rented_machines(self) -> str:
        """Return what a user must know about machines that go on when a stack with a state directory stops."""
        if self._fleets is None or self._state_dir is None:
            return ""
        damaged: list[DamagedRecord] = []
        return describe_machines(list_machines(self._fleets, damaged), damaged)

    def stop(self) -> None:
        """Stop the parts in reverse order; the cloud saves its state last."""
        self._stack.close()

    def _export(
        self,
        settings: ControlPlaneSettings,
        emulator: Emulator,
        queue_url: str,
        machines_dir: Path,
        provider_file: Path,
    ) -> None:
        fleets = DynamoFleetStore(emulator.client("dynamodb"), settings.table_prefix)
        anchor = anchor_at_speed(fleets.clock_anchor(), int(time.time()), self._fleet_clock_speed)
        fleets.put_clock_anchor(anchor)
        self.fleet_clock, self._fleets = FleetClock(anchor), fleets
        os.environ.setdefault("BATON_LOG_LEVEL", "WARNING")
        if self._fleet_budget is not None:
            os.environ["BATON_FLEET_BUDGET"] = self._fleet_budget.model_dump_json(exclude_none=True)
        os.environ.update(
            {
                "BATON_TABLE_PREFIX": settings.table_prefix,
                "BATON_S3_ENDPOINT": emulator.endpoint_url,
                "BATON_EVENT_BUS": settings.event_bus,
                "BATON_SWEEP_INTERVAL_S": str(self._sweep_interval_s),
                "BATON_WEBHOOK_LINE": queue_url,
                "BATON_FLEET_CLOCK_SPEED": str(anchor.speed),
                "BATON_FLEET_CLOCK_SERVER_S": str(anchor.server),
                "BATON_FLEET_CLOCK_FLEET_S": str(anchor.fleet),
                "BATON_LOOPBACK_DIRECTORY": str(machines_dir),
                "BATON_PROVIDER_FILE": str(provider_file),
                "AWS_ENDPOINT_URL": emulator.endpoint_url,
                "AWS_ACCESS_KEY_ID": "test",
                "AWS_SECRET_ACCESS_KEY": "test",
                "AWS_DEFAULT_REGION": "us-east-1",
                "AWS_REGION": "us-east-1",
            }
        )

    def _issue_keys(self, tokens: Any, random: Any, clock: Any) -> dict[str, str]:
        """Return the keys of earlier runs, else new keys. Only the owner can read the file."""
        path = self._state_dir / KEYS_FILE if self._state_dir else None
        if path is not None and path.exists():
            saved: dict[str, str] = json.loads(path.read_text())
            if all(_is_valid(tokens, key) for key in saved.values()):
                return saved
        issued = {}
        for name, scopes in _KEYS:
            key, whole = generate_key(
                random,
                tenant=OPERATOR_TENANT,
                name=f"local {name}",
                scopes=list(scopes),
                now=clock.now(),
                expires_at=None,
            )
            tokens.put_key(key)
            issued[name] = whole
        if path is not None:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "w") as file:
                json.dump(issued, file, indent=1)
        return issued


def _is_valid(tokens: Any, whole_key: str) -> bool:
    found: ApiKey | None = tokens.get_key(whole_key.split("_")[1])
    return found is not None and found.revoked_at is None


def _create_resources(emulator: Emulator, settings: ControlPlaneSettings) -> None:
    create_tables(emulator.client("dynamodb"), settings.table_prefix)
    s3 = emulator.client("s3")
    existing = {bucket["Name"] for bucket in s3.list_buckets()["Buckets"]}
    for bucket in {settings.data_bucket, settings.checkpoints_bucket} - existing:
        s3.create_bucket(Bucket=bucket)
    events = emulator.client("events")
    if settings.event_bus not in {bus["Name"] for bus in events.list_event_buses()["EventBuses"]}:
        events.create_event_bus(Name=settings.event_bus)


def _create_delivery_queue(emulator: Emulator) -> str:
    made = emulator.client("sqs").create_queue(QueueName=DELIVERY_QUEUE, Attributes={"FifoQueue": "true"})
    url: str = made["QueueUrl"]
    return url


def _stream_of(emulator: Emulator, name: str) -> tuple[Any, str]:
    table = emulator.client("dynamodb").describe_table(TableName=name)["Table"]
    return emulator.client("dynamodbstreams"), table["LatestStreamArn"]
