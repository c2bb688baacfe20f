"""Record the billed units of fleets: the tick of the controller, and the calls of a rented machine's worker."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from pydantic import BaseModel

from baton.contract.fleets.fleet import EnrollRequest, FleetSpec, MachineHeartbeat, MachineMeasurements
from baton.contract.fleets.fleet import MachineState as State
from baton.contract.names import Scope
from bench.costs.units import Billed
from bench.harness.plane import TENANT, Plane
from functions.api.http.dispatch import dispatch
from functions.api.machines.enrolment_keys import EnrolmentKeys
from functions.fleet.clock import FleetClock
from functions.fleet.lifecycle import COST_STORED_EVERY_S, TICK_S
from functions.fleet.records import StoredFleet
from functions.fleet.ticks.balances import EVERY_S, LOOK_S
from functions.fleet.ticks.controller import FleetController
from functions.fleet.ticks.demand import waiting_jobs
from functions.storage.dynamodb.fleet import DynamoFleetStore
from tests.twins.provider import VirtualProvider

SETTLING_TICKS = 12
"""Ticks after which the reservation of a machine has its usual size."""
FLEET, QUEUE = "bench", "rented"
Measure = Callable[[Callable[[], object]], Billed]
"""Runs a call and returns its billed units; the call is one of the controller or one of the API."""


class FleetRecording:
    """Fleet whose controller and machines are billed. tick, call: bill a tick, and a call of the API."""

    def __init__(self, plane: Plane, *, tick: Measure, call: Measure) -> None:
        self._plane = plane
        self._bill_tick, self._bill_call = tick, call
        self._store = DynamoFleetStore(plane.dynamodb, plane.prefix)
        self._context = replace(plane.context, fleet=self._store)
        self._provider = VirtualProvider()
        now = plane.context.clock.now()
        # The first look at a credit follows half an hour later, therefore no billed tick contains one.
        self._now = now + (LOOK_S + TICK_S - now) % EVERY_S

    def run(self) -> dict[str, Billed]:
        """Rent two machines one after the other, and bill what each adds."""
        idle = self._bill_tick(self._tick)
        self._put_fleet(machines=1)
        self._tick()
        empty = self._bill_tick(self._tick)
        self._plane.submit(queue=QUEUE)
        rent = self._bill_tick(self._tick)
        self._preflight()  # Of the tenant's first machine, which stores the object.
        preflight = self._bill_call(self._preflight)
        enrolment = self._bill_call(self._enroll)
        heartbeat = self._bill_call(self._heartbeat)
        one = self._settled()
        self._put_fleet(machines=2)
        self._tick()
        self._enroll()
        two = self._settled()
        return {
            "idle tick": idle,
            "fleet tick": empty,
            "machine in a tick": _difference(two, one, COST_STORED_EVERY_S // TICK_S),
            "rent": _difference(rent, empty),
            "preflight": preflight,
            "enrolment": enrolment,
            "machine heartbeat": heartbeat,
        }

    def _put_fleet(self, *, machines: int) -> None:
        """Permit a number of machines. The one job waits all the time, because nobody claims the job."""
        document = {
            "name": FLEET,
            "providers": ["loopback"],
            "max": machines,
            "queues": [QUEUE],
            "max_usd_per_hour": 1,
            "budget": {"total_usd": 100, "per_day_usd": 50},
        }
        spec = FleetSpec.model_validate(document)
        fleet = StoredFleet(tenant=TENANT, spec=spec, version=machines, created_at=self._now, updated_at=self._now)
        self._store.put_fleet(fleet)

    def _tick(self) -> None:
        self._now += TICK_S
        self._provider.now = self._now
        context = self._context
        keys = EnrolmentKeys(context.tokens, context.random, context.clock, FleetClock(), "https://api")
        FleetController(
            self._store,
            {self._provider.name: self._provider},
            waiting=partial(waiting_jobs, context.jobs, shards=1),
            keys=keys,
            now=lambda: self._now,
            random_token=context.random.token,
            time_left_s=lambda: 55.0,
        ).tick()

    def _settled(self) -> Billed:
        """Let every machine work, and bill the ticks of COST_STORED_EVERY_S, in which nothing changes but the time."""
        for machine in self._store.machines(TENANT, FLEET):
            if machine.state is State.READY:
                busy = {"state": State.BUSY, "job_id": "146683a1-cb76-4702-9fef-fcccd32594f1", "claimed_at": self._now}
                self._store.update_machine(machine.model_copy(update={**busy, "version": machine.version + 1}))
        for _ in range(SETTLING_TICKS):
            self._see()
            self._tick()
        self._see()
        return self._bill_tick(lambda: [self._tick() for _ in range(COST_STORED_EVERY_S // TICK_S)])

    def _see(self) -> None:
        for machine in self._store.machines(TENANT, FLEET):
            seen = {"seen_at": self._now, "version": machine.version + 1}
            self._store.update_machine(machine.model_copy(update=seen))

    def _enroll(self) -> None:
        measured = MachineMeasurements(driver="580.65.06", cuda="13.0.1", disk_write_mb_s=850, download_mbit_s=400)
        hardware = EnrollRequest(gpu_model="RTX 4090", gpus=1, vram_gib=24, disk_gib=200, measured=measured)
        self._call("POST /machines/enroll", hardware, Scope.ENROLL)

    def _preflight(self) -> None:
        self._call("POST /machines/preflight", None, Scope.ENROLL)

    def _heartbeat(self) -> None:
        self._now += TICK_S
        self._call("POST /machines/heartbeat", MachineHeartbeat(), Scope.WORKER)

    def _call(self, route: str, body: BaseModel | None, scope: Scope) -> None:
        """Call as the worker of the newest machine. Raises RuntimeError unless the status is 200."""
        machine = max(self._store.machines(TENANT, FLEET), key=lambda one: one.requested_at or 0)
        principal = {"tenant": TENANT, "key_id": "bench", "scopes": scope, "machine": f"{FLEET}/{machine.id}"}
        event = {
            "routeKey": route,
            "headers": {},
            "body": body.model_dump_json() if body else None,
            "requestContext": {"requestId": "bench", "authorizer": {"lambda": principal}},
        }
        answer = dispatch(event, replace(self._context, clock=_At(self._now)), "machines")
        if answer["statusCode"] != 200:
            raise RuntimeError(f"{route} was answered with {answer['statusCode']}: {json.dumps(answer['body'])}")


class _At:
    def __init__(self, now: int) -> None:
        self._at = now

    def now(self) -> int:
        return self._at


def _difference(more: Billed, less: Billed, ticks: int = 1) -> Billed:
    names = sorted({*more, *less} - {"lambda", "api"})
    units = {unit: (more.get(unit, 0) - less.get(unit, 0)) / ticks for unit in names}
    return {unit: count for unit, count in units.items() if count}
