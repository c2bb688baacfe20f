"""Recognize an account whose prepaid credit ends soon: the provider would end its machines without a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from functions.domain.errors import WriteConflict
from functions.fleet.records import FleetEvent, Machine, StoredFleet
from functions.fleet.ticks.tick import NO_ANSWER, Tick

LOW_H = 2.0
"""Hours of the present spending at which the credit counts as low."""
EVERY_S = 1800
"""Time between two looks at the credit of a provider whose machines cost money."""
LOOK_S = 300
"""Time from the beginning of each period in which the first tick looks, because some ticks are late."""


def watch_balances(tick: Tick, fleets: Sequence[StoredFleet]) -> None:
    """Tell the fleets whose machines will lose their provider's account, while there is time to add credit."""
    since_s = tick.begun_at % EVERY_S
    machines = [machine for group in tick.machines.values() for machine in group]
    spending = sum_spending(machines) if since_s < LOOK_S else {}
    last = tick.store.last_tick() if spending else None
    if last is not None and last >= tick.begun_at - since_s:
        return
    for provider, usd_per_hour in spending.items():
        driver = tick.drivers.get(provider)
        if driver is None or not tick.may_call(driver, "examine"):
            continue
        # Ticks that do not finish come here again.
        if not tick.store.allow(provider, "balance", tick.now(), EVERY_S // 2):
            continue
        try:
            balance_usd = tick.ask(provider, partial(driver.examine, f"{tick.store.deployment()}-")).balance_usd
        except NO_ANSWER as error:
            tick.fail(f"{provider}: the credit cannot be read: {error}")
            continue
        low = describe_low_balance(balance_usd, usd_per_hour)
        if not low:
            continue
        tick.fail(f"{provider}: {low}")
        event = FleetEvent(at=tick.now(), type="balance.low", reason=f"{provider}: {low}")
        users = {(one.tenant, one.fleet) for one in machines if one.billed and one.provider == provider}
        for fleet in fleets:
            if (fleet.tenant, fleet.spec.name) in users:
                # After a conflict on the fence the log has the warning.
                with suppress(WriteConflict):
                    tick.write(fleet, events=[event])


def sum_spending(machines: Iterable[Machine]) -> Mapping[str, float]:
    """Return the present spending by provider in USD per hour; providers without a billed machine are missing."""
    sums: dict[str, float] = {}
    for one in machines:
        if one.billed:
            sums[one.provider] = sums.get(one.provider, 0.0) + one.usd_per_hour
    return sums


def describe_low_balance(balance_usd: float | None, usd_per_hour: float) -> str:
    """Return why a credit is low, and the remedy; empty for enough credit, and for a provider that bills afterwards."""
    if balance_usd is None or balance_usd > LOW_H * usd_per_hour:
        return ""
    if balance_usd <= 0:
        return f"the credit is {balance_usd:z.2f} USD; add credit, because the provider rents nothing without"
    hours = balance_usd / usd_per_hour
    return (
        f"the credit of {balance_usd:.2f} USD lasts {hours:.1f} h at {usd_per_hour:.2f} USD/h; add credit before the "
        "provider ends the machines"
    )
