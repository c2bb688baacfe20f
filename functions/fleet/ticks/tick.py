"""Hold what all steps of one tick share: the fence, the money, the providers' calls, the report.

Every write is conditional on the controller's fence and on the version of the record.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property, partial
from typing import Protocol, TypeVar

from pydantic import ValidationError

from baton.contract.errors import ErrorCode
from baton.contract.fleets.fleet import MachineState as State
from baton.contract.fleets.money import Budget
from functions.domain.errors import StorageUnavailable, WriteConflict
from functions.domain.records import Job
from functions.fleet.accounts import AccountsUnreadable, no_account
from functions.fleet.breaker import UNEXPLAINED
from functions.fleet.drivers.protocol import Driver, ProviderRefused, ProviderUnavailable, RefusalKind
from functions.fleet.ledger import (
    Bound,
    DeploymentLedger,
    Ledger,
    describe_charge,
    new_warnings,
    reserved_usd,
    tightest,
)
from functions.fleet.lifecycle import BUDGET_SPENT, SMALLEST_USD
from functions.fleet.machine_states import DEADLINES, OVERDUE
from functions.fleet.offers.reputation import after_end, kind_of, quarantine
from functions.fleet.records import FleetEvent, Machine, StoredFleet
from functions.fleet.store import FleetStore

logger = logging.getLogger("baton.fleet")

LEAST_TIME_S = 20
"""Time of the function that must be left before a provider is called: a call ends within its time-out."""
MACHINES_S = 15
"""Time of the function that is kept for the machines and the offers while providers read their lists."""
CREATING_S = 2
"""Time that is kept until the first create while providers read their offers."""
READING_AT_LEAST_S = 5.0
HANG_S = 14.0
"""Duration of a failed call after which the tick asks the provider no more: a few such calls would use up the tick.

A call of a provider without an answer lasts 15 s. One dead host of ssh ends a call after 10 s and says nothing about
the other hosts."""
LONGEST_PAUSE_S = 15
"""Longest interval between two calls that a tick waits for instead of leaving the call to the next tick."""
DESTROY_EVERY_S = 30
SHOWN_ID, SHOWN_JOBS = 8, 8
"""Characters of a job's id, and jobs, in an event."""
NO_ANSWER = Exception
"""Failures of a driver's call: any exception, because a driver that meets a value which it does not foresee must not
end the tick, which also looks after the machines of all other providers."""
FORESEEN = (ProviderUnavailable, ProviderRefused, ValidationError)
"""Failures that are no fault of a driver; ValidationError: the provider's answer has impossible values."""
OUTGOING = frozenset({State.DRAINING, State.LOST, State.TERMINATING})
OF_ONE_FLEET = frozenset({RefusalKind.IMAGE, RefusalKind.INVALID})
"""Refusals that follow from the document of a fleet; any other refusal hits every fleet."""


T = TypeVar("T")
ReadJobs = Callable[[Sequence[str]], Sequence[Job]]


class MachineKeys(Protocol):
    """The API keys of machines."""

    def issue(self, machine: Machine, expires_at: int) -> tuple[str, Mapping[str, str]]:
        """Store a new enrolment key; return its id and the environment of the machine, which contains the key."""

    def revoke(self, key_id: str) -> None:
        """Revoke a key; idempotent."""


@dataclass
class TickReport:
    """Counters of one tick, for metrics and the summary event."""

    skipped: bool = False
    """True if another controller held the fence."""
    finished: bool = False
    """True if the tick looked after every fleet; False also if there is no fleet."""
    fleets: int = 0
    machines: dict[str, int] = field(default_factory=dict)
    created: int = 0
    destroyed: int = 0
    orphans: int = 0
    unknown_statuses: int = 0
    """Machines whose status by their provider is unknown to the driver."""
    usd_per_hour: float = 0.0
    failures: list[str] = field(default_factory=list)


class Tick:
    """State of one tick under one fence.

    time_left_s: time until the function is ended. pause: sleeps for a number of seconds. read_jobs: returns the jobs
    with these ids. budget: of all fleets of the deployment together.
    """

    def __init__(
        self,
        store: FleetStore,
        drivers: Mapping[str, Driver],
        fence: int,
        report: TickReport,
        *,
        keys: MachineKeys,
        now: Callable[[], int],
        time_left_s: Callable[[], float],
        pause: Callable[[float], object],
        read_jobs: ReadJobs,
        budget: Budget | None = None,
    ) -> None:
        self.store = store
        self._configured = drivers
        self._unreadable = ""
        self.fence = fence
        self.report = report
        self.keys = keys
        self.now = now
        self.begun_at = now()
        self._time_left_s = time_left_s
        self._pause = pause
        self.read_jobs = read_jobs
        self.machines: dict[tuple[str, str], list[Machine]] = {}
        """Watched machines of all fleets, by tenant and fleet."""
        self.jobs: dict[str, Job] = {}
        """Jobs that rent their own machines, by id."""
        self.unread_usd = 0.0
        """Reservations of fleets whose records cannot be read, as of the last tick that could read them."""
        self._budget = budget
        self._spending: DeploymentLedger | None = None
        self._ledgers: dict[tuple[str, str], Ledger] = {}
        self._refused: dict[tuple[str, tuple[str, str] | None], str] = {}
        self._silent: set[str] = set()

    @cached_property
    def drivers(self) -> Mapping[str, Driver]:
        """Drivers by provider; without those of accounts that cannot be read, because all machines also need orders."""
        found: dict[str, Driver] = {}
        try:
            for provider in self._configured:
                # A logout may come in between.
                if (driver := self._configured.get(provider)) is not None:
                    found[provider] = driver
        except NO_ANSWER as error:
            foreseen = isinstance(error, AccountsUnreadable | StorageUnavailable)
            told = str(error) if foreseen else f"{type(error).__name__}, and the log has the cause"
            self._unreadable = f"the accounts at providers cannot be read: {told}"
            self.fail(self._unreadable)
        return found

    def no_driver(self, provider: str) -> str:
        """Return why `drivers` has no driver of a provider."""
        return f"{provider}: {self._unreadable}" if self._unreadable else no_account(provider)

    @property
    def in_time(self) -> bool:
        """True if time is left for a call of a provider."""
        return self._time_left_s() >= LEAST_TIME_S

    @property
    def reading_s(self) -> float:
        """Return the time in seconds for the lists of all providers, after which the machines need their time."""
        return max(READING_AT_LEAST_S, self._time_left_s() - LEAST_TIME_S - MACHINES_S)

    @property
    def answer_s(self) -> float:
        """Return the time in seconds for any other read, after which a create has its time."""
        return max(READING_AT_LEAST_S, self._time_left_s() - LEAST_TIME_S - CREATING_S)

    def call(self, provider: str, send: Callable[[], T], answered: Callable[[T], bool] = lambda _: True) -> T:
        """Return the outcome of one call; silence the provider if the call fails after HANG_S.

        answered: returns False for an outcome that is a failure.
        """
        left_s, failed = self._time_left_s(), True
        try:
            outcome = send()
            failed = not answered(outcome)
            return outcome
        finally:
            if failed and left_s - self._time_left_s() >= HANG_S:
                self.silence(provider)

    def silence(self, provider: str) -> None:
        """Ask a provider for nothing more in this tick, because other providers and the last writes need the time."""
        self._silent.add(provider)
        told = f"{ErrorCode.PROVIDER_UNAVAILABLE}: no answer in this tick; the next tick asks again"
        self._refused.setdefault((provider, None), told)

    def take_silent(self) -> set[str]:
        """Return the silenced providers, and permit calls but starts again."""
        silent, self._silent = self._silent, set()
        return silent

    def ask_together(self, reads: Mapping[str, Callable[[], T]], within_s: float) -> dict[str, Future[T]]:
        """Send one read to each provider at once; return the outcomes, ProviderUnavailable for an answer that is late.

        A read that still waits for its provider ends by its own time-out; nothing follows from its answer.
        """
        if not reads:
            return {}
        pool = ThreadPoolExecutor(len(reads), thread_name_prefix="provider")
        answers = {provider: pool.submit(self.call, provider, read) for provider, read in reads.items()}
        wait(answers.values(), within_s)
        pool.shutdown(wait=False)
        for provider, answer in answers.items():
            if not answer.done():
                self.silence(provider)
                answers[provider] = Future()
                answers[provider].set_exception(ProviderUnavailable("no answer in time"))
        return answers

    def ask(self, provider: str, read: Callable[[], T]) -> T:
        """Return the answer to one read. Raises the driver's exception, or ProviderUnavailable for a late answer."""
        return self.ask_together({provider: read}, self.answer_s)[provider].result()

    def may_call(self, driver: Driver, call: str) -> bool:
        """Return True if the provider answers, time is left, and the provider's minimum interval has passed.

        A short interval passes here, because machines that wait for their destroy call cost money for each tick.
        """
        interval_s = driver.min_interval_s.get(call, 0.0)
        if driver.name in self._silent or not self.in_time:
            return False
        if interval_s == 0.0 or self.store.allow(driver.name, call, self.now(), interval_s):
            return True
        pause_s = math.ceil(interval_s)
        if pause_s > LONGEST_PAUSE_S or self._time_left_s() < LEAST_TIME_S + pause_s:
            return False
        self._pause(pause_s)
        return self.store.allow(driver.name, call, self.now(), interval_s)

    def destroy(self, machine: Machine) -> Machine:
        """Ask the provider for the end of a machine and of its duplicates, again and again until absence is proved."""
        handles = list(machine.duplicates)
        if machine.state is State.TERMINATING and machine.handle:
            handles.append(machine.handle)
        if machine.destroy_at is not None and self.now() < machine.destroy_at + DESTROY_EVERY_S:
            return machine
        asked = [handle for handle in handles if self._ask_destroy(machine.provider, handle)]
        if not asked:
            return machine
        stored = machine.model_copy(update={"destroy_at": self.now(), "version": machine.version + 1})
        try:
            self.store.write(self.fence, machine.tenant, machine.fleet, machine=stored)
        except WriteConflict:
            return machine
        return stored

    def _ask_destroy(self, provider: str, handle: str) -> bool:
        driver = self.drivers.get(provider)
        if driver is None or not self.may_call(driver, "destroy"):
            return False
        try:
            accepted = self.call(provider, partial(driver.destroy, handle), bool)
        except NO_ANSWER as error:
            self.fail(f"{provider}: machine {handle} cannot be destroyed yet: {error}")
            return False
        self.report.destroyed += accepted
        return accepted

    def refuse(self, provider: str, kind: RefusalKind, reason: str, fleet: StoredFleet | None = None) -> str:
        """Ask a provider for no more machines in this tick, after a refusal of the account; return the reason.

        fleet: the fleet whose request was refused; None for a call that concerns no fleet.
        """
        told = reason if reason.startswith(kind) else f"{kind}: {reason}"
        place = _place(fleet) if fleet is not None and kind in OF_ONE_FLEET else None
        self._refused[provider, place] = told
        return told

    def refusal(self, provider: str, fleet: StoredFleet) -> str:
        """Return why the provider is asked no more in this tick for machines of the fleet; empty if it may be asked."""
        return self._refused.get((provider, None)) or self._refused.get((provider, _place(fleet)), "")

    def ledger(self, fleet: StoredFleet) -> Ledger:
        """Return the ledger, which only the holder of the fence writes."""
        place = _place(fleet)
        if place not in self._ledgers:
            self._ledgers[place] = self.store.ledger(*place)
        return self._ledgers[place]

    def read_machines(self, fleet: StoredFleet) -> list[Machine]:
        """Return the watched machines of a fleet, and keep the ledger that the same request reads.

        Raises DamagedRecord.
        """
        self._ledgers[_place(fleet)], machines = self.store.holdings(*_place(fleet))
        return list(machines)

    @property
    def spending(self) -> DeploymentLedger:
        """Money of all fleets, which only the holder of the fence writes."""
        if self._spending is None:
            self._spending = self.store.spending()
        return self._spending

    def tightest(self, fleet: StoredFleet, spent: Ledger, group: Sequence[Machine]) -> tuple[Bound, float]:
        """Return the bound with the least room, of the fleet or of the deployment, and its room in USD.

        spent, group: ledger and machines of the fleet, which the tick may not have stored yet.
        """
        now = self.now()
        own = tightest(fleet.spec.budget, spent, group, now)
        if self._budget is None:
            return own
        others = [one for place, found in self.machines.items() if place != _place(fleet) for one in found]
        spending = self.spending.follow(self.ledger(fleet), spent, now)
        bound, room_usd = tightest(self._budget, spending, [*group, *others], now)
        return min(own, (bound, room_usd - self.unread_usd), key=lambda found: found[1])

    def settle(self) -> None:
        """Store the reservations of all machines, for people who look at the budget of the deployment."""
        reserved = self.unread_usd + sum(reserved_usd(group) for group in self.machines.values())
        if self._budget is None or abs(reserved - self.spending.reserved_usd) < SMALLEST_USD:
            return
        updates = {"reserved_usd": reserved, "version": self.spending.version + 1}
        # After a conflict on the fence the next tick stores the sum.
        with suppress(WriteConflict):
            self.store.write(self.fence, "", "", spending=self.spending.model_copy(update=updates))

    def retire(self, fleet: StoredFleet, spending: DeploymentLedger) -> None:
        """Store a fleet that retires. Raises WriteConflict."""
        self._spending = None
        self.store.retire(self.fence, fleet, spending)
        self._spending = spending

    def write(
        self,
        fleet: StoredFleet,
        *,
        machine: Machine | None = None,
        ledger: Ledger | None = None,
        events: Sequence[FleetEvent] = (),
    ) -> None:
        """Store all values or none. Raises WriteConflict."""
        place = _place(fleet)
        spending, warnings = self._spend(fleet, ledger)
        events = [*self._warn(fleet, warnings), *events]
        try:
            self.store.write(self.fence, *place, machine=machine, ledger=ledger, spending=spending, events=events)
        except WriteConflict:
            self._ledgers.pop(place, None)
            self._spending = None
            raise
        if ledger is not None:
            self._ledgers[place] = ledger
        if spending is not None:
            self._spending = spending

    def _spend(self, fleet: StoredFleet, ledger: Ledger | None) -> tuple[DeploymentLedger | None, list[Bound]]:
        """Return the spending of all fleets after that of one fleet, None for no change, and new warnings."""
        if ledger is None or ledger.spent_usd == self.ledger(fleet).spent_usd:
            return None, []
        now = self.now()
        after, warnings = self.spending.follow(self.ledger(fleet), ledger, now), list[Bound]()
        if self._budget is not None:
            after, warnings = new_warnings(self._budget, after, now)
        return after.model_copy(update={"version": self.spending.version + 1}), warnings

    def save(self, fleet: StoredFleet, before: Machine, after: Machine, spent: Ledger) -> Machine:
        """Store a machine with its money and its event; return the stored machine, or `before` after a conflict."""
        now, ledger = self.now(), self.ledger(fleet)
        spent, warnings = new_warnings(fleet.spec.budget, spent, now)
        events = self._warn(fleet, warnings)
        if after.state is not before.state:
            if after.reason == BUDGET_SPENT and before.state not in OUTGOING:
                bound, _ = self.tightest(fleet, spent, self.machines[_place(fleet)])
                events.append(tell_bound(bound, "budget.drained", now, machine=after.id))
            events.append(after.event)
            if after.state is State.GONE and (told := describe_charge(after)):
                events.append(
                    FleetEvent(at=now, type="charge.differs", machine=after.id, reason=told, usd=after.spent_usd)
                )
        if after.told_since != before.told_since:
            reason = OVERDUE[after.state]
            events.append(
                FleetEvent(at=now, type="machine.overdue", machine=after.id, reason=reason, usd=after.spent_usd)
            )
        stored = after.model_copy(update={"version": before.version + 1})
        if after.state.ended and not before.state.ended:
            # Before the write, because no later tick looks after an ended machine.
            self._revoke_keys(after)
        try:
            self.write(
                fleet,
                machine=stored,
                ledger=None if spent == ledger else spent.model_copy(update={"version": ledger.version + 1}),
                events=events,
            )
        except WriteConflict:
            # The machine's worker has written in between.
            return before
        self._quarantine(before, stored)
        if stored.state is State.GONE and before.state is not State.GONE and stored.reason != UNEXPLAINED:
            known = self.store.reputations().get(kind_of(stored.offer))
            self.store.put_reputation(self.fence, after_end(known, stored))
        return stored

    def _warn(self, fleet: StoredFleet, passed: Sequence[Bound]) -> list[FleetEvent]:
        """Return the warnings of bounds, with the jobs of the fleet that would lose their work."""
        if not passed:
            return []
        since = {one.job_id: one.claimed_at for one in self.machines.get(_place(fleet), ()) if one.state is State.BUSY}
        jobs = self.read_jobs([job_id for job_id in since if job_id is not None])
        # The checkpoints of a seat are those of its elastic job.
        elastic = self.read_jobs([job.spec.seat.job for job in jobs if job.spec.seat is not None])
        saved = {job.id for job in elastic if job.checkpoint_step is not None}
        unsaved = [
            (job.id, since[job.id] or 0)
            for job in jobs
            if job.attempt_step is None and not (job.spec.seat is not None and job.spec.seat.job in saved)
        ]
        return [tell_bound(one, "budget.warning", self.now(), unsaved=unsaved) for one in passed]

    def _revoke_keys(self, machine: Machine) -> None:
        for key in (machine.worker_key, machine.enrolment_key):
            if key:
                self.keys.revoke(key)

    def _quarantine(self, before: Machine, after: Machine) -> None:
        """Avoid a host that did not boot, or that vanished with a job."""
        if before.state is after.state:
            return
        starting = before.state in (State.BOOTING, State.REGISTERED)
        # A machine that starts can also end with its fleet, its budget or its price.
        late = starting and after.reason == DEADLINES[before.state].reason
        if not late and after.state is not State.LOST:
            return
        found = quarantine(after, "boot" if starting else "loss", self.store.quarantined(0), self.now())
        if found is not None:
            self.store.put_quarantine(found)

    def fail(self, message: str) -> None:
        """Report a failure in one line, which does not end the tick; log the traceback if a driver is at fault."""
        message = " ".join(message.split())
        cause = sys.exception()
        logger.warning("%s", message, exc_info=None if isinstance(cause, FORESEEN) else cause)
        self.report.failures.append(message)


def tell(error: Exception) -> str:
    """Return the failure of a driver's call in one line: stable code, cause, remedy."""
    cause = " ".join(str(error).split())
    if isinstance(error, ProviderRefused):
        return cause
    return f"{ErrorCode.PROVIDER_UNAVAILABLE}: {cause}; the next tick asks again"


def tell_bound(
    bound: Bound, type_: str, now: int, machine: str | None = None, unsaved: Sequence[tuple[str, int]] = ()
) -> FleetEvent:
    """Return the event of a bound that the spending comes near to or has reached.

    unsaved: jobs without a checkpoint since their start on a machine, and the time of that start.
    """
    reason = f"{bound.label} {bound.cap_usd:g} {bound.period}".strip()
    if unsaved:
        named = [f"{job_id[:SHOWN_ID]} since {datetime.fromtimestamp(at, UTC):%H:%M} UTC" for job_id, at in unsaved]
        more = f" and {len(named) - SHOWN_JOBS} more" if len(named) > SHOWN_JOBS else ""
        lost = f"jobs without a checkpoint lose their work: {', '.join(named[:SHOWN_JOBS])}{more}"
        reason = f"{reason}; when it is spent, machines save a checkpoint and go; {lost}"
    return FleetEvent(at=now, type=type_, machine=machine, reason=reason, usd=bound.spent_usd)


def _place(fleet: StoredFleet) -> tuple[str, str]:
    return fleet.tenant, fleet.spec.name
