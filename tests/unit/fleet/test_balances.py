"""Credit that ends soon is told to the fleets that spend it; a tick remembers that it has finished."""

from __future__ import annotations

import pytest

from functions.fleet.drivers.protocol import AccountReport, ProviderUnavailable
from functions.fleet.ticks.balances import EVERY_S
from tests.twins.provider import VirtualProvider
from tests.unit.fleet.night import TENANT, Night
from tests.unit.fleet.test_fleet_nights import spec
from tests.unit.fleet.test_fleet_providers import add_fleet


@pytest.fixture
def night(monkeypatch: pytest.MonkeyPatch) -> Night:
    made = Night(spec(), {"loopback": VirtualProvider()}, now=1_699_999_200)
    made.submit(hours=5)
    return made


def warnings(night: Night) -> list[str]:
    events = night.store.events(TENANT, night.spec.name, limit=1000)
    return [one.reason for one in events if one.type == "balance.low"]


def test_a_low_credit_is_an_event_of_the_fleet_twice_an_hour(night: Night, monkeypatch: pytest.MonkeyPatch) -> None:
    provider, examined = night.providers["loopback"], list[int]()
    balance: float | None = 0.5

    def examine(prefix: str) -> AccountReport:
        examined.append(night.now)
        if balance is None:
            raise ProviderUnavailable("502")
        return AccountReport(account="me", balance_usd=balance)

    monkeypatch.setattr(provider, "examine", examine)
    night.step(2 + EVERY_S // 60)
    assert warnings(night) == [], "0.5 USD last for 2.5 hours at 0.2 USD/h"
    balance = 0.4
    night.step(EVERY_S // 60)
    assert warnings(night) == [
        "loopback: the credit of 0.40 USD lasts 2.0 h at 0.20 USD/h; add credit before the provider ends the machines"
    ]
    balance = -0.001
    night.step(EVERY_S // 60)
    assert warnings(night)[0] == (
        "loopback: the credit is 0.00 USD; add credit, because the provider rents nothing without"
    )
    balance = None
    night.step(EVERY_S // 60)
    failures = [one for report in night.reports for one in report.failures]
    assert "loopback: the credit cannot be read: 502" in failures
    assert len(warnings(night)) == 2 and [at % EVERY_S for at in examined] == [0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("offsets_s", "looks"),
    [
        ((0, 20, 59), [0]),
        ((1799, 1865), [1865]),
        ((299, 300, 1799, 1800, 2099, 3601), [299, 1800, 3601]),
        ((300, 1799), []),
    ],
    ids=["nudges", "a tick that ends late", "the edges of periods", "outside"],
)
def test_one_tick_of_each_half_hour_looks_at_a_credit(
    night: Night, monkeypatch: pytest.MonkeyPatch, offsets_s: tuple[int, ...], looks: list[int]
) -> None:
    examined = examined_at(night, monkeypatch)
    begun = night.now
    for offset_s in offsets_s:
        night.now = begun + offset_s
        night.controller().tick()
    assert examined == looks and len(warnings(night)) == len(looks)


def examined_at(night: Night, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let a machine run; return the list of the coming looks, in seconds of the next period."""
    night.now -= 3 * EVERY_S
    night.step(2)
    begun, examined = 1_699_999_200, list[int]()

    def examine(prefix: str) -> AccountReport:
        examined.append(night.now - begun)
        return AccountReport(account="me", balance_usd=0.4)

    monkeypatch.setattr(night.providers["loopback"], "examine", examine)
    night.now = begun
    return examined


def test_a_tick_across_the_beginning_of_a_period_leaves_the_look_to_the_next_one(
    night: Night, monkeypatch: pytest.MonkeyPatch
) -> None:
    examined = examined_at(night, monkeypatch)
    night.now -= 5

    def wait(call: str) -> None:
        night.now += 15 * (call == "inventory")

    night.interrupt = wait
    for _ in range(3):
        night.controller().tick()
        night.now += 45
    assert examined == [70]


def test_ticks_that_do_not_finish_look_once(night: Night, monkeypatch: pytest.MonkeyPatch) -> None:
    examined = examined_at(night, monkeypatch)
    add_fleet(night, name="second", providers=["loopback"])
    night.store.damaged_fleets.add((TENANT, "second"))
    night.step(6)
    assert examined == [0] and not night.reports[-1].finished


def test_a_tick_without_time_has_not_finished(night: Night) -> None:
    assert night.store.last_tick() is None
    night.step()
    first = night.store.last_tick()
    assert first is not None
    night.time_left_s = 1.0
    night.step(2)
    assert night.store.last_tick() == first
    night.time_left_s = 60.0
    night.step()
    assert night.store.last_tick() == night.now - 60
