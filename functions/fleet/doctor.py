"""Find what costs money without a use, what has stopped working, and repair what only a call of the provider needs.

The doctor reads each provider's list before the records: the intent of a create is stored before the call, therefore
every machine of a list that is not a stray has a record by then.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial

from baton.contract.fleets.doctor import DoctorFinding, FindingCode, FixOutcome
from baton.contract.fleets.fleet import MachineState as State
from functions.domain.errors import StorageUnavailable, WriteConflict
from functions.fleet.accounts import no_account
from functions.fleet.drivers.protocol import AccountReport, Driver, Leftover, ProviderRefused
from functions.fleet.records import Inventory, Machine, OrphanMachine, Sighting, StoredFleet, token_prefix
from functions.fleet.store import DamagedRecord, FleetStore
from functions.fleet.ticks.balances import describe_low_balance, sum_spending
from functions.fleet.ticks.strays import adopt
from functions.fleet.ticks.tick import FORESEEN, NO_ANSWER

logger = logging.getLogger("baton.fleet")

ANSWER_WITHIN_S = 10.0
"""Time that all providers have together, below the time-outs of the function and of API Gateway."""
BEGIN_WITHIN_S = 12.0
"""Time after which no fix begins, so that also a slow one ends before the caller stops waiting."""
LATE_S = 300
"""Time without a finished tick after which the controller counts as late."""
LINGERS_S = 600
"""Time after the order to end a machine at which a machine that is still listed becomes a finding."""
SHOWN_NAMES = 8


@dataclass(frozen=True)
class ProviderExamination:
    """Answers of one provider; `refused` or `silent` says why answers are missing."""

    provider: str
    inventory: Inventory | None = None
    report: AccountReport | None = None
    refused: str = ""
    silent: str = ""


@dataclass(frozen=True)
class Examination:
    """Findings, and the calls that fix them, by the id of the finding."""

    providers: Sequence[str]
    findings: Sequence[DoctorFinding]
    fixes: Mapping[str, Fix]


@dataclass(frozen=True)
class Fix:
    """Call that fixes a finding. `outcome` is told after the call."""

    driver: Driver
    interval: str
    call: Callable[[], object]
    outcome: str


@dataclass
class _Findings:
    found: list[DoctorFinding] = field(default_factory=list)
    fixes: dict[str, Fix] = field(default_factory=dict)

    def add(
        self,
        code: FindingCode,
        detail: str,
        *,
        provider: str = "",
        subject: str = "",
        remedy: str = "",
        fix: Fix | None = None,
    ) -> None:
        parts = [code.value, *([provider] if provider else []), *([subject] if subject else [])]
        one = DoctorFinding(id="/".join(parts), code=code, provider=provider, detail=detail, fix=remedy)
        self.found.append(one)
        if fix is not None:
            self.fixes[one.id] = fix


def examine(store: FleetStore, drivers: Mapping[str, Driver], now: int) -> Examination:
    """Examine all providers of the deployment, their machines and the controller; change nothing."""
    drivers, prefix = dict(drivers), f"{store.deployment()}-"
    examined = _ask_all(drivers, prefix, now)
    damaged: list[DamagedRecord] = []
    fleets = store.fleets(damaged=damaged)
    machines = _read_machines(store, fleets, damaged)
    found = _Findings()
    _find_late_controller(found, store, fleets, now)
    unsure = tuple(token_prefix(store.deployment(), one.fleet) for one in damaged)
    live = _KnownTokens(frozenset(machine.id for machine in machines), unsure)
    for error in damaged:
        detail = f"{error}; nobody looks after its machines until the record is mended"
        found.add(FindingCode.DAMAGED_RECORD, detail, subject=f"{error.tenant}.{error.fleet}")
    for one in examined:
        driver = drivers[one.provider]
        _find_strays(found, one, live, partial(_fix_stray, store, driver, now))
        _find_leftovers(found, driver, one, live)
        _find_unknown_statuses(found, one)
        _find_in_account(found, one, sum_spending(machines).get(one.provider, 0.0))
    _find_lingering(found, drivers, machines, now)
    missing = {name for one in fleets if not one.stopped for name in one.spec.providers} - set(drivers)
    for name in sorted(missing):
        users = ", ".join(one.spec.name for one in fleets if name in one.spec.providers)
        found.add(FindingCode.ACCOUNT_MISSING, f"{no_account(name)} (fleets: {users})", provider=name)
    order = list(FindingCode)
    findings = sorted(found.found, key=lambda one: (order.index(one.code), one.id))
    return Examination([one.provider for one in examined], findings, found.fixes)


@dataclass(frozen=True)
class _KnownTokens:
    """Tokens of machines with a record, and of machines whose record may be damaged."""

    ids: frozenset[str]
    prefixes: tuple[str, ...]

    def __contains__(self, token: object) -> bool:
        return token in self.ids or (isinstance(token, str) and token.startswith(self.prefixes))


def _read_machines(store: FleetStore, fleets: Sequence[StoredFleet], damaged: list[DamagedRecord]) -> list[Machine]:
    """Return the machines of all fleets whose records can be read; append the others to `damaged`."""
    found: list[Machine] = []
    for fleet in fleets:
        try:
            found += store.machines(fleet.tenant, fleet.spec.name)
        except DamagedRecord as error:
            damaged.append(error)
    return found


def fix(store: FleetStore, drivers: Mapping[str, Driver], ids: Iterable[str], now: int) -> list[FixOutcome]:
    """Examine again, and fix those of the findings that still exist, as long as the caller waits."""
    begin = time.monotonic()
    fixes = examine(store, drivers, now).fixes
    return [
        _fix(store, fixes.get(one), one, now, in_time=time.monotonic() - begin < BEGIN_WITHIN_S)
        for one in dict.fromkeys(ids)
    ]


def _fix(store: FleetStore, found: Fix | None, id_: str, now: int, *, in_time: bool) -> FixOutcome:
    if found is None:
        return FixOutcome(id=id_, fixed=False, detail="nothing is left to fix, or a person must do it")
    if not in_time:
        return FixOutcome(id=id_, fixed=False, later=True, detail="the time of one call is over")
    interval_s = found.driver.min_interval_s.get(found.interval, 0.0)
    if interval_s and not store.allow(found.driver.name, found.interval, now, interval_s):
        detail = f"{found.driver.name} accepts one such call every {interval_s:g} s"
        return FixOutcome(id=id_, fixed=False, later=True, detail=detail)
    try:
        accepted = found.call()
    except WriteConflict:
        return FixOutcome(id=id_, fixed=False, later=True, detail="the controller stored a record at the same moment")
    except StorageUnavailable:
        raise
    except NO_ANSWER as error:
        return FixOutcome(id=id_, fixed=False, detail=_tell(found.driver.name, error))
    if accepted is False:
        return FixOutcome(id=id_, fixed=False, detail=f"{found.driver.name} did not accept the call; repeat it")
    return FixOutcome(id=id_, fixed=True, detail=found.outcome)


def _ask_all(drivers: Mapping[str, Driver], prefix: str, now: int) -> list[ProviderExamination]:
    """Ask all providers at the same time, because one that does not answer must not hide the others."""
    names = sorted(drivers)
    if not names:
        return []
    pool = ThreadPoolExecutor(max_workers=len(names))
    running = {name: pool.submit(_ask, name, drivers[name], prefix, now) for name in names}
    done, _ = wait(running.values(), ANSWER_WITHIN_S)
    pool.shutdown(wait=False, cancel_futures=True)
    silent = f"no answer within {ANSWER_WITHIN_S:g} s"
    return [one.result() if one in done else ProviderExamination(name, silent=silent) for name, one in running.items()]


def _ask(name: str, driver: Driver, prefix: str, now: int) -> ProviderExamination:
    inventory, report, refused, silent = None, None, "", ""
    try:
        inventory = driver.inventory(prefix, now)
        report = driver.examine(prefix)
    except ProviderRefused as error:
        refused = str(error)
    except NO_ANSWER as error:
        silent = _tell(name, error)
    return ProviderExamination(name, inventory, report, refused, silent)


def _tell(provider: str, error: Exception) -> str:
    """Return the failure of a driver's call in words; log the traceback if the driver is at fault."""
    if isinstance(error, (*FORESEEN, DamagedRecord)):
        return str(error)
    logger.warning("the driver of %s failed", provider, exc_info=error)
    return f"its driver failed with {type(error).__name__}, and the log has the cause"


def _find_strays(
    found: _Findings, one: ProviderExamination, live: Container[str], fix_of: Callable[[Sighting], Fix]
) -> None:
    for seen in one.inventory.sightings if one.inventory else ():
        if seen.token in live:
            continue
        price = "" if seen.usd_per_hour is None else f", {seen.usd_per_hour:g} USD/h"
        detail = f"{one.provider} lists the machine {seen.handle} ({seen.token}{price}), and no record explains it"
        found.add(
            FindingCode.STRAY_MACHINE,
            detail,
            provider=one.provider,
            subject=seen.handle,
            remedy=f"destroys the machine {seen.handle}",
            fix=fix_of(seen),
        )


def _fix_stray(store: FleetStore, driver: Driver, now: int, seen: Sighting) -> Fix:
    """Return the call that ends a stray, after a record by which the tick counts the cost until its absence."""

    def end() -> bool:
        orphan = store.orphans().get((driver.name, seen.handle)) or OrphanMachine(
            provider=driver.name, handle=seen.handle, token=seen.token, first_seen_at=now, last_seen_at=now
        )
        _, machine = adopt(store, store.fleets(), orphan, seen, now)
        store.update_machine(machine, [machine.event])
        return driver.destroy(seen.handle)

    return Fix(driver, "destroy", end, f"{driver.name} ends the machine")


def _find_leftovers(found: _Findings, driver: Driver, one: ProviderExamination, live: Container[str]) -> None:
    listed = {seen.handle for seen in one.inventory.sightings} if one.inventory else set()
    for leftover in one.report.leftovers if one.report else ():
        # A stopped machine that the provider lists is a stray already.
        if leftover.token in live or leftover.handle in listed:
            continue
        price = "" if leftover.usd_per_hour is None else f", {leftover.usd_per_hour:g} USD/h"
        detail = f"{one.provider} bills the {leftover.kind} {leftover.handle} ({leftover.token}{price})"
        found.add(
            FindingCode.LEFTOVER,
            detail,
            provider=one.provider,
            subject=leftover.handle,
            remedy=f"deletes the {leftover.kind} {leftover.handle}",
            fix=_remove(driver, leftover),
        )


def _find_unknown_statuses(found: _Findings, one: ProviderExamination) -> None:
    odd = [seen for seen in one.inventory.sightings if seen.unknown_status] if one.inventory else []
    for status in sorted({seen.unknown_status for seen in odd}):
        machines = [seen for seen in odd if seen.unknown_status == status]
        many = "1 machine" if len(machines) == 1 else f"{len(machines)} machines"
        detail = (
            f"{one.provider} gives {many} the status {status}, which Baton does not know: {_name_some(machines)}; "
            "they count as running and are paid: look at the provider, and update Baton"
        )
        found.add(FindingCode.STATUS_UNKNOWN, detail, provider=one.provider, subject=status)


def _find_in_account(found: _Findings, one: ProviderExamination, usd_per_hour: float) -> None:
    if one.refused:
        detail = f"{one.provider} refuses the stored account: {one.refused}"
        if "fleet login" not in detail:
            detail = f"{detail.removesuffix('.')}. Store a valid account with `baton fleet login {one.provider}`."
        found.add(FindingCode.ACCOUNT_REFUSED, detail, provider=one.provider)
    if one.silent:
        detail = f"{one.provider} did not answer: {one.silent}"
        found.add(FindingCode.PROVIDER_SILENT, detail, provider=one.provider)
    if one.inventory is not None and not one.inventory.complete:
        detail = f"the list of machines of {one.provider} is incomplete; strays may be missing here"
        found.add(FindingCode.PROVIDER_SILENT, detail, provider=one.provider)
    if one.report is None:
        return
    for number, problem in enumerate(one.report.problems, 1):
        found.add(FindingCode.ACCOUNT_PROBLEM, problem, provider=one.provider, subject=str(number))
    if one.report.foreign:
        names = _name_some(one.report.foreign)
        others = len(one.report.foreign)
        told = "machine is not Baton's and is" if others == 1 else "machines are not Baton's and are"
        detail = f"{others} {told} left alone at {one.provider}: {names}"
        found.add(FindingCode.FOREIGN_MACHINES, detail, provider=one.provider)
    low = describe_low_balance(one.report.balance_usd, usd_per_hour)
    if low:
        found.add(FindingCode.BALANCE_LOW, f"{one.provider}: {low}", provider=one.provider)


def _find_lingering(found: _Findings, drivers: Mapping[str, Driver], machines: Iterable[Machine], now: int) -> None:
    for one in machines:
        if one.state is not State.TERMINATING or one.handle is None or now < one.since + LINGERS_S:
            continue
        minutes = (now - one.since) // 60
        detail = f"{one.provider} was asked {minutes} minutes ago to end {one.id} ({one.usd_per_hour:g} USD/h)"
        driver = drivers.get(one.provider)
        found.add(
            FindingCode.LINGERING_MACHINE,
            f"{detail}; its absence is not proved yet",
            provider=one.provider,
            subject=one.handle,
            remedy=f"asks {one.provider} again to destroy {one.handle}" if driver else "",
            fix=_destroy(driver, one.handle) if driver else None,
        )


def _find_late_controller(found: _Findings, store: FleetStore, fleets: Sequence[StoredFleet], now: int) -> None:
    if not fleets:
        return
    finished = store.last_tick()
    since = min(one.created_at for one in fleets) if finished is None else finished
    if now - since >= LATE_S:
        detail = (
            f"no tick of the fleets' controller has succeeded for {(now - since) // 60} minutes; no machine is rented "
            "or given back. Read the log of the function fleet; machines end themselves without orders."
        )
        found.add(FindingCode.CONTROLLER_LATE, detail)


def _destroy(driver: Driver, handle: str) -> Fix:
    return Fix(driver, "destroy", lambda: driver.destroy(handle), f"{driver.name} ends the machine")


def _remove(driver: Driver, leftover: Leftover) -> Fix:
    return Fix(
        driver, "destroy", lambda: driver.remove_leftover(leftover), f"{driver.name} deletes the {leftover.kind}"
    )


def _name_some(sightings: Sequence[Sighting]) -> str:
    names = [one.token or one.handle for one in sightings]
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return ", ".join(names[:SHOWN_NAMES]) + more
