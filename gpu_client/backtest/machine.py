"""When a rule fires and is cleared, from all results of its checks: from one moment at which something can happen to
the next, whatever lies between.

It decides what `baton.contract.rules.machine` decides check by check, for steps and times that never go back.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from baton.contract.rules.periods import OF_ALL
from baton.contract.rules.rule import Rule
from gpu_client.backtest.history import Flags, Floats, Whole

UNKNOWN, NO, YES = 0, 1, 2
"""Results of checks."""


class Checks(NamedTuple):
    """All checks of a rule, in their order."""

    results: np.ndarray[tuple[int], np.dtype[np.int8]]
    releases: Flags | None
    """Where `clear` is true; None without it."""
    steps: Whole
    times: Floats


class Decided(NamedTuple):
    """Numbers of checks."""

    fired: Whole
    cleared: Whole


def decide(rule: Rule, checks: Checks) -> Decided:
    """When it fires, when it is cleared."""
    if np.count_nonzero(checks.results == YES) < min(int(rule.hold.period.amount), 2) or not len(checks.results):
        return Decided(np.zeros(0, np.int64), np.zeros(0, np.int64))
    first = _first_warm(rule, checks)
    hold, of = rule.hold
    plain = hold.measure == "checks" and not of and rule.cooldown is None and rule.clear is None
    if plain and rule.max_fires is None:
        return _by_runs(checks, first, int(hold.amount))
    return _Walk(rule, checks).decided(first)


def _first_warm(rule: Rule, checks: Checks) -> int:
    """The number of the first check that counts."""
    if rule.warmup is None:
        return 0
    measure, amount = rule.warmup
    if measure == "checks":
        return int(amount)
    if measure == "steps":
        return int(np.searchsorted(checks.steps, amount))
    # not a search for a sum: the difference is what is compared, and it is rounded
    return _first(checks.times - checks.times[0] >= amount)


def _first(flags: Flags) -> int:
    """The first that is set, or their number."""
    return int(np.argmax(flags)) if flags.any() else len(flags)


def _run_lengths(yes: Flags) -> NDArray[np.int32]:
    """How many in a row are true, up to each."""
    places = np.arange(len(yes), dtype=np.int32)
    runs: NDArray[np.int32] = places - np.maximum.accumulate(np.where(yes, np.int32(-1), places))
    return runs


def _by_runs(checks: Checks, first: int, needed: int) -> Decided:
    """Without anything but `for`: at the so many-th check of each run, and at its end."""
    known = np.flatnonzero(checks.results[first:] != UNKNOWN) + first
    yes = checks.results[known] == YES
    runs = _run_lengths(yes)
    fired = known[runs == needed]
    ended = np.zeros(len(yes), bool)
    ended[1:] = ~yes[1:] & (runs[:-1] >= needed)
    return Decided(fired, known[ended])


class _Walk:
    def __init__(self, rule: Rule, checks: Checks) -> None:
        self._rule = rule
        self._checks = checks
        self._total = len(checks.results)
        (self._measure, amount), self._of = rule.hold
        self._needed = amount
        self._known = np.flatnonzero(checks.results != UNKNOWN)
        yes = checks.results[self._known] == YES
        self._sums = np.concatenate(([0], np.cumsum(yes)))
        """True results before each known one."""
        releases = checks.results == NO if checks.releases is None else checks.releases
        self._releases = np.flatnonzero(releases)
        if self._measure != "checks":
            self._prepare_runs(yes)
        elif self._of > 0:
            back = np.maximum(np.arange(len(yes)) + 1 - self._of, 0)
            self._candidates = np.flatnonzero(self._sums[1:] - self._sums[back] >= amount)
        elif not self._of:
            self._candidates = np.flatnonzero(_run_lengths(yes) >= amount)

    def _prepare_runs(self, yes: Flags) -> None:
        """Runs of true results, as numbers of known ones; and those that last for long enough."""
        edges = np.diff(np.concatenate(([False], yes, [False])).astype(np.int8))
        self._begins, self._ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1) - 1
        at: Floats | Whole = self._checks.steps if self._measure == "steps" else self._checks.times
        self._at = at = at[self._known]
        self._long = np.flatnonzero(at[self._ends] - at[self._begins] >= self._needed)

    def decided(self, first: int) -> Decided:
        fired: list[int] = []
        cleared: list[int] = []
        rule, total = self._rule, self._total
        most = rule.max_fires if rule.max_fires is not None else total + 1
        # `at`: the next check. `count_from`: the first that counts, which may be before that
        at, count_from, active = first, first, False
        while at < total:
            spent = len(fired) >= most
            if not active and spent:
                break
            cool = self._first_cool(fired[-1]) if fired else 0
            release = self._next_release(at) if active else total
            held = spent or rule.clear is not None or rule.cooldown is None
            if active and (held or release <= max(at, cool)):
                if release >= total:
                    break
                cleared.append(release)
                active, at = False, release + 1
                count_from = at
                continue
            count_from = max(count_from, cool)
            fires = self._next_fire(count_from)
            if active and release < fires:
                cleared.append(release)
                active, at = False, release + 1
                # what is counted of all goes on
                count_from = count_from if self._of == OF_ALL else at
                continue
            if fires >= total:
                break
            fired.append(fires)
            active, at = True, fires + 1
            count_from = at
        return Decided(np.array(fired, np.int64), np.array(cleared, np.int64))

    def _next_release(self, at: int) -> int:
        place = int(np.searchsorted(self._releases, at))
        return int(self._releases[place]) if place < len(self._releases) else self._total

    def _first_cool(self, fired: int) -> int:
        """The first check that is not in the cooldown."""
        period = self._rule.cooldown
        if period is None:
            return 0
        steps, times = self._checks.steps, self._checks.times
        if period.measure == "checks":
            return fired + int(period.amount)
        if period.measure == "steps":
            return int(np.searchsorted(steps, steps[fired] + int(period.amount)))
        # near the sum, for the difference is rounded once more
        near = int(np.searchsorted(times, times[fired] + period.amount))
        while near > fired and times[near - 1] - times[fired] >= period.amount:
            near -= 1
        while near < self._total and times[near] - times[fired] < period.amount:
            near += 1
        return near

    def _next_fire(self, start: int) -> int:
        """The check at which it has been true for long enough, of those from `start` on; their number if none."""
        first = int(np.searchsorted(self._known, start))
        if first >= len(self._known):
            return self._total
        if self._measure != "checks":
            found = self._in_time(first)
        elif self._of == OF_ALL:
            found = self._after_so_many(first)
        elif self._of:
            found = self._after_so_many(first)
            if found >= first + self._of:
                found = self._candidate(first + self._of - 1)
        else:
            found = self._candidate(first + int(self._needed) - 1)
        return int(self._known[found]) if found < len(self._known) else self._total

    def _after_so_many(self, first: int) -> int:
        """The known result with which so many were true."""
        return int(np.searchsorted(self._sums, self._sums[first] + int(self._needed))) - 1

    def _candidate(self, least: int) -> int:
        place = int(np.searchsorted(self._candidates, least))
        return int(self._candidates[place]) if place < len(self._candidates) else len(self._known)

    def _in_time(self, first: int) -> int:
        run = int(np.searchsorted(self._ends, first))
        if run >= len(self._begins):
            return len(self._known)
        begin = max(int(self._begins[run]), first)
        end = int(self._ends[run])
        found = self._in_run(begin, end)
        if found <= end:
            return found
        place = int(np.searchsorted(self._long, run, side="right"))
        if place >= len(self._long):
            return len(self._known)
        run = int(self._long[place])
        return self._in_run(int(self._begins[run]), int(self._ends[run]))

    def _in_run(self, begin: int, end: int) -> int:
        """The first that is so long after the begin; beyond the end if none is."""
        at = self._at[begin : end + 1]
        if at[-1] - at[0] < self._needed:
            return end + 1
        near = int(np.searchsorted(at, at[0] + self._needed))
        near = min(near, len(at) - 1)
        while near > 0 and at[near - 1] - at[0] >= self._needed:
            near -= 1
        while at[near] - at[0] < self._needed:
            near += 1
        return begin + near
