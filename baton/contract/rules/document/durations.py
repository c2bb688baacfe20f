"""How long: `3 checks`, `200 steps`, `10m`, `3 of 5`."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from baton.contract.rules.language.syntax_tree import number_text
from baton.contract.rules.metrics import UNITS, Kind

Measure = Literal["checks", "steps", "seconds"]
MAX_COUNT = 10**9
MAX_CHECKS_OF = 1_000
"""Of `n of m`: so many results a rule remembers."""
MAX_SECONDS = 366 * 86400.0

_COUNT = re.compile(r"\s*([0-9]{1,12})\s*(checks?|steps?)\s*")
_SHARE = re.compile(r"\s*([0-9]{1,12})\s+of\s+(?:([0-9]{1,12})|all)\s*")
_DURATION = re.compile(r"\s*([0-9]{1,12}(?:\.[0-9]{1,9})?)\s*([A-Za-z]{1,8})\s*")


class Period(NamedTuple):
    """So many checks, steps or seconds."""

    measure: Measure
    amount: float

    def __str__(self) -> str:
        """As it is written."""
        if self.measure == "seconds":
            return f"{number_text(self.amount)}s"
        return f"{number_text(self.amount)} {self.measure if self.amount != 1 else self.measure[:-1]}"


OF_ALL = -1
"""Of all checks since it last fired, however many."""


class Hold(NamedTuple):
    """How long a condition has to be true. `of`: so many of the last `of` checks, or OF_ALL; 0 for without a break."""

    period: Period
    of: int = 0

    def __str__(self) -> str:
        """As it is written."""
        if not self.of:
            return str(self.period)
        return f"{number_text(self.period.amount)} of {'all' if self.of == OF_ALL else self.of}"


ONE_CHECK = Hold(Period("checks", 1))


def period_of(value: object, *measures: Measure) -> Period | None:
    """From what a document says; None if it is none of these measures."""
    if not isinstance(value, str):
        return None
    found = _counted(value) or _timed(value)
    return found if found is not None and found.measure in measures else None


def hold_of(value: object) -> Hold | None:
    """From what a document says of `for`."""
    if isinstance(value, str) and (share := _SHARE.fullmatch(value)):
        if share[2] is None:
            return Hold(Period("checks", int(share[1])), OF_ALL) if 1 <= int(share[1]) <= MAX_COUNT else None
        needed, of = int(share[1]), int(share[2])
        return Hold(Period("checks", needed), of) if 1 <= needed <= of <= MAX_CHECKS_OF else None
    period = period_of(value, "checks", "steps", "seconds")
    return Hold(period) if period is not None and period.amount > 0 else None


def _counted(text: str) -> Period | None:
    found = _COUNT.fullmatch(text)
    if not found or int(found[1]) > MAX_COUNT:
        return None
    return Period("checks" if found[2].startswith("check") else "steps", int(found[1]))


def _timed(text: str) -> Period | None:
    found = _DURATION.fullmatch(text)
    kind, factor = UNITS.get(found[2], (None, 0.0)) if found else (None, 0.0)
    if found is None or kind is not Kind.DURATION or float(found[1]) * factor > MAX_SECONDS:
        return None
    return Period("seconds", float(found[1]) * factor)
