"""Start the machines that a fleet lacks: quotes, the reservation of the money, the intent, the one create call."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from baton.contract.elastic.nodes import ELASTIC_PORT
from baton.contract.fleets.fleet import FleetSpec
from baton.contract.fleets.fleet import MachineState as State
from baton.contract.fleets.job_machines import FAILED_WAITING_JOBS
from baton.contract.fleets.registries import RegistryLogin
from functions.domain.errors import WriteConflict
from functions.domain.records import Job
from functions.fleet import lifecycle
from functions.fleet.breaker import find_pause
from functions.fleet.drivers.protocol import (
    Ambiguous,
    Created,
    CreateIntent,
    CreateResult,
    Driver,
    ProviderRefused,
)
from functions.fleet.ledger import Bound, need_usd, release, tell_shortage
from functions.fleet.machine_states import ENROLS_WITHIN_S
from functions.fleet.offers.known_offers import rank_known
from functions.fleet.offers.offer_ranking import RankedOffer
from functions.fleet.offers.start_plan import affordable, rented_places
from functions.fleet.offers.workload import estimate, hours_of_recipes, typical
from functions.fleet.records import Machine, Offer, StoredFleet, Terms, token_prefix
from functions.fleet.ticks.demand import FleetMachines, missing_machines, unservable, without_fleet
from functions.fleet.ticks.gangs import Demand, Trains, leave_paused_out, select
from functions.fleet.ticks.tick import NO_ANSWER, Tick, tell, tell_bound

logger = logging.getLogger("baton.fleet")

LONGEST_WAITS = 2000
"""Characters of the reason for a fleet's waiting, which quotes providers; a longer one would not fit the ledger."""
SEARCHED_ENDED = 100
"""Newest ended machines among which the hosts of avoided machines are found."""
OFFERS_PER_TICK = 8
"""Offers of one provider and market that are tried for one machine in one tick."""
NOTHING_SOLD = (
    "sells nothing now that the document permits; wait, or widen gpu_models, regions, market or the price cap"
)
NO_OFFER = "no offer is left"
LATER = "the provider may be asked again only in a later tick"

FindLogin = Callable[[str, str | None], RegistryLogin | None]
"""Returns the login by which the machines of a tenant pull an image; None without one."""


class MachineStarter:
    """The last part of a tick.

    waiting, completed, random_token, find_login, trains: of FleetController.
    """

    def __init__(
        self,
        tick: Tick,
        *,
        waiting: Callable[[StoredFleet], Sequence[Job]],
        completed: Callable[[str], Sequence[Job]],
        random_token: Callable[[], str],
        find_login: FindLogin,
        trains: Trains,
    ) -> None:
        self._tick = tick
        self._trains = trains
        self._find_login = find_login
        self._waiting = waiting
        self._completed = completed
        self._random_token = random_token
        self._exhausted: list[Bound] = []
        """Bound that does not pay for the machine that the present fleet lacks; empty while the money suffices."""
        self._paused = ""
        """Why no machine starts for a training that could not begin before; empty for none."""
        self._port: int | None = None
        """Port of the machines that the present fleet starts, if nodes of elastic jobs are among its waiting jobs."""

    def start_missing(
        self, fleet: StoredFleet, group: list[Machine], others: Sequence[FleetMachines], *, later: bool
    ) -> bool:
        """Start as many machines as the demand asks for and the budget permits; store why a machine is not started.

        others: the other fleets of the tenant with their machines. later: False for jobs that have no machine, True for
        the nodes beyond `min` of elastic jobs. Returns True if the fleet lacks machines for such nodes only.
        """
        self._exhausted, self._paused = [], ""
        planned = [machine for machine in group if machine.state is State.PLANNED]
        for machine in planned:
            driver = self._tick.drivers.get(machine.provider)
            if driver is not None and self._tick.may_call(driver, "create"):
                group[group.index(machine)] = self._create(fleet, machine, driver)
        found = "" if fleet.stopped else self._start(fleet, group, others, later)
        if found is None:
            return True
        waits = "; ".join(filter(None, [self._paused, found]))[:LONGEST_WAITS]
        if waits:
            self._tick.report.failures.append(f"fleet {fleet.spec.name}: {waits}")
        ledger = self._tick.ledger(fleet)
        label = "".join(bound.label for bound in self._exhausted)
        if (waits, label) == (ledger.waits, ledger.exhausted):
            return False
        logger.info("fleet %s waits: %s", fleet.spec.name, waits or "no longer")
        told = ledger.model_copy(update={"waits": waits, "exhausted": label, "version": ledger.version + 1})
        new = self._exhausted if label != ledger.exhausted else []
        events = [tell_bound(bound, "budget.exhausted", self._tick.now()) for bound in new]
        # Only the controller writes the ledger; after a conflict on the fence the next tick stores the text.
        with suppress(WriteConflict):
            self._tick.write(fleet, ledger=told, events=events)
        return False

    def _start(
        self, fleet: StoredFleet, group: list[Machine], others: Sequence[FleetMachines], later: bool
    ) -> str | None:
        """Start the machines that the fleet lacks; return why one is not started, empty if the fleet lacks none.

        Returns None, and starts nothing, if `later` is False and only nodes beyond `min` lack machines.
        """
        if sum(not machine.state.ended for machine in group) >= fleet.spec.max:
            self._give_back_avoided(fleet, group)
            return ""
        waiting, self._paused = leave_paused_out(
            self._waiting(fleet), self._tick.ledger(fleet).forming, fleet, self._tick.now(), trains=self._trains
        )
        self._port = ELASTIC_PORT if any(job.spec.seat is not None for job in waiting) else None
        wanted = select(waiting, fleet.spec, group, others, trains=self._trains)
        lacks = partial(missing_machines, fleet.spec, group, others=others)
        urgent = lacks(wanted.first)
        missing = urgent or lacks(wanted.jobs)
        if missing == 0:
            return wanted.held or without_fleet(waiting, [fleet.spec, *(spec for spec, _ in others)])
        if not urgent and not later:
            return None
        ranked, problems = self.quote(fleet, waiting, group)
        if held := self._exclude_unaffordable(fleet, group, others, waiting, ranked):
            wanted, why = held
            problems = [f"{wanted.held}: {why}" if why else wanted.held, *problems]
            missing = lacks(wanted.first) or lacks(wanted.jobs)
        for _ in range(missing):
            problem = self._start_one(fleet, group, ranked)
            if problem:
                told = [] if problem == NO_OFFER and problems else [problem]
                return "; ".join(dict.fromkeys([*problems, *told]))
        return "; ".join(problems) if held else ""

    def _exclude_unaffordable(
        self,
        fleet: StoredFleet,
        group: Sequence[Machine],
        others: Sequence[FleetMachines],
        waiting: Sequence[Job],
        ranked: Sequence[RankedOffer],
    ) -> tuple[Demand, str] | None:
        """Return the demand without elastic jobs for whose first nodes offers or money do not suffice, and which of
        both; None if all jobs can begin.
        """
        if all(job.spec.seat is None for job in waiting):
            return None
        able = [
            one
            for one in ranked
            if not self._tick.refusal(one.offer.provider, fleet) and not self._pause(fleet, group, one.offer.provider)
        ]
        money = self._tick.tightest(fleet, self._tick.ledger(fleet), group)
        found = affordable(able, self._rivals(fleet, group), money, fleet.spec.max)
        wanted = select(waiting, fleet.spec, group, others, startable=len(found.offers), trains=self._trains)
        if not wanted.held:
            return None
        self._exhausted = [money[0]] if found.shortage else []
        return wanted, found.why

    def _give_back_avoided(self, fleet: StoredFleet, group: list[Machine]) -> None:
        """Release a free machine that every waiting job avoids, because the machine occupies a place of the fleet.

        The time until which a job avoids a machine is of the server's clock, and does not count here.
        """
        ready = [at for at, machine in enumerate(group) if machine.state is State.READY]
        jobs = [job for job in (self._waiting(fleet) if ready else ()) if unservable(job, fleet.spec) is None]
        for at in ready:
            if jobs and all(group[at].id in job.avoid for job in jobs):
                after = lifecycle.stop(group[at], FAILED_WAITING_JOBS, self._tick.now())
                group[at] = self._tick.save(fleet, group[at], after, self._tick.ledger(fleet))
                return

    def quote(
        self, fleet: StoredFleet, waiting: Sequence[Job], group: Sequence[Machine]
    ) -> tuple[list[RankedOffer], list[str]]:
        """Return the ranked offers of all providers of a fleet, and why a provider was not heard."""
        offers: list[Offer] = []
        problems: dict[str, str] = dict.fromkeys(fleet.spec.providers, "")
        reads: dict[str, Callable[[], Sequence[Offer]]] = {}
        for name in fleet.spec.providers:
            driver = self._tick.drivers.get(name)
            refusal = self._tick.refusal(name, fleet) or self._pause(fleet, group, name)
            if driver is None:
                problems[name] = self._tick.no_driver(name)
            elif refusal:
                problems[name] = f"{name}: {refusal}"
            elif not self._tick.may_call(driver, "quote"):
                problems[name] = f"{name}: {LATER}"
            else:
                reads[name] = partial(_quote, driver, fleet.spec)
        for provider, answer in self._tick.ask_together(reads, self._tick.answer_s).items():
            try:
                found = answer.result()
            except NO_ANSWER as error:
                problems[provider] = f"{provider}: no offers: {tell(error)}"
                if isinstance(error, ProviderRefused):
                    self._tick.refuse(provider, error.kind, str(error), fleet)
                continue
            offers += found
            if not found:
                problems[provider] = f"{provider}: {NOTHING_SOLD}"
        jobs = [job for job in waiting if unservable(job, fleet.spec) is None]
        by_recipe = offers and any(job.spec.recipe for job in jobs)
        history = hours_of_recipes(self._completed(fleet.tenant)) if by_recipe else {}
        work = typical([estimate(job, history)[0] for job in jobs])
        ranked = rank_known(self._tick.store, offers, fleet.spec, work, self._tick.now())
        hosts = self._avoided_hosts(fleet, jobs)
        # Another container at the same host would fail the job again; the only host is better than none.
        ranked.sort(key=lambda one: (one.offer.provider, one.offer.machine_ref) in hosts)
        return ranked, [one for one in problems.values() if one]

    def _avoided_hosts(self, fleet: StoredFleet, jobs: Sequence[Job]) -> set[tuple[str, str | None]]:
        """Return provider and host of the ended machines that a waiting job avoids; an unknown host is none."""
        avoided = {token for job in jobs for token in job.avoid}
        if not avoided:
            return set()
        ended = self._tick.store.ended(fleet.tenant, fleet.spec.name, limit=SEARCHED_ENDED)
        return {(one.provider, one.offer.machine_ref) for one in ended if one.id in avoided and one.offer.machine_ref}

    def _pause(self, fleet: StoredFleet, group: Sequence[Machine], provider: str) -> str:
        return find_pause(self._tick.ledger(fleet).breakers, fleet, provider, group, self._tick.now())

    def _start_one(self, fleet: StoredFleet, group: list[Machine], ranked: list[RankedOffer]) -> str:
        """Start one machine on the first offer that its provider accepts; return the reason if no machine starts.

        An offer that cannot be taken now never hides the offers behind it: another provider or market may serve.
        ranked: loses the offers that were refused.
        """
        rented = rented_places(self._rivals(fleet, group))
        left = [one for one in ranked if one.offer.place not in rented]
        problems = [f"no offer fits, the nearest: {left[0].rejected}" if left else NO_OFFER]
        dear: list[tuple[float, str, Bound]] = []
        tried = Counter[tuple[str, bool]]()
        for fitting in [one for one in left if not one.rejected]:
            offer = fitting.offer
            driver, market = self._tick.drivers[offer.provider], (offer.provider, offer.spot)
            refusal = self._tick.refusal(offer.provider, fleet) or self._pause(fleet, group, offer.provider)
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
                return LATER
            if not self._tick.may_call(driver, "create"):
                tried[market] = OFFERS_PER_TICK
                problems = [*problems, f"{offer.provider}: {LATER}"]
                continue
            machine = self._plan(fleet, offer)
            if machine is None:
                return "another call changed the ledger at the same moment"
            tried[market] += 1
            group.append(self._create(fleet, machine, driver))
            if group[-1].state not in (State.FAILED, State.TERMINATING):
                return ""
            ranked.remove(fitting)
            refusal = self._tick.refusal(offer.provider, fleet)
            problems = [*problems, f"{offer.provider}: {refusal}" if refusal else group[-1].reason]
        if dear:
            _, told, bound = min(dear, key=lambda one: one[0])
            self._exhausted = [bound]
            problems.append(told)
        # The first entry is told only if nothing else is wrong.
        return "; ".join(dict.fromkeys(problems[1:] or problems))

    def _rivals(self, fleet: StoredFleet, group: Sequence[Machine]) -> list[Machine]:
        """Return the machines that a further machine at the same place would end: those of the fleet, and all bids.

        A renter on demand and a higher bid end a bid without notice, also one of another fleet.
        """
        place = fleet.tenant, fleet.spec.name
        others = [machine for key, found in self._tick.machines.items() if key != place for machine in found]
        return [*group, *(one for one in others if one.offer.spot)]

    def _find_shortage(
        self, fleet: StoredFleet, group: Sequence[Machine], offer: Offer
    ) -> tuple[float, str, Bound] | None:
        """Return the reservation in USD, the shortage as text, and the bound; None if the money suffices."""
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
            terms=Terms(
                image=spec.image,
                disk_gib=min(offer.disk_gib, spec.disk_gib),
                queues=spec.queues,
                tags=spec.tags,
                port=self._port,
            ),
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
        if dear := lifecycle.excess(machine):
            # The document has lowered its cap since the plan.
            failed = lifecycle.move(machine, State.FAILED, now, dear)
            return self._tick.save(fleet, machine, release(failed), self._tick.ledger(fleet))
        try:
            login = self._find_login(fleet.tenant, fleet.spec.image)
        except NO_ANSWER as error:
            # The next tick creates the planned machine.
            self._tick.fail(f"fleet {fleet.spec.name}: the login at its image's registry cannot be read: {error}")
            return machine
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
            login=login,
            port=machine.terms.port if machine.terms is not None else None,
        )
        after = self._record(fleet, stored, self._call_create(driver, intent))
        # A machine that must not stay, such as one above the cap, costs money until its destroy call.
        return self._tick.destroy(self._tick.save(fleet, stored, release(after), self._tick.ledger(fleet)))

    def _call_create(self, driver: Driver, intent: CreateIntent) -> CreateResult:
        """Call the provider. A driver that fails in the middle of the call says nothing about the machine."""
        try:
            create = partial(driver.create, intent)
            return self._tick.call(driver.name, create, lambda result: isinstance(result, Created))
        except NO_ANSWER as error:
            logger.warning("%s: the create failed", driver.name, exc_info=error)
            return Ambiguous(reason=f"the driver failed in the create: {error}")

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
            handle = {"handle": result.handle, "created_at": now}
            return lifecycle.move(machine, State.TERMINATING, now, reason, **handle)
        return lifecycle.refused(machine, reason, now)


def _quote(driver: Driver, spec: FleetSpec) -> Sequence[Offer]:
    return driver.quote(spec)
