"""Start the machines that a fleet lacks: quotes, the reservation of the money, the intent, the one create call."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress

from baton.contract.fleets.fleet import MachineState as State
from functions.domain.errors import WriteConflict
from functions.domain.records import Job
from functions.fleet import lifecycle
from functions.fleet.accounts import no_account
from functions.fleet.breaker import FAILURES, last_begin
from functions.fleet.drivers.protocol import (
    Ambiguous,
    Created,
    CreateIntent,
    CreateResult,
    Driver,
    ProviderRefused,
)
from functions.fleet.ledger import Bound, need_usd, release, tell_shortage
from functions.fleet.machine_states import MAYBE_EXISTING
from functions.fleet.offers.known_offers import rank_known
from functions.fleet.offers.offer_ranking import RankedOffer
from functions.fleet.offers.workload import estimate, hours_of_recipes, typical
from functions.fleet.records import Machine, Offer, StoredFleet, Terms, token_prefix
from functions.fleet.ticks.demand import FleetMachines, missing_machines, unservable, without_fleet
from functions.fleet.ticks.tick import NO_ANSWER, Tick, tell, tell_bound

logger = logging.getLogger("baton.fleet")

ENROLS_WITHIN_S = 1800
"""Time after the intent of a create within which the machine's enrolment key is valid."""
LONGEST_WAITS = 2000
"""Characters of the reason for a fleet's waiting, which quotes providers; a longer one would not fit the ledger."""
OFFERS_PER_TICK = 8
"""Offers of one provider and market that are tried for one machine in one tick."""
NOTHING_SOLD = (
    "sells nothing now that the document permits; wait, or widen gpu_models, regions, market or the price cap"
)
NO_OFFER = "no offer is left"
LATER = "the provider may be asked again only in a later tick"


class MachineStarter:
    """The last part of a tick.

    waiting, completed, random_token: of FleetController.
    """

    def __init__(
        self,
        tick: Tick,
        *,
        waiting: Callable[[StoredFleet], Sequence[Job]],
        completed: Callable[[str], Sequence[Job]],
        random_token: Callable[[], str],
    ) -> None:
        self._tick = tick
        self._waiting = waiting
        self._completed = completed
        self._random_token = random_token
        self._exhausted: list[Bound] = []
        """Bound that does not pay for the machine that the present fleet lacks; empty while the money suffices."""

    def start_missing(self, fleet: StoredFleet, group: list[Machine], others: Sequence[FleetMachines]) -> None:
        """Start as many machines as the demand asks for and the budget permits; store why a machine is not started.

        others: the other fleets of the tenant with their machines.
        """
        self._exhausted = []
        planned = [machine for machine in group if machine.state is State.PLANNED]
        for machine in planned:
            driver = self._tick.drivers.get(machine.provider)
            if driver is not None and self._tick.may_call(driver, "create"):
                group[group.index(machine)] = self._create(fleet, machine, driver)
        waits = "" if fleet.stopped else self._start(fleet, group, others)[:LONGEST_WAITS]
        if waits:
            self._tick.report.failures.append(f"fleet {fleet.spec.name}: {waits}")
        ledger = self._tick.ledger(fleet)
        label = "".join(bound.label for bound in self._exhausted)
        if (waits, label) == (ledger.waits, ledger.exhausted):
            return
        logger.info("fleet %s waits: %s", fleet.spec.name, waits or "no longer")
        told = ledger.model_copy(update={"waits": waits, "exhausted": label, "version": ledger.version + 1})
        new = self._exhausted if label != ledger.exhausted else []
        events = [tell_bound(bound, "budget.exhausted", self._tick.now()) for bound in new]
        # Only the controller writes the ledger; after a conflict on the fence the next tick stores the text.
        with suppress(WriteConflict):
            self._tick.write(fleet, ledger=told, events=events)

    def _start(self, fleet: StoredFleet, group: list[Machine], others: Sequence[FleetMachines]) -> str:
        """Start the machines that the fleet lacks; return why one is not started, empty if the fleet lacks none."""
        if sum(not machine.state.ended for machine in group) >= fleet.spec.max:
            self._give_back_avoided(fleet, group)
            return ""
        waiting = self._waiting(fleet)
        missing = missing_machines(fleet.spec, group, waiting, others)
        if missing == 0:
            return without_fleet(waiting, [fleet.spec, *(spec for spec, _ in others)])
        breaker = self._tick.ledger(fleet).breaker.after(group, last_begin(fleet, group))
        waits = breaker.waits(group, self._tick.now())
        if waits:
            return waits
        if breaker.failures >= FAILURES:
            missing = 1
        ranked, problems = self._quotes(fleet, waiting)
        taken = {_ref(one.offer) for one in group if one.state in MAYBE_EXISTING and not one.offer.repeatable}
        for _ in range(missing):
            problem = self._start_one(fleet, group, ranked, taken)
            if problem:
                told = [] if problem == NO_OFFER and problems else [problem]
                return "; ".join(dict.fromkeys([*problems, *told]))
        return ""

    def _give_back_avoided(self, fleet: StoredFleet, group: list[Machine]) -> None:
        """Give back a free machine that every waiting job avoids: it takes the place of one that could run them."""
        ready = [at for at, machine in enumerate(group) if machine.state is State.READY]
        now = self._tick.now()
        jobs = [job for job in (self._waiting(fleet) if ready else ()) if unservable(job, fleet.spec) is None]
        for at in ready:
            if jobs and all(job.avoid.get(group[at].id, 0) > now for job in jobs):
                after = lifecycle.stop(group[at], "it failed the jobs that wait", now)
                group[at] = self._tick.save(fleet, group[at], after, self._tick.ledger(fleet))
                return

    def _quotes(self, fleet: StoredFleet, waiting: Sequence[Job]) -> tuple[list[RankedOffer], list[str]]:
        """Return the ranked offers of all providers of a fleet, and why a provider was not heard."""
        offers: list[Offer] = []
        problems: list[str] = []
        for name in fleet.spec.providers:
            driver = self._tick.drivers.get(name)
            refusal = self._tick.refusal(name, fleet)
            if driver is None:
                problems.append(no_account(name))
            elif refusal:
                problems.append(f"{name}: {refusal}")
            elif not self._tick.may_call(driver, "quote"):
                problems.append(f"{name}: {LATER}")
            else:
                try:
                    found = driver.quote(fleet.spec)
                except NO_ANSWER as error:
                    problems.append(f"{name}: no offers: {tell(error)}")
                    if isinstance(error, ProviderRefused):
                        self._tick.refuse(name, error.kind, str(error), fleet)
                    continue
                offers += found
                if not found:
                    problems.append(f"{name}: {NOTHING_SOLD}")
        jobs = [job for job in waiting if unservable(job, fleet.spec) is None]
        by_recipe = offers and any(job.spec.recipe for job in jobs)
        history = hours_of_recipes(self._completed(fleet.tenant)) if by_recipe else {}
        work = typical([estimate(job, history)[0] for job in jobs])
        return rank_known(self._tick.store, offers, fleet.spec, work, self._tick.now()), problems

    def _start_one(
        self, fleet: StoredFleet, group: list[Machine], ranked: Sequence[RankedOffer], taken: set[tuple[str, str]]
    ) -> str:
        """Start one machine on the first offer that its provider does not refuse; return why there is none.

        An offer that cannot be taken now never hides the offers behind it: another provider or market may serve.
        """
        left = [one for one in ranked if _ref(one.offer) not in taken]
        problems = [f"no offer fits, the nearest: {left[0].rejected}" if left else NO_OFFER]
        dear: list[tuple[float, str, Bound]] = []
        tried = Counter[tuple[str, bool]]()
        for offer in [one.offer for one in left if not one.rejected]:
            driver, market = self._tick.drivers[offer.provider], (offer.provider, offer.spot)
            refusal = self._tick.refusal(offer.provider, fleet)
            if refusal:
                problems = [*problems, f"{offer.provider}: {refusal}"]
                continue
            if tried[market] >= OFFERS_PER_TICK:
                continue
            shortage = self._find_shortage(fleet, group, offer)
            if shortage is not None:
                dear.append(shortage)
                continue
            if not self._tick.in_time:
                return "the next tick goes on"
            if not self._tick.may_call(driver, "create"):
                tried[market] = OFFERS_PER_TICK
                problems = [*problems, f"{offer.provider}: {LATER}"]
                continue
            machine = self._plan(fleet, offer)
            if machine is None:
                return "another call changed the ledger at the same moment"
            tried[market] += 1
            group.append(self._create(fleet, machine, driver))
            failed = group[-1].state in (State.FAILED, State.TERMINATING)
            if failed or not offer.repeatable:
                taken.add(_ref(offer))
            if not failed:
                return ""
            refusal = self._tick.refusal(offer.provider, fleet)
            problems = [*problems, f"{offer.provider}: {refusal}" if refusal else group[-1].reason]
        if dear:
            _, told, bound = min(dear, key=lambda one: one[0])
            self._exhausted = [bound]
            problems.append(told)
        # The first entry is told only if nothing else is wrong.
        return "; ".join(dict.fromkeys(problems[1:] or problems))

    def _find_shortage(
        self, fleet: StoredFleet, group: Sequence[Machine], offer: Offer
    ) -> tuple[float, str, Bound] | None:
        """Return the reservation in USD that the offer needs, and how which bound falls short; None if none does."""
        bound, room = self._tick.tightest(fleet, self._tick.ledger(fleet), group)
        need = need_usd(offer.usd_per_hour, offer.boot_s)
        if need <= room:
            return None
        return need, tell_shortage(bound, room, need), bound

    def _plan(self, fleet: StoredFleet, offer: Offer) -> Machine | None:
        """Reserve the money of a new machine; None if another call changed the ledger at the same moment."""
        now, spec = self._tick.now(), fleet.spec
        suffix = hashlib.sha256(self._random_token().encode()).hexdigest()[:12]
        machine = Machine(
            id=f"{token_prefix(self._tick.store.deployment(), spec.name)}{suffix}",
            tenant=fleet.tenant,
            fleet=spec.name,
            version=1,
            since=now,
            offer=offer,
            terms=Terms(image=spec.image, disk_gib=min(offer.disk_gib, spec.disk_gib), queues=spec.queues),
            cap_usd_per_hour=spec.max_usd_per_hour,
            ends_by=lifecycle.end_of(offer, spec, now),
            usd_per_hour=offer.usd_per_hour,
            reserved_usd=need_usd(offer.usd_per_hour, offer.boot_s),
        )
        # The ledger's version guards the reservation: no other controller can have reserved the same money.
        ledger = self._tick.ledger(fleet)
        guard = ledger.model_copy(update={"version": ledger.version + 1})
        try:
            self._tick.write(fleet, machine=machine, ledger=guard, events=[machine.event])
        except WriteConflict:
            return None
        return machine

    def _create(self, fleet: StoredFleet, machine: Machine, driver: Driver) -> Machine:
        """Store the intent, call the provider once, store the outcome."""
        now = self._tick.now()
        key_id, environment = self._tick.keys.issue(machine, now + ENROLS_WITHIN_S)
        intended = lifecycle.request(machine, now).model_copy(update={"worker_key": key_id})
        stored = self._tick.save(fleet, machine, intended, self._tick.ledger(fleet))
        if stored is machine:
            return machine
        intent = CreateIntent(
            token=machine.id,
            offer=machine.offer,
            image=fleet.spec.image,
            disk_gib=fleet.spec.disk_gib,
            environment=environment,
            max_usd_per_hour=machine.cap_usd_per_hour,
        )
        after = self._record(fleet, stored, _call_create(driver, intent))
        return self._tick.save(fleet, stored, release(after), self._tick.ledger(fleet))

    def _record(self, fleet: StoredFleet, machine: Machine, result: CreateResult) -> Machine:
        """Return the machine after the outcome of its create."""
        now = self._tick.now()
        if isinstance(result, Created):
            self._tick.report.created += 1
            return lifecycle.created(machine, result.handle, now, usd_per_hour=result.usd_per_hour)
        if isinstance(result, Ambiguous):
            return lifecycle.doubt(machine, result.reason, now)
        reason = result.reason
        if result.kind is not None:
            reason = self._tick.refuse(machine.provider, result.kind, result.reason, fleet)
        if result.handle:
            # A create that failed can leave a stopped machine, which is billed until it is destroyed.
            made = lifecycle.created(machine, result.handle, now)
            return lifecycle.move(made, State.TERMINATING, now, reason)
        return lifecycle.refused(machine, reason, now)


def _call_create(driver: Driver, intent: CreateIntent) -> CreateResult:
    """Call the provider. A driver that fails in the middle of the call says nothing about the machine."""
    try:
        return driver.create(intent)
    except NO_ANSWER as error:
        logger.warning("%s: the create failed", driver.name, exc_info=error)
        return Ambiguous(reason=f"the driver failed in the create: {error}")


def _ref(offer: Offer) -> tuple[str, str]:
    return offer.provider, offer.ref
