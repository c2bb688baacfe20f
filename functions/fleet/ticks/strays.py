"""Adopt machines of this deployment that no record explains, so that a ledger counts their cost until they are gone.

An adopted machine is `terminating` from its first record on: the tick destroys the machine, counts its cost, and writes
its receipt as of every other machine.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.contract.fleets.fleet import FleetSpec
from baton.contract.fleets.fleet import MachineState as State
from functions.fleet.breaker import UNEXPLAINED
from functions.fleet.machine_states import ORPHAN_WATCH_S
from functions.fleet.records import (
    STRAYS_NAME,
    STRAYS_TENANT,
    Machine,
    Offer,
    OrphanMachine,
    Sighting,
    StoredFleet,
    token_prefix,
)
from functions.fleet.store import FleetStore

LONGEST_UNSEEN_S = ORPHAN_WATCH_S
"""Longest time before the first sighting that is counted. A wrong time of creation must not use up a budget."""
SEARCHED_ENDED = 1000
"""Newest ended machines of a fleet among which an earlier record of the machine is found."""
SPEC = FleetSpec.model_validate(
    {
        "name": STRAYS_NAME,
        "providers": ["loopback"],
        "max_usd_per_hour": 1_000_000,
        "budget": {"total_usd": 1_000_000},
    }
)
"""Document of the fleet of strays, which is stopped and rents nothing."""


def adopt(
    store: FleetStore, fleets: Sequence[StoredFleet], orphan: OrphanMachine, seen: Sighting, now: int
) -> tuple[StoredFleet, Machine]:
    """Return the fleet that pays for a machine, and the machine's first record, which the caller stores.

    Stores the fleet of strays if no other fleet pays. fleets: all fleets of all tenants. Raises WriteConflict.
    """
    fleet, earlier = _find_payer(store, fleets, orphan)
    if fleet is None:
        fleet = StoredFleet(tenant=STRAYS_TENANT, spec=SPEC, version=1, stopped=True, created_at=now, updated_at=now)
        store.put_fleet(fleet)
    first = orphan.first_seen_at
    begun = min(first, max(seen.created_at or first, first - LONGEST_UNSEEN_S))
    # The receipt of an earlier record has the cost until then.
    counted = begun if earlier is None else max(begun, earlier.priced_until or begun)
    price = earlier.usd_per_hour if earlier and seen.usd_per_hour is None else seen.usd_per_hour or 0.0
    return fleet, Machine(
        id=orphan.token,
        tenant=fleet.tenant,
        fleet=fleet.spec.name,
        version=1,
        state=State.TERMINATING,
        since=now,
        reason=UNEXPLAINED,
        offer=Offer(provider=orphan.provider, ref=orphan.handle, machine_ref=seen.machine_ref, usd_per_hour=price),
        cap_usd_per_hour=fleet.spec.max_usd_per_hour,
        handle=orphan.handle,
        created_at=begun,
        ends_by=now,
        usd_per_hour=price,
        priced_until=counted,
        charged_before_usd=earlier.charged_usd or 0.0 if earlier else 0.0,
    )


def _find_payer(
    store: FleetStore, fleets: Sequence[StoredFleet], orphan: OrphanMachine
) -> tuple[StoredFleet | None, Machine | None]:
    """Return the fleet that the token names, None for none or several, and the ended record of the machine itself.

    Fleets of two tenants can have the same name, and long names the same beginning; then an ended record decides. A
    fleet whose live record has the token, for a machine of another provider, cannot hold a second one.
    """
    named = f"{orphan.token.rpartition('-')[0]}-"
    candidates = [
        one
        for one in fleets
        if token_prefix(store.deployment(), one.spec.name) == named
        and store.machine(one.tenant, one.spec.name, orphan.token) is None
    ]
    strays = next((one for one in fleets if one.tenant == STRAYS_TENANT), None)
    places = [(one, one.tenant, one.spec.name) for one in candidates]
    for fleet, tenant, name in [*places, (strays, STRAYS_TENANT, STRAYS_NAME)]:
        for one in store.ended(tenant, name, limit=SEARCHED_ENDED):
            if (one.id, one.provider) == (orphan.token, orphan.provider):
                return fleet, one if one.handle == orphan.handle else None
    return candidates[0] if len(candidates) == 1 else strays, None
