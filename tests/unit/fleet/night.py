"""Simulate a fleet in virtual time: the real controller, virtual providers, workers that enrol, train and drain."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from baton.contract.fleets.fleet import FleetSpec
from baton.contract.fleets.fleet import MachineState as State
from baton.contract.fleets.money import Budget
from baton.contract.jobs.job import JobState
from functions.domain.records import Job
from functions.domain.worlds.world_record import WorldRecord
from functions.fleet import lifecycle
from functions.fleet.records import Machine, StoredFleet
from functions.fleet.ticks.controller import FleetController
from functions.fleet.ticks.tick import TickReport
from tests.kits.api.factories import make_job
from tests.twins.fleet import MemoryFleetStore
from tests.twins.provider import VirtualProvider

TENANT = "acme"
BOOT_S = 120
TICK_S = 60


INTERRUPTED = frozenset(
    {"holdings", "write", "put_orphan", "put_quarantine", "acquire", "release", "put_fleet", "retire"}
)
"""Calls of the store before which a night may be interrupted."""


class Killed(BaseException):
    """The controller's process dies."""


@dataclass
class Training:
    """A job: `left_s` of work; work since the last checkpoint is lost with its machine."""

    job: Job
    left_s: int
    on: str | None = None
    since_checkpoint_s: int = 0


@dataclass
class Night:
    """One fleet, its jobs and its providers. `step` is one minute."""

    spec: FleetSpec
    providers: dict[str, VirtualProvider]
    store: MemoryFleetStore = field(default_factory=MemoryFleetStore)
    now: int = 1_700_000_000
    trainings: list[Training] = field(default_factory=list)
    silent: set[str] = field(default_factory=set)
    """Machines whose workers never enrol."""
    revoked: set[str] = field(default_factory=set)
    """API keys of ended machines."""
    reports: list[TickReport] = field(default_factory=list)
    interrupt: Callable[[str], None] = lambda call: None
    """Called before every write and every provider call; may raise Killed."""
    time_left_s: float = 60.0
    paused_s: float = 0.0
    skew_s: int = 0
    """Difference of the providers' clocks from that of the control plane."""
    budget: Budget | None = None
    """Budget of all fleets together."""
    canceled: set[str] = field(default_factory=set)
    """Ids of jobs that a user canceled."""
    _tokens: int = 0

    def __post_init__(self) -> None:
        self.store.put_fleet(
            StoredFleet(tenant=TENANT, spec=self.spec, version=1, created_at=self.now, updated_at=self.now)
        )
        for provider in self.providers.values():
            provider.now = self.now + self.skew_s

    def submit(self, hours: float) -> Training:
        training = Training(make_job(id=f"job-{len(self.trainings)}"), left_s=int(hours * 3600))
        self.trainings.append(training)
        return training

    def controller(self) -> FleetController:
        night = self

        class Store:
            def __getattr__(self, name: str) -> object:
                if name in INTERRUPTED:
                    night.interrupt(name)
                return getattr(night.store, name)

        class Wire:
            def __init__(self, provider: VirtualProvider) -> None:
                self._provider = provider

            def __getattr__(self, name: str) -> object:
                if name in ("create", "destroy", "inventory"):
                    night.interrupt(name)
                return getattr(self._provider, name)

        return FleetController(
            Store(),  # type: ignore[arg-type]
            {name: Wire(one) for name, one in self.providers.items()},  # type: ignore[misc]
            waiting=lambda fleet: [one.job for one in self.trainings if one.on is None and one.left_s > 0],
            keys=self,
            now=lambda: self.now,
            random_token=self._token,
            time_left_s=lambda: self.time_left_s,
            pause=self._pause,
            read_jobs=self._read_jobs,
            budget=self.budget,
            read_world=self.read_world,
            read_progress=self.read_progress,
        )

    def read_world(self, job_id: str) -> WorldRecord | None:
        """Return the world of an elastic job; a night without elastic jobs has none."""
        return None

    def read_progress(self, job: Job) -> Job:
        """Return an elastic job with the newest progress."""
        return job

    def _read_jobs(self, job_ids: Sequence[str]) -> list[Job]:
        found = [one for one in self.trainings if one.job.id in job_ids]
        return [one.job.model_copy(update={"state": self._state(one)}) for one in found]

    def _state(self, training: Training) -> JobState:
        if training.job.id in self.canceled:
            return JobState.CANCELED
        if training.left_s <= 0:
            return JobState.COMPLETE
        return JobState.RUNNING if training.on else JobState.PENDING

    def _pause(self, seconds: float) -> None:
        self.paused_s += seconds
        self.time_left_s -= seconds
        self.now += int(seconds)

    def _token(self) -> str:
        self._tokens += 1
        return f"secret-{self._tokens}"

    def issue(self, machine: Machine, expires_at: int) -> tuple[str, Mapping[str, str]]:
        """Issue an enrolment key: the night is its own MachineKeys."""
        self.interrupt("issue")
        key_id = self._token()
        return key_id, {"BATON_ENROLMENT_TOKEN": key_id}

    def revoke(self, key_id: str) -> None:
        self.interrupt("revoke")
        self.revoked.add(key_id)

    def machines(self) -> list[Machine]:
        """Return all machines of all fleets, ended ones included."""
        names = [one.spec.name for one in self.store.fleets(TENANT)]
        names = [name for name in names if (TENANT, name) not in self.store.damaged_machines]
        live = [one for name in names for one in self.store.machines(TENANT, name)]
        return [*live, *(one for name in names for one in self.store.ended(TENANT, name, limit=10_000))]

    def step(self, minutes: int = 1) -> None:
        """Let `minutes` pass: a tick of the controller and a minute of work each."""
        for _ in range(minutes):
            # After a kill, the next invocation waits for the end of the dead controller's lease.
            with suppress(Killed):
                self.reports.append(self.controller().tick())
            self.work()
            self.now += TICK_S
            for provider in self.providers.values():
                provider.now = self.now + self.skew_s

    def work(self) -> None:
        """One minute of all workers."""
        alive = {one.token: one for provider in self.providers.values() for one in provider.alive() if one.running}
        for training in self.trainings:
            if training.on is not None and training.on not in alive:
                training.left_s += training.since_checkpoint_s
                training.on, training.since_checkpoint_s = None, 0
        for machine in self.machines():
            body = alive.get(machine.id)
            if body is None or machine.id in self.silent:
                continue
            held = next((one for one in self.trainings if one.on == machine.id), None)
            after = self._worker(machine, held, booted=self.now + self.skew_s - body.created_at >= BOOT_S)
            if after is not machine:
                stored = after.model_copy(update={"version": machine.version + 1})
                self.store.update_machine(stored, [] if after.state is machine.state else [after.event])

    def _worker(self, machine: Machine, training: Training | None, *, booted: bool) -> Machine:
        now = self.now
        if machine.state is State.BOOTING and booted:
            return lifecycle.enrolled(machine, now)
        if machine.state is State.REGISTERED:
            return lifecycle.checked(machine, "", now)
        if machine.state is State.READY:
            free = next((one for one in self.trainings if one.on is None and one.left_s > 0), None)
            if free is None:
                return machine
            free.on = machine.id
            return lifecycle.claimed(machine, free.job.id, now)
        if training is None:
            return lifecycle.released(machine, now) if machine.state is State.DRAINING else machine
        if machine.state is State.BUSY:
            training.left_s -= TICK_S
            training.since_checkpoint_s = (training.since_checkpoint_s + TICK_S) % 600
            if training.left_s > 0:
                return machine.model_copy(update={"seen_at": now})
        if machine.state in (State.BUSY, State.DRAINING):
            training.on, training.since_checkpoint_s = None, 0
            return lifecycle.released(machine, now)
        return machine

    def billed_usd(self) -> float:
        """Return the total by the providers' own meters."""
        return sum(provider.billed_usd() for provider in self.providers.values())

    def billing(self) -> list[str]:
        """Return the tokens of all machines that bill now."""
        return [one.token for provider in self.providers.values() for one in provider.alive()]

    def spent_usd(self) -> float:
        """Return the total by the ledger."""
        return self.store.ledger(TENANT, self.spec.name).spent_usd
