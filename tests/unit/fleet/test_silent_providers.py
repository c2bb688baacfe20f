"""A provider that accepts connections and answers nothing costs the tick its time: the other providers go on."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Future, wait
from threading import Event
from typing import Any

import pytest

from baton.contract.fleets.fleet import FleetSpec
from baton.contract.fleets.fleet import MachineState as State
from functions.fleet.drivers.protocol import AccountReport, CreateIntent, CreateResult, NotCreated, ProviderUnavailable
from functions.fleet.drivers.ssh.connection import CONNECT_S
from functions.fleet.records import Inventory, Offer
from functions.fleet.ticks import tick
from tests.kits.waiting import soon
from tests.twins.provider import VirtualProvider
from tests.unit.fleet.night import Night
from tests.unit.fleet.test_fleet_providers import add_fleet, make_night, waits

READ_S, SENT_S = 30.0, 15.0
"""Time of a read and of a mutating call without an answer: two tries and one of ProviderHttp."""
LEAST_LEFT_S = 3.0
"""Time that a tick leaves for its last writes and the metrics."""


class BlackHole(VirtualProvider):
    """Provider whose calls use up the time of the tick, and fail then."""

    night: Night
    silent: frozenset[str] = frozenset()
    asked: list[str]
    sent_s: float = SENT_S

    def _hang(self, call: str, seconds: float) -> None:
        self.asked.append(call)
        if call in self.silent:
            self.night.time_left_s -= seconds
            raise ProviderUnavailable(f"{call}: the provider cannot be reached")

    def inventory(self, prefix: str, now: int) -> Inventory:
        # The tick waits for a list no longer than for 20 s of its 55 s.
        self._hang("inventory", 20.0)
        return super().inventory(prefix, now)

    def quote(self, spec: FleetSpec) -> Sequence[Offer]:
        self._hang("quote", READ_S)
        return super().quote(spec)

    def create(self, intent: CreateIntent) -> CreateResult:
        try:
            self._hang("create", self.sent_s)
        except ProviderUnavailable as error:
            return NotCreated(reason=str(error))
        return super().create(intent)

    def destroy(self, handle: str) -> bool:
        self._hang("destroy", self.sent_s)
        return super().destroy(handle)

    def examine(self, prefix: str) -> AccountReport:
        self._hang("examine", READ_S)
        return super().examine(prefix)

    def charged_usd(self, handle: str) -> float | None:
        self._hang("charge", READ_S)
        return super().charged_usd(handle)


def make_hole(**changes: Any) -> tuple[Night, BlackHole]:
    """Make a night whose fleet prefers vast, which can fall silent, to ssh."""
    hole = BlackHole(name="vast")
    night = make_night(hole, **changes)
    hole.night, hole.asked = night, []
    return night, hole


def step(night: Night, minutes: int = 1) -> None:
    """Run ticks of 55 s, as in Lambda, none of which is ended from outside."""
    for _ in range(minutes):
        night.time_left_s = 55.0
        night.step()
        assert night.time_left_s >= LEAST_LEFT_S, "the function would have been ended"


def at(night: Night, provider: str) -> list[State]:
    return [one.state for one in night.machines() if one.provider == provider]


@pytest.mark.parametrize("providers", [["vast", "ssh"], ["ssh", "vast"]])
@pytest.mark.parametrize("choose", ["order", "price"])
def test_a_job_starts_elsewhere_in_the_tick_in_which_a_provider_answers_nothing(
    providers: list[str], choose: str
) -> None:
    night, hole = make_hole(providers=providers, choose=choose)
    hole.silent = frozenset({"inventory", "quote", "create", "destroy", "examine", "charge"})
    night.submit(hours=0.2)
    step(night)
    assert [one.provider for one in night.machines() if one.billed] == ["ssh"]
    assert hole.asked == ["inventory"], "the other calls would hang as well"
    assert night.reports[-1].finished


def test_a_fleet_tells_which_provider_did_not_answer() -> None:
    night, hole = make_hole(providers=["vast"])
    hole.silent = frozenset({"inventory", "quote"})
    night.submit(hours=0.2)
    step(night)
    assert waits(night) == "vast: provider_unavailable: no answer in this tick; the next tick asks again"


def test_machines_at_a_silent_provider_stop_no_start_elsewhere_and_are_asked_to_end_in_each_tick() -> None:
    night, hole = make_hole(max=4)
    night.submit(hours=0.2)
    night.submit(hours=0.2)
    step(night, 2)
    hole.silent = frozenset({"inventory", "destroy"})
    night.store.put_fleet(
        night.store.fleets()[0].model_copy(
            update={"version": 2, "spec": night.spec.model_copy(update={"providers": ["ssh"]})}
        )
    )
    step(night, 8)
    assert at(night, "vast") == [State.TERMINATING] * 2
    assert at(night, "ssh") != [], "the jobs go on at the other provider meanwhile"
    hole.asked.clear()
    step(night, 4)
    assert hole.asked.count("destroy") == 4, "one call that hangs in each tick"
    assert all(one.finished for one in night.reports)
    hole.silent = frozenset()
    step(night, 40)
    assert (night.billing(), at(night, "vast")) == ([], [State.GONE] * 2)


def test_a_list_without_an_answer_keeps_no_machine_whose_provider_accepts_its_end() -> None:
    """The list of a provider can hang for hours while its other calls work: its machines must not be paid on."""
    night, hole = make_hole(max=2, providers=["vast"])
    for _ in range(2):
        night.submit(hours=5)
    step(night, 5)
    hole.silent = frozenset({"inventory"})
    night.store.put_fleet(night.store.fleets()[0].model_copy(update={"version": 2, "stopped": True}))
    step(night, 8)
    assert night.billing() == [], "destroyed without a list"
    assert at(night, "vast") == [State.TERMINATING] * 2, "nothing proves their end yet"
    hole.silent = frozenset()
    step(night, 5)
    assert at(night, "vast") == [State.GONE] * 2


def test_a_dead_host_that_cannot_be_left_stops_no_start_at_the_other_hosts() -> None:
    night, hole = make_hole(max=2, providers=["vast"])
    night.submit(hours=0.1)
    hole.silent, hole.sent_s = frozenset({"destroy"}), CONNECT_S
    step(night, 40)
    assert at(night, "vast") == [State.TERMINATING], "the job has ended, and the host answers no more"
    night.submit(hours=5)
    step(night, 3)
    assert len(at(night, "vast")) == 2


@pytest.mark.parametrize("call", ["quote", "create"])
def test_a_provider_that_falls_silent_at_a_start_is_left_out_of_the_rest_of_the_tick(call: str) -> None:
    night, hole = make_hole(max=1)
    add_fleet(night, name="second", choose="order")
    hole.silent = frozenset({call})
    night.submit(hours=0.2)
    night.submit(hours=0.2)
    step(night)
    assert hole.asked.count(call) == 1
    assert sorted((one.fleet, one.provider) for one in night.machines() if one.handle) == [
        ("nights", "ssh"),
        ("second", "ssh"),
    ]


@pytest.mark.parametrize("call", ["charge", "examine"])
def test_a_read_that_hangs_beside_the_machines_leaves_the_tick_its_time(call: str) -> None:
    night, hole = make_hole(max=3, providers=["vast"])
    night.now = hole.now = 1_699_999_200
    for hours in (0.1, 0.1, 5):
        night.submit(hours=hours)
    hole.silent = frozenset({call})
    step(night, 40)
    assert call in hole.asked
    assert at(night, "vast").count(State.GONE) == 2 and len(night.billing()) == 1


class Stuck(VirtualProvider):
    """Provider whose offers come only when the test ends."""

    released: Event
    hanging: list[str]

    def quote(self, spec: FleetSpec) -> Sequence[Offer]:
        self.hanging.append("quote")
        self.released.wait(60)
        return super().quote(spec)


def test_the_offers_of_a_provider_are_waited_for_while_a_create_still_has_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stuck = Stuck(name="vast")
    stuck.released, stuck.hanging = Event(), []
    limits_s = list[float]()

    def expire(calls: Collection[Future[Any]], limit_s: float) -> object:
        limits_s.append(limit_s)
        soon(lambda: sum(not one.done() for one in calls) == len(stuck.hanging))
        return wait(calls, 0)

    monkeypatch.setattr(tick, "wait", expire)
    night = make_night(stuck)
    night.time_left_s = 55.0
    night.submit(hours=0.2)
    night.step()
    stuck.released.set()
    assert [one.provider for one in night.machines()] == ["ssh"]
    assert limits_s == [20.0, 33.0]
