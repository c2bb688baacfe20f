"""The times and shares that docs/fleet.md names are those of the product."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.contract.fleets.fleet import MachineState as State
from functions.domain.checkpoints.packs import SWEEPER_TIMEOUT_S
from functions.fleet import breaker, ledger, lifecycle, machine_states
from functions.fleet.machine_states import DEADLINES
from functions.fleet.offers.reputation import LONGEST_DOUBLED_S, QUARANTINE_S
from functions.fleet.records import MIN_ABSENCES_APART_S
from functions.fleet.ticks import balances

PAGE = " ".join((Path(__file__).resolve().parents[3] / "docs" / "fleet.md").read_text(encoding="utf-8").split())
MINUTE, HOUR, DAY = 60, 3600, 24 * 3600


@pytest.mark.parametrize(
    ("sentence", "documented", "real"),
    [
        (
            "two complete lists of its provider without the machine, at least a minute apart",
            MINUTE,
            MIN_ABSENCES_APART_S,
        ),
        ("holds a reservation for the next hour", HOUR, ledger.HORIZON_S),
        ("Seven minutes before the reservation of a machine ends", 7 * MINUTE, machine_states.CHECKPOINT_MARGIN_S),
        ("a machine drains seven minutes before its contract ends", 7 * MINUTE, machine_states.CHECKPOINT_MARGIN_S),
        ("is given back, at the latest after five minutes", 5 * MINUTE, DEADLINES[State.DRAINING].after_s),
        ("no worker within 15 minutes", 15 * MINUTE, DEADLINES[State.BOOTING].after_s),
        ("80 % of a bound are spent", 0.8, ledger.WARN_AT),
        ("is 5 %, and two minutes of rent, above or below", 0.05, ledger.CHARGE_TOLERANCE),
        ("is 5 %, and two minutes of rent, above or below", 2 * MINUTE, ledger.CHARGE_TOLERANCE_S),
        ("After three machines of one provider in a row", 3, breaker.FAILURES),
        ("rents nothing there for 15 minutes", 15 * MINUTE, breaker.FIRST_PAUSE_S),
        ("doubles the pause, up to 4 hours", 4 * HOUR, breaker.LONGEST_PAUSE_S),
        ("The token is valid once, for half an hour", 30 * MINUTE, machine_states.ENROLS_WITHIN_S),
        ("its host is not rented for 30 days", 30 * DAY, QUARANTINE_S["hardware"]),
        ("its host is not rented for 6 hours", 6 * HOUR, QUARANTINE_S["shortfall"]),
        ("for twice as long after each further failure, up to 7 days", 7 * DAY, LONGEST_DOUBLED_S),
        ("still lists a machine ten minutes after the order to end it", 10 * MINUTE, machine_states.OVERDUE_S),
        ("the credit lasts two hours at the present spending", 2, balances.LOW_H),
        ("Twice an hour the tick looks at the credit", HOUR // 2, balances.EVERY_S),
        ("summed by Baton and stored every five minutes", 5 * MINUTE, lifecycle.COST_STORED_EVERY_S),
        ("in Lambda that is 17 s of 55 s", 55, SWEEPER_TIMEOUT_S),
    ],
)
def test_the_page_names_the_number_of_the_product(sentence: str, documented: float, real: float) -> None:
    assert sentence in PAGE
    assert documented == real
