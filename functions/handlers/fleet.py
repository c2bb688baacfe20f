"""Lambda entry point of the fleets' controller: rent missing machines and give others back, each minute and at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from baton.contract.fleets.fleet import MachineState as State
from baton.contract.fleets.registries import RegistryLogin
from functions.api.machines.enrolment_keys import EnrolmentKeys
from functions.api.worlds.seat_settlement import with_newest_progress
from functions.domain.worlds.world_record import WorldRecord
from functions.fleet.machine_states import STARTING
from functions.fleet.ticks.controller import FleetController
from functions.fleet.ticks.demand import completed_jobs, waiting_jobs
from functions.fleet.ticks.tick import TickReport
from functions.handlers.startup import Invocation, start_logging
from functions.handlers.wiring import build_context, build_fleet, build_metrics

start_logging()
_fleet = build_fleet()
context = build_context(dynamodb=_fleet.dynamodb)
store, clock, accounts, drivers = _fleet.store, _fleet.clock, _fleet.accounts, _fleet.drivers
metrics = build_metrics()
ENDING = {State.DRAINING, State.LOST, State.TERMINATING}


def now() -> int:
    """Return the time of the fleets, in the whole seconds of the server in which also the calls of machines count."""
    return clock.at(context.clock.now())


def find_login(tenant: str, image: str | None) -> RegistryLogin | None:
    """Return the login by which a tenant's machines pull an image."""
    return accounts.find_login(tenant, image) if accounts else None


def handler(event: dict[str, Any], lambda_context: Invocation) -> dict[str, Any]:
    """Answer one event of EventBridge Scheduler, or a batch of writes that nudge (functions/storage/stream.py)."""
    controller = FleetController(
        store,
        drivers,
        waiting=partial(waiting_jobs, context.jobs, shards=context.settings.ready_shards),
        keys=EnrolmentKeys(context.tokens, context.random, context.clock, clock, context.settings.fleet_api_url),
        now=now,
        random_token=context.random.token,
        time_left_s=lambda: lambda_context.get_remaining_time_in_millis() / 1000,
        read_jobs=context.jobs.get_many,
        completed=partial(completed_jobs, context.jobs),
        budget=context.settings.fleet_budget,
        find_login=find_login,
        read_world=partial(context.jobs.read, WorldRecord),
        read_progress=partial(with_newest_progress, context),
    )
    report = controller.nudge() if "Records" in event else controller.tick()
    metrics.put(count_machines(report))
    return asdict(report)


def count_machines(report: TickReport) -> Mapping[str, float]:
    """Return the metrics of a tick."""
    groups = {
        "FleetStarting": STARTING,
        "FleetReady": {State.READY},
        "FleetBusy": {State.BUSY},
        "FleetEnding": ENDING,
    }
    counts = {name: sum(report.machines.get(state, 0) for state in states) for name, states in groups.items()}
    # The controller that holds the fence counts its own tick.
    unfinished = report.fleets > 0 and not report.finished and not report.skipped
    ticks = {"FleetTicks": int(report.finished), "FleetTicksUnfinished": int(unfinished)}
    usd = {"FleetUsdPerHour": round(report.usd_per_hour, 4)}
    return {**ticks, **usd, **counts, "FleetUnknownStatuses": report.unknown_statuses}
