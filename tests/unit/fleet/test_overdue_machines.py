"""A machine that its provider does not end, or about which no list decides, is told after ten minutes, once."""

from __future__ import annotations

from tests.twins.provider import Faults
from tests.unit.fleet.night import TENANT, Night
from tests.unit.fleet.test_fleet_nights import make_night, require_clean_end


def told(night: Night) -> list[tuple[str, int]]:
    """Return each overdue machine's reason, and the seconds since the machine entered its state."""
    found, entered = [], 0
    for one in reversed(night.store.events(TENANT, night.spec.name, limit=1000)):
        if one.type in ("machine.terminating", "machine.ambiguous"):
            entered = one.at
        if one.type == "machine.overdue":
            found.append((one.reason, one.at - entered))
    return found


def test_a_machine_that_does_not_end_is_told_once() -> None:
    night = make_night(Faults(ignored_destroys=25))
    night.submit(hours=0.2)
    night.step(90)
    ((reason, after_s),) = told(night)
    assert reason.startswith("the provider was asked for the end of the machine 10 minutes ago") and after_s == 600
    require_clean_end(night)


def test_a_create_about_which_no_list_decides_is_told_once() -> None:
    night = make_night(Faults(resets=1, incomplete=25))
    night.submit(hours=0.2)
    night.step(120)
    ((reason, after_s),) = told(night)
    assert reason.startswith("no complete list") and after_s == 600
    require_clean_end(night)


def test_a_usual_night_tells_nothing() -> None:
    night = make_night(Faults(lost_answers=1, ignored_destroys=5))
    night.submit(hours=0.2)
    night.step(60)
    assert told(night) == []
