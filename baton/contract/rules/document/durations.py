"""Durations of rules: `3 checks`, `200 steps`, `10m`, `3 of 5`."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from baton.contract.rules.language.syntax_tree import format_number
from baton.contract.rules.metrics import UNITS, Kind

Measure = Literal["checks", "steps", "seconds"]
MAX_COUNT = 10**9
MAX_CHECKS_OF = 1_000
"""Upper bound of m in `n of m`; a rule stores m results."""
MAX_SECONDS = 366 * 86400.0

_COUNT = re.compile(r"\s*([0-9]{1,12})\s*(checks?|steps?)\s*")
_SHARE = re.compile(r"\s*([0-9]{1,12})\s+of\s+(?:([0-9]{1,12})|all)\s*")
_DURATION = re.compile(r"\s*([0-9]{1,12}(?:\.[0-9]{1,9})?)\s*([A-Za-z]{1,8})\s*")


class Period(NamedTuple):
    """A number of checks, steps or seconds."""

    measure: Measure
    amount: float

    def __str__(self) -> str:
        """Format the period as a document writes it."""
        if self.measure == "seconds":
            return f"{format_number(self.amount)}s"
        return f"{format_number(self.amount)} {self.measure if self.amount != 1 else self.measure[:-1]}"


OF_ALL = -1
"""Value of `of` that counts all checks since the rule last fired."""


class PendingPeriod(NamedTuple):
    """Time that a condition must be true before its rule fires (`for`). `of`: window of checks, OF_ALL, or 0 for an
    unbroken run.
    """

    period: Period
    of: int = 0

    def __str__(self) -> str:
        """Format the period as a document writes it."""
        if not self.of:
            return str(self.period)
        return f"{format_number(self.period.amount)} of {'all' if self.of == OF_ALL else self.of}"


ONE_CHECK = PendingPeriod(Period("checks", 1))


def parse_period(value: object, *measures: Measure) -> Period | None:
    """Parse a period of a document; None if it has none of these measures."""
    if not isinstance(value, str):
        return None
    found = _counted(value) or _timed(value)
    return found if found is not None and found.measure in measures else None


def parse_pending_period(value: object) -> PendingPeriod | None:
    """Parse the value of `for`; None if it is invalid."""
    if isinstance(value, str) and (share := _SHARE.fullmatch(value)):
        if share[2] is None:
            return PendingPeriod(Period("checks", int(share[1])), OF_ALL) if 1 <= int(share[1]) <= MAX_COUNT else None
        needed, of = int(share[1]), int(share[2])
        return PendingPeriod(Period("checks", needed), of) if 1 <= needed <= of <= MAX_CHECKS_OF else None
    period = parse_period(value, "checks", "steps", "seconds")
    return PendingPeriod(period) if period is not None and period.amount > 0 else None


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
