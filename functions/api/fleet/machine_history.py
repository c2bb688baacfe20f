"""The call that counts the machines of a fleet over time, from the events of the fleet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton.contract.fleets.fleet import MachineState as State
from baton.contract.fleets.machine_history import MachineHistory, MachineHistoryQuery
from functions.api.fleet.fleet_calls import require_fleet
from functions.api.fleet.store import fleet_time, require_store
from functions.api.http.context import ApiCall, Context
from functions.fleet.machine_states import STARTING
from functions.fleet.records import FleetEvent, Machine

MAX_EVENTS = 4000
"""Events of one answer: a megabyte of the table, as one query reads."""

_STATES = frozenset(State)
_BEFORE = {
    State.READY: "busy",
    State.BUSY: "idle",
    State.DRAINING: "busy",
    State.LOST: "busy",
    State.TERMINATING: "idle",
    State.GONE: "ending",
}
"""Most likely group of a machine before its first event that is read; `starting` before any other state."""


@dataclass(frozen=True)
class Stay:
    """Time that one machine spent in the states of one group."""

    group: str
    begin: int
    end: int


def machine_history(context: Context, call: ApiCall) -> MachineHistory:
    """Return the average number of machines for each span of time, by what the machines did."""
    query: MachineHistoryQuery = call.query
    fleet, store = require_fleet(context, call), require_store(context)
    name, now = fleet.spec.name, fleet_time(context, call)
    since = now - max(1, round(query.hours * 3600))
    events = [one for _, one in store.history(call.tenant, name, since=since, limit=MAX_EVENTS + 1)]
    if len(events) > MAX_EVENTS:
        # The query starts at the oldest event, and only the newest events show the present.
        events = [*reversed(store.events(call.tenant, name, limit=MAX_EVENTS))]
        since = min(events[0].at, now - 1)
    alive = [one for one in store.machines(call.tenant, name) if not one.state.ended]
    return average(find_stays(events, alive, since, now), since, now, query.points)


def find_stays(events: Iterable[FleetEvent], alive: Sequence[Machine], since: int, now: int) -> list[Stay]:
    """Return what each machine did when, from its events since `since`, the oldest first, and its present state."""
    stays: list[Stay] = []
    present: dict[str, tuple[str | None, int]] = {one.id: (_group(one.state), since) for one in alive}
    met: set[str] = set()
    for event in events:
        state = _state(event)
        if event.machine is None or state is None:
            continue
        if event.machine not in met:
            met.add(event.machine)
            first = None if state is State.PLANNED else _BEFORE.get(state, "starting")
            present[event.machine] = (first, since)
        group, begin = present[event.machine]
        if group is not None:
            stays.append(Stay(group, begin, event.at))
        present[event.machine] = (_group(state), event.at)
    return [*stays, *(Stay(group, begin, now) for group, begin in present.values() if group is not None)]


def average(stays: Iterable[Stay], since: int, until: int, points: int) -> MachineHistory:
    """Return the average number of machines in each of `points` equal spans between two times, by group."""
    span_s = (until - since) / points
    found = {group: [0.0] * points for group in ("starting", "idle", "busy", "ending")}
    for stay in stays:
        begin, end = ((min(max(at, since), until) - since) / span_s for at in (stay.begin, stay.end))
        for index in range(int(begin), min(points, int(end) + 1)):
            found[stay.group][index] += max(0.0, min(end, index + 1) - max(begin, index))
    return MachineHistory(
        since=since, until=until, **{group: [round(value, 3) for value in values] for group, values in found.items()}
    )


def _state(event: FleetEvent) -> State | None:
    """Return the state that a machine entered by the event; None for an event of another kind."""
    kind, _, name = event.type.partition(".")
    return State(name) if kind == "machine" and name in _STATES else None


def _group(state: State) -> str | None:
    """Return what a machine in the state does; None for a machine that has ended."""
    if state.ended:
        return None
    if state in STARTING:
        return "starting"
    return {State.READY: "idle", State.BUSY: "busy"}.get(state, "ending")
