"""Nights in virtual time with faults at every step: the controller, two providers and the workers as one state machine.

`make test` plays NIGHTS nights, `make nights` a thousand.
"""

from __future__ import annotations

import os

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from baton.contract.fleets.fleet import FleetSpec
from baton.contract.fleets.fleet import MachineState as State
from functions.fleet.records import Inventory, StoredFleet
from tests.twins.provider import Faults, VirtualMachine, VirtualProvider
from tests.unit.fleet.night import Killed, Night

NIGHTS = int(os.environ.get("NIGHTS", "60"))
NAMES = ("loopback", "ssh")
MOST = 4
"""Machines of the fleet."""
DEAREST = 1.0
"""Price in USD per hour, of which the cap of the document is half."""
MINUTE_USD = MOST * DEAREST / 60
LOST_MINUTES = {"incomplete": 1, "unreadable": 1, "ignored_destroys": 1, "hidden": 1, "lost_answers": 2, "resets": 0}
"""Minutes for which one fault may hide the machines' cost from the controller, or keep a machine that should end."""


class Skewed(VirtualProvider):
    """Provider whose clock differs by `skew_s`."""

    skew_s = 0

    def inventory(self, prefix: str, now: int) -> Inventory:
        found = super().inventory(prefix, now)
        seen = [one.model_copy(update={"created_at": one.created_at + self.skew_s}) for one in found.sightings]
        return found.model_copy(update={"sightings": seen})


class Nights(RuleBasedStateMachine):
    """Random faults and changes in nights of one fleet at two providers."""

    def __init__(self) -> None:
        super().__init__()
        self.providers = {name: Skewed(name=name, price=0.2 + 0.05 * at, slots=6) for at, name in enumerate(NAMES)}
        self.night = Night(make_spec(), dict(self.providers))
        self.budget = 0.0
        """Largest total of any document so far."""
        self.slack_usd = 2 * MINUTE_USD
        """Money that the faults so far may cost beyond a budget."""
        self.zombies: list[VirtualMachine] = []
        self.vanished: set[str] = set()

    def alive(self) -> list[VirtualMachine]:
        return [one for provider in self.providers.values() for one in provider.alive() if one not in self.zombies]

    def fleet(self) -> StoredFleet:
        (fleet,) = self.night.store.fleets()
        return fleet

    def put(self, *, stopped: bool = False, **changes: object) -> None:
        fleet = self.fleet()
        spec = FleetSpec.model_validate({**fleet.spec.model_dump(), **changes})
        updates = {"spec": spec, "stopped": stopped, "version": fleet.version + 1, "updated_at": self.night.now}
        self.night.store.put_fleet(fleet.model_copy(update=updates))
        self.budget = max(self.budget, spec.budget.total_usd or 0)

    @initialize(hours=st.lists(st.floats(0.3, 1.0), min_size=2, max_size=4), total=st.sampled_from([0.5, 1.5, 6.0]))
    def begin(self, hours: list[float], total: float) -> None:
        self.put(budget={"total_usd": total})
        for one in hours:
            self.night.submit(one)
        self.wait(6)

    @precondition(lambda self: len(self.night.trainings) < 6)
    @rule(hours=st.floats(0.1, 1.0))
    def submit(self, hours: float) -> None:
        self.night.submit(hours)

    @rule(minutes=st.integers(1, 20))
    def wait(self, minutes: int) -> None:
        for _ in range(minutes):
            self.step()

    def step(self) -> None:
        self.night.time_left_s = 60
        self.night.step()
        rows = {one.id for one in self.night.machines() if not one.state.ended}
        assert {one.token for one in self.alive()} <= rows, "a machine bills without a live row"
        missed = {one.id for one in self.night.machines() if "vanished from" in one.reason}
        assert missed <= self.vanished, "a machine that exists counts as vanished"
        reserved = sum(one.reserved_usd for one in self.night.machines())
        assert self.night.spent_usd() + reserved <= self.budget + self.slack_usd

    @rule(name=st.sampled_from(NAMES), fault=st.sampled_from(sorted(LOST_MINUTES)), count=st.integers(1, 6))
    def fail(self, name: str, fault: str, count: int) -> None:
        """Lost answers, resets, late and incomplete lists, ignored destroys; the next minutes meet them."""
        setattr(self.providers[name].faults, fault, count)
        self.slack_usd += count * LOST_MINUTES[fault] * MINUTE_USD
        self.wait(4)

    @rule(name=st.sampled_from(NAMES), count=st.integers(1, 9))
    def snatch(self, name: str, count: int) -> None:
        self.providers[name].faults.snatched = count

    @rule(name=st.sampled_from(NAMES), usd=st.floats(0.1, DEAREST))
    def move_price(self, name: str, usd: float) -> None:
        """Offers and running machines change their price at once."""
        self.providers[name].price = usd
        for one in self.providers[name].alive():
            one.reprice(usd, self.night.now)
        self.slack_usd += 2 * MINUTE_USD

    @precondition(lambda self: self.alive())
    @rule(at=st.integers(0, 99), usd=st.floats(0.1, DEAREST))
    def announce(self, at: int, usd: float) -> None:
        self.alive()[at % len(self.alive())].announced_usd_per_hour = usd
        self.slack_usd += 2 * MINUTE_USD

    @precondition(lambda self: self.alive())
    @rule(at=st.integers(0, 99))
    def outbid_or_resume(self, at: int) -> None:
        one = self.alive()[at % len(self.alive())]
        one.running = not one.running

    @precondition(lambda self: self.alive())
    @rule(at=st.integers(0, 99))
    def vanish(self, at: int) -> None:
        one = self.alive()[at % len(self.alive())]
        one.ended_at = self.night.now
        self.vanished.add(one.token)

    @precondition(lambda self: any(one.state.ended for one in self.night.machines()))
    @rule(at=st.integers(0, 99))
    def rise(self, at: int) -> None:
        """A machine of an ended record appears at its provider."""
        ended = [one for one in self.night.machines() if one.state.ended]
        record = ended[at % len(ended)]
        zombie = VirtualMachine(f"z{len(self.zombies)}", record.id, 0.2, self.night.now, "host-z")
        self.providers[record.provider].machines.append(zombie)
        self.zombies.append(zombie)

    @precondition(lambda self: self.alive())
    @rule(at=st.integers(0, 99))
    def freeze(self, at: int) -> None:
        self.night.silent ^= {self.alive()[at % len(self.alive())].token}

    @rule(name=st.sampled_from(NAMES), skew_s=st.integers(-300, 300))
    def skew(self, name: str, skew_s: int) -> None:
        self.providers[name].skew_s = skew_s

    @rule(call=st.integers(0, 60))
    def kill(self, call: int) -> None:
        """The controller dies before a write or a call; the next invocation waits for the end of its lease."""
        self._at(call, self._die)

    @rule(call=st.integers(0, 60), pause_s=st.sampled_from([0, 100]))
    def overtake(self, call: int, pause_s: int) -> None:
        """A second controller ticks in the middle of the first one's tick, which was paused."""

        def overtake() -> None:
            self.night.now += pause_s
            for provider in self.providers.values():
                provider.now = self.night.now
            self.night.controller().tick()

        self._at(call, overtake)

    def _die(self) -> None:
        raise Killed

    def _at(self, call: int, act: object) -> None:
        left = [call]

        def interrupt(_: str) -> None:
            left[0] -= 1
            if left[0] == -1:
                act()  # type: ignore[operator]

        self.night.interrupt = interrupt
        self.slack_usd += 2 * MINUTE_USD
        self.step()
        self.night.interrupt = lambda _: None

    @rule(
        most=st.integers(1, MOST),
        idle_s=st.sampled_from([0, 300]),
        cap=st.sampled_from([0.3, DEAREST / 2]),
        total=st.sampled_from([0.5, 3.0, 6.0]),
    )
    def change(self, most: int, idle_s: int, cap: float, total: float) -> None:
        """The document changes, also that of a stopped fleet, which starts again."""
        self.put(max=most, idle_timeout_s=idle_s, max_usd_per_hour=cap, budget={"total_usd": total})

    @rule()
    def stop(self) -> None:
        self.put(stopped=True)

    def teardown(self) -> None:
        """With money and without faults every job ends; then the fleet stops, and nothing is left."""
        for provider in self.providers.values():
            provider.faults, provider.price, provider.skew_s = Faults(), 0.2, 0
            for one in provider.alive():
                one.reprice(0.2, self.night.now)
                one.announced_usd_per_hour = None
        self.night.silent.clear()
        self.put(max=MOST, max_usd_per_hour=0.5, idle_timeout_s=300, budget={"total_usd": 50})
        for _ in range(900):
            if not any(one.left_s > 0 for one in self.night.trainings):
                break
            self.step()
        assert [one.left_s > 0 for one in self.night.trainings].count(True) == 0, "a job never ended"
        self.put(stopped=True)
        for _ in range(40):
            self.step()
        machines = self.night.machines()
        assert self.night.billing() == []
        assert all(one.state.ended and one.receipt and one.reserved_usd == 0 for one in machines)
        assert all(one.worker_key is None or one.worker_key in self.night.revoked for one in machines)
        assert all(len(one.absences) == 2 for one in machines if one.state is State.GONE)
        zombies = sum(one.billed_usd(self.night.now) for one in self.zombies)
        assert self.night.billed_usd() <= self.night.spent_usd() + self.slack_usd
        assert zombies <= len(self.zombies) * 0.2 * 6 / 60 + self.slack_usd


def make_spec() -> FleetSpec:
    document = {"name": "nights", "providers": NAMES, "max_usd_per_hour": DEAREST / 2, "max": MOST}
    return FleetSpec.model_validate({**document, "budget": {"total_usd": 3}})


def test_nights_with_faults_at_every_step_stay_within_their_budget_and_end_clean() -> None:
    run_state_machine_as_test(Nights, settings=settings(max_examples=NIGHTS, stateful_step_count=30))
