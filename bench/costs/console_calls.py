"""Record the billed units of one poll of the console's views of fleets, rings and worlds."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable
from dataclasses import replace
from math import ceil
from typing import Any

import numpy as np

from baton.contract.fleets.fleet import FleetSpec, MachineMeasurements
from baton.contract.fleets.fleet import MachineState as State
from baton.contract.fleets.money import Budget
from baton.contract.names import RING_SETTINGS, Scope
from bench.costs.cost_model import VIEWED_FLEETS, VIEWED_MACHINES, VIEWED_READERS, VIEWED_RINGS, VIEWED_WRITERS
from bench.costs.units import Billed
from bench.harness.plane import TENANT, Plane
from functions.api.http.dispatch import dispatch
from functions.api.http.route import Function
from functions.domain.access.rings import StoredRing
from functions.fleet.ledger import Ledger
from functions.fleet.records import FleetEvent, Machine, Offer, StoredFleet, token_prefix
from functions.storage.dynamodb.fleet import DynamoFleetStore
from functions.storage.dynamodb.rings import DynamoRings
from gpu_client.ring.core.maintenance import Maintainer
from gpu_client.ring.core.ring import Ring
from gpu_client.ring.generating.writer import RingWriter
from gpu_client.ring.reading.reader import RingReader
from gpu_client.ring.settings import RingSettings
from gpu_client.ring.store.memory import MemoryStore

DAY_LIVES = 24
"""Machines of one fleet that ended within a day."""
LIFE = ("planned", "requested", "booting", "registered", "ready", "busy", "ready", "terminating", "gone")
RING_KEYS, LISTED_KEYS = "ring.json,pointer,publisher,read,watched", "ring.json,pointer,publisher,read"
RING_PREFIXES = "writers/,readers/,quarantine/"
OFFER = Offer(provider="vast", ref="o1", gpu_model="RTX 4090", vram_gib=24, disk_gib=80, usd_per_hour=0.4)
MEASURED = MachineMeasurements(driver="580.65.06", disk_write_mb_s=850, download_mbit_s=412)
Measure = Callable[[Callable[[], object]], Billed]
"""Runs a call and returns its billed units."""


class ViewRecording:
    """Views whose polls are billed. world: an elastic job that trains."""

    def __init__(self, plane: Plane, *, call: Measure, world: str) -> None:
        self._plane, self._bill, self._world = plane, call, world
        self._now = plane.context.clock.now()
        self._fleet = DynamoFleetStore(plane.dynamodb, plane.prefix)
        self._rings = DynamoRings(plane.dynamodb, plane.prefix)
        settings = plane.context.settings.model_copy(update={"fleet_budget": Budget(per_month_usd=500)})
        self._context = replace(plane.context, fleet=self._fleet, rings=self._rings, settings=settings)

    def run(self) -> dict[str, Billed]:
        """Bill one poll of each view."""
        names = [f"console-{number}" for number in range(VIEWED_FLEETS)]
        for name in names:
            # The history of one fleet is read.
            self._store_fleet(name, ended=DAY_LIVES if name == names[0] else 0)
        for number in range(VIEWED_RINGS):
            self._store_ring(f"console-{number}")
        self._plane.submit(queue=names[0])
        (item,) = self._plane.claim(queue=names[0], machine_id=f"{self._prefix(names[0])}{0:012x}")
        rented, one = {"id": item["id"]}, {"fleet": names[0]}
        return {
            "world": self._poll("worker", "GET /job/{id}/world", {"id": self._world}),
            "machines of a job": self._poll("machines", "GET /job/{id}/machines", rented),
            "list of fleets": self._poll("machines", "GET /fleets", {}),
            "fleet": self._poll("machines", "GET /fleets/{fleet}", one),
            "history of a fleet": self._poll("machines", "GET /fleets/{fleet}/history", one, hours="24", points="160"),
            "list of rings": self._poll("rings", "GET /rings", {}, limit="50", records=LISTED_KEYS),
            "ring": self._poll(
                "rings", "GET /rings/{ring}/records", {"ring": "console-0"}, keys=RING_KEYS, prefixes=RING_PREFIXES
            ),
        }

    def _poll(self, function: Function, route: str, path: dict[str, str], **query: str) -> Billed:
        """Bill a poll, with the size of the compressed answer. Raises RuntimeError for a refusal."""
        event = {
            "routeKey": route,
            "pathParameters": path,
            "queryStringParameters": query,
            "headers": {"accept-encoding": "gzip"},
            "requestContext": {"authorizer": {"lambda": {"tenant": TENANT, "scopes": Scope.SUBMIT.value}}},
        }
        answers: list[dict[str, Any]] = []
        billed = self._bill(lambda: answers.append(dispatch(event, self._context, function)))
        status, body = answers[0]["statusCode"], answers[0]["body"]
        size_bytes = len(b64decode(body) if answers[0].get("isBase64Encoded") else body)
        if status != 200:
            raise RuntimeError(f"{route} was answered with {status}: {body}")
        # Random ids compress differently from run to run.
        return {"answer_kb": ceil(size_bytes / 1000), **billed}

    def _prefix(self, fleet: str) -> str:
        return token_prefix(self._fleet.deployment(), fleet)

    def _store_fleet(self, name: str, *, ended: int) -> None:
        """Store a fleet with machines that hold jobs, and with the machines and events of a day."""
        document = {
            "name": name,
            "providers": ["vast"],
            "image": "registry.example/trainer:1",
            "max": VIEWED_MACHINES,
            "queues": [name],
            "max_usd_per_hour": 1,
            "budget": {"total_usd": 100, "per_day_usd": 50},
        }
        spec = FleetSpec.model_validate(document)
        self._fleet.put_fleet(
            StoredFleet(tenant=TENANT, spec=spec, version=1, created_at=self._now, updated_at=self._now)
        )
        fence = self._fleet.acquire("bench", self._now, 3600)
        if fence is None:
            raise RuntimeError("the controller of another fleet runs")
        self._fleet.write(fence, TENANT, name, ledger=Ledger(version=1).spend(9.84, self._now))
        for number in range(VIEWED_MACHINES + ended):
            gone = number >= VIEWED_MACHINES
            machine = Machine(
                id=f"{self._prefix(name)}{number:012x}",
                tenant=TENANT,
                fleet=name,
                version=1,
                state=State.GONE if gone else State.BUSY,
                since=self._now - 3600 * (number - VIEWED_MACHINES) if gone else self._now - 60,
                offer=OFFER,
                cap_usd_per_hour=0.5,
                handle=f"2947{number:04}",
                requested_at=self._now - 100_000,
                created_at=self._now - 100_000,
                enrolled_at=self._now - 99_000,
                ends_by=self._now + 3600,
                usd_per_hour=0.4,
                spent_usd=1.6,
                reserved_usd=0.0 if gone else 0.4,
                measured=MEASURED,
                job_id=None if gone else "146683a1-cb76-4702-9fef-fcccd32594f1",
                absences=[self._now - 61, self._now] if gone else [],
            )
            lived = [
                FleetEvent(at=self._now - 3600 * number - 9 + at, type=f"machine.{state}", machine=machine.id, usd=0.4)
                for at, state in enumerate(LIFE if gone else LIFE[:6])
            ]
            self._fleet.write(fence, TENANT, name, machine=machine, events=lived)
        self._fleet.release(fence)

    def _store_ring(self, name: str) -> None:
        """Store the records of a ring with generators and trainings at work."""
        store = MemoryStore()
        ring = Ring.make(store, RingSettings(cap=40, pack=10, lease_s=600))
        keeper = Maintainer(ring, "keeper")
        generators = [f"gen-{number}" for number in range(VIEWED_WRITERS)]
        writers = [RingWriter(ring, one, maintainer=keeper, threads=False) for one in generators]
        readers = [RingReader(ring, f"train-{number}", threads=False) for number in range(VIEWED_READERS)]
        for writer in writers:
            for seed in range(10):
                writer.put({"x": np.full(8, seed, np.uint8)}, seed=seed)
            writer.flush()
            writer.renew()
        for reader in readers:
            reader.newest()
            reader.record_consumed(20)
            reader.flush_stats()
        keeper.turn()
        keys = [key for key in RING_KEYS.split(",") if key != RING_SETTINGS]
        keys += [key for prefix in RING_PREFIXES.split(",") for key in store.keys(prefix)]
        found = {key: store.record(key) for key in (RING_SETTINGS, *keys)}
        settings = found.pop(RING_SETTINGS)
        assert settings is not None
        stored = StoredRing(tenant=TENANT, name=name, id=f"id-{name}", settings=settings.data, created_at=self._now)
        self._rings.make(stored)
        for key, record in found.items():
            if record is not None:
                self._rings.write(stored, key, record.data, version=record.version, seen=None)
        for one in (*writers, *readers, keeper):
            one.close()
