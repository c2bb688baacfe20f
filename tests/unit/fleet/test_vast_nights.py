"""Nights of the real controller at the fake of Vast.ai, intervals included: state, money, and nothing left over."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from baton.contract.fleets.fleet import MachineState as State
from fakes.vast.instances import NEVER, FakeInstance
from fakes.vast.provider import KEY, PERMISSIONS, FakeVast
from functions.fleet.drivers.vast.driver import VastDriver
from functions.fleet.records import Machine
from tests.conformance.drivers.driven_vast import vast_account
from tests.unit.fleet.night import Night
from tests.unit.fleet.test_vast_offers import spec


@dataclass
class Body:
    """Instance, as the workers of a night see it."""

    token: str
    created_at: int
    running: bool


class VastMarket:
    """Vast.ai with its driver, on the clock of a night."""

    def __init__(self, served: ExitStack) -> None:
        self.now = 0
        self.night: Night | None = None
        self.fake = FakeVast(lambda: self.night.now if self.night else self.now)
        served.enter_context(self.fake)
        self.driver = VastDriver(vast_account(self.fake), now=self.fake.now, pause=self._wait)

    def _wait(self, seconds: float) -> None:
        assert self.night is not None
        self.night.now += int(seconds)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.driver, name)

    def alive(self) -> list[Body]:
        existing = [one for one in self.fake.instances if not one.destroyed]
        now = self.fake.now()
        return [
            Body(one.body["label"], int(one.created_at), running=one.status(now) in ("running", "unknown"))
            for one in existing
        ]

    def billed_usd(self) -> float:
        return self.fake.meter.usd()


class VastNight:
    """One fleet at Vast.ai."""

    def __init__(self, served: ExitStack, **changes: Any) -> None:
        document = {"disk_gib": 20, "max_usd_per_hour": 0.6, "max": 1, **changes}
        self.market = VastMarket(served)
        self.fake = self.market.fake
        self.night = Night(spec(**document), {"vast": self.market})  # type: ignore[dict-item]
        self.market.night = self.night

    def step(self, minutes: int) -> None:
        for _ in range(minutes):
            self.night.time_left_s = 60
            self.night.step()

    def step_until(self, state: State) -> Machine:
        """Run until a machine has the state; return the machine."""
        for _ in range(60):
            self.step(1)
            found = [one for one in self.night.machines() if one.state is state]
            if found:
                return found[0]
        raise AssertionError(f"no machine is {state}: {[(one.state, one.reason) for one in self.night.machines()]}")

    def instance(self) -> FakeInstance:
        (one,) = [one for one in self.fake.instances if not one.destroyed]
        return one

    def end(self, *, margin_usd: float = 0.05) -> list[Machine]:
        """Stop the fleet; assert that nothing is left and billed, and that ledger and receipts tell the bill."""
        fleet = self.night.store.fleets()[0]
        self.night.store.put_fleet(fleet.model_copy(update={"stopped": True, "version": fleet.version + 1}))
        self.step(30)
        machines = self.night.machines()
        assert (self.fake.labels(), self.fake.meter.billing()) == ([], [])
        assert {one.state for one in machines} <= {State.GONE, State.FAILED}
        assert self.night.spent_usd() == pytest.approx(self.fake.meter.usd(), abs=margin_usd)
        charged = [one.charged_usd for one in machines if one.state is State.GONE]
        assert sum(one or 0.0 for one in charged) == pytest.approx(self.fake.meter.usd())
        assert len({one.token for one in self.night.store.orphans().values()}) == 0
        return machines


@pytest.fixture
def served() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_a_job_runs_on_the_cheapest_bid_and_the_receipt_is_the_bill(served: ExitStack) -> None:
    night = VastNight(served)
    training = night.night.submit(hours=1)
    night.step(90)
    assert training.left_s <= 0
    (machine,) = night.end()
    assert machine.offer.spot and machine.offer.usd_per_hour == pytest.approx(0.22 + 22 * 0.18 / 720)


def test_three_machines_start_in_one_tick_at_the_pace_of_the_provider(served: ExitStack) -> None:
    night = VastNight(served, max=3)
    for _ in range(3):
        night.night.submit(hours=2)
    night.step(1)
    assert len(night.fake.labels()) == 3
    night.step(10)
    night.end()
    assert not [call for call in night.night.reports for failure in call.failures if "429" in failure]


def test_taken_offers_and_bids_that_became_too_low_leave_nothing(served: ExitStack) -> None:
    night = VastNight(served, market="spot")
    night.fake.snatched = 3
    night.night.submit(hours=1)
    night.step(1)
    for ask in night.fake.asks:
        ask.min_bid += 0.1
    night.step(3)
    night.step_until(State.BUSY)
    machines = night.end()
    assert sum(one.state is State.FAILED for one in machines) >= 3


@pytest.mark.parametrize("fault", ["lost", "reset", "500", "html", "truncated"])
def test_a_create_without_an_answer_is_resolved_by_the_label(served: ExitStack, fault: Any) -> None:
    night = VastNight(served)
    night.fake.inject(fault, "PUT /api/v0/asks/")
    night.night.submit(hours=1)
    night.step(1)
    (machine,) = night.night.machines()
    assert machine.state is State.AMBIGUOUS
    night.step_until(State.BUSY)
    assert len([one for one in night.fake.instances if not one.destroyed]) == 1
    night.end()


@pytest.mark.parametrize(
    ("boot_s", "fails", "reason"),
    [(NEVER, False, "the machine did not"), (60.0, True, "the container cannot start")],
)
def test_a_machine_that_never_starts_is_given_back_and_its_host_avoided(
    served: ExitStack, boot_s: float, fails: bool, reason: str
) -> None:
    night = VastNight(served)
    night.fake.boot_s, night.fake.fails_to_start = boot_s, fails
    night.night.submit(hours=1)
    first = night.step_until(State.BOOTING)
    night.fake.boot_s, night.fake.fails_to_start = 60.0, False
    busy = night.step_until(State.BUSY)
    assert busy.offer.machine_ref != first.offer.machine_ref
    # The ledger counts a loading machine at its full price, of which Vast.ai bills the disk alone.
    machines = night.end(margin_usd=0.1)
    (ended,) = [one for one in machines if one.id == first.id]
    assert reason in ended.reason
    assert night.fake.meter.usd(kind="gpu") < 1


@pytest.mark.parametrize("status", ["frozen", "exited", "offline"])
def test_a_machine_that_ended_under_its_job_is_given_back_and_the_job_goes_on(served: ExitStack, status: Any) -> None:
    night = VastNight(served)
    training = night.night.submit(hours=1)
    first = night.step_until(State.BUSY)
    night.fake.set_status(first.handle or "", status)
    night.step(40)
    assert first.handle not in [one.handle for one in night.fake.instances if not one.destroyed]
    night.step(90)
    assert training.left_s <= 0
    # The ledger cannot know that a disk is free while its host is offline.
    night.end(margin_usd=0.12)


def test_an_unknown_status_ends_no_machine(served: ExitStack) -> None:
    night = VastNight(served)
    night.night.submit(hours=3)
    first = night.step_until(State.BUSY)
    night.fake.set_status(first.handle or "", "unknown")
    night.step(30)
    assert night.instance().handle == first.handle
    night.end(margin_usd=0.3)


def test_an_outbid_machine_that_is_resumed_early_keeps_its_job_and_its_price(served: ExitStack) -> None:
    night = VastNight(served, market="spot")
    night.night.submit(hours=2)
    first = night.step_until(State.BUSY)
    handle = first.handle or ""
    night.fake.outbid(handle)
    night.step(5)
    (outbid,) = night.night.machines()
    assert (outbid.handle, outbid.usd_per_hour) == (handle, pytest.approx(22 * 0.18 / 720))
    night.fake.win_back(handle)
    night.step(5)
    assert night.instance().handle == handle
    night.end()


def test_an_announced_price_above_the_cap_drains_and_one_below_is_accepted(served: ExitStack) -> None:
    night = VastNight(served, market="on-demand", max=2)
    for ask in night.fake.asks:
        ask.end_date = night.night.now + 4 * 3600
    for _ in range(2):
        night.night.submit(hours=20)
    night.step(175)
    cheap, dear = [one for one in night.fake.instances if not one.destroyed]
    night.fake.raise_price(cheap.handle, 0.45)
    night.fake.raise_price(dear.handle, 0.9)
    night.step(10)
    assert cheap.accepted_usd_per_hour == 0.45
    assert dear.destroyed
    reasons = [one.reason for one in night.night.machines() if one.handle == dear.handle]
    assert "above the cap" in reasons[0]
    night.end(margin_usd=0.1)


def test_destroys_without_effect_and_late_lists_are_repeated_until_absence_is_proved(served: ExitStack) -> None:
    night = VastNight(served)
    night.night.submit(hours=0.2)
    night.step_until(State.BUSY)
    night.fake.ignored_destroys, night.fake.listed_after_destroy = 15, 3
    machines = night.end()
    assert all(len(one.absences) == 2 for one in machines if one.state is State.GONE)


@pytest.mark.parametrize(
    ("attributes", "told"),
    [
        ({"spend_limited": True}, "provider_quota_reached"),
        ({"keys": {}}, "provider_key_refused"),
        ({"keys": {KEY: PERMISSIONS - {"instance_write"}}}, "provider_permission_missing"),
    ],
)
def test_a_refused_account_is_told_and_rents_nothing(served: ExitStack, attributes: dict[str, Any], told: str) -> None:
    night = VastNight(served)
    for name, value in attributes.items():
        setattr(night.fake, name, value)
    night.night.submit(hours=1)
    night.step(3)
    assert any(told in failure for report in night.night.reports for failure in report.failures)
    assert len([call for call in night.fake.calls if call.path.startswith("/api/v0/asks/")]) <= 3
    night.end()
    assert night.fake.instances == []


def test_a_key_that_is_revoked_in_the_night_books_nothing_as_gone(served: ExitStack) -> None:
    night = VastNight(served)
    night.night.submit(hours=2)
    first = night.step_until(State.BUSY)
    night.fake.keys = {}
    night.step(10)
    assert [(one.id, one.state) for one in night.night.machines()] == [(first.id, State.BUSY)]
    night.fake.keys = {KEY: PERMISSIONS}
    night.step(5)
    assert len(night.fake.labels()) == 1
    night.end()


def test_foreign_instances_of_the_account_are_never_touched(served: ExitStack) -> None:
    night = VastNight(served)
    night.night.submit(hours=0.5)
    night.step_until(State.BUSY)
    foreign = night.fake.make(
        night.fake.asks[-1], {"label": "mine", "image": "i", "disk": 8, "env": {}}, 0.1, running=True
    )
    night.step(60)
    assert not foreign.destroyed
    foreign.destroyed = True
    night.fake.meter.end(foreign.handle)
    assert [one.destroyed for one in night.fake.instances] == [True, True]
