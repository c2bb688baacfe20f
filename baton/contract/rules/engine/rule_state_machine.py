"""What becomes of a rule's results: for, warm-up, cooldown, once, hysteresis. One for each rule, whatever made it due.

A condition that is not known neither counts nor resets. While a rule warms up, cools down, or waits to be cleared,
nothing is counted. A rule without `clear` is cleared by its condition being false; one with a `cooldown` and without
`clear` may fire again while the condition stays true. One that has fired as often as it may goes on
counting, for the moment when a revision lets it fire again.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from baton.contract.rules.document.durations import OF_ALL, Period
from baton.contract.rules.document.rule import Rule
from baton.contract.rules.engine.verdicts import State
from baton.contract.rules.numbers import decoded, encoded
from baton.contract.rules.windows.series import Series
from baton.contract.rules.windows.window_fast_paths import Reader

MAX_ERRORS = 3

_COUNTERS = ("checks", "run", "fires", "fired_checks", "errors")
_NUMBERS = ("began", "since", "fired_step", "fired_at", "due_step", "due_at")
_STEPS = ("onset", "fired_onset")
"""Not in states that were saved before they were counted."""
_FLAGS = ("warm", "active")
_LASTS = "lasts"
"""Not in states that were saved before it was kept."""


class Machine:
    """The counters of one rule."""

    __slots__ = (
        *_COUNTERS, *_NUMBERS, *_STEPS, *_FLAGS, _LASTS, "condition", "cooldown", "hold_of", "hold_period",
        "index", "inert", "needed", "reads", "release", "result_steps", "results", "rule",  "timed", "truth",
    )  # fmt: skip

    def __init__(self, rule: Rule, condition: Reader, release: Reader | None) -> None:
        """`release`: the compiled `clear`."""
        self.rule = rule
        self.condition = condition
        self.release = release
        self.hold_period, self.hold_of = rule.hold
        self.needed = self.hold_period.amount
        self.timed = self.hold_period.measure != "checks"
        self.cooldown = rule.cooldown
        self.reads: list[Series] = []
        """The metrics of its expressions."""
        self.index = 0
        """Its place among the rules."""
        self.clear_all()

    def clear_all(self) -> None:
        """As never checked."""
        self.checks = self.run = self.fires = self.fired_checks = self.errors = 0
        self.began: float | None = None
        self.since: float | None = None
        """Step or time at which the condition became true."""
        self.fired_step: float | None = None
        self.fired_at: float | None = None
        self.due_step: float | None = None
        self.due_at: float | None = None
        self.warm = self.rule.warmup is None
        self.active = False
        """It has fired, and was not cleared since."""
        self.lasts = False
        """It is active, and its condition was not false since it fired."""
        self.onset: int | None = None
        """The step at which what is being counted began to be true."""
        self.fired_onset: int | None = None
        """The same of what it last fired for."""
        self.results: deque[bool] = deque(maxlen=max(self.hold_of, 1))
        self.result_steps: deque[int] = deque(maxlen=max(self.hold_of, 1))
        self.truth: bool | None = False
        self.inert: bool | None = False if self.warm else None
        """The result that changes nothing, for now: False where nothing is being counted, True where a rule that has
        fired waits to be cleared by its condition. None: there is no such result."""
        """A false condition changes nothing."""

    @property
    def disabled(self) -> bool:
        """Whether it has failed too often."""
        return self.errors >= MAX_ERRORS

    @property
    def spent(self) -> bool:
        """Whether it has fired as often as it may."""
        return self.rule.max_fires is not None and self.fires >= self.rule.max_fires

    def check(self, truth: bool | None, step: int, now: float) -> State | None:
        """Take a result. FIRED or CLEARED if it did that, else None."""
        self.checks += 1
        self.truth = truth
        if not self.warm and not self._warms_up(step, now):
            return None
        if truth is False:
            self.lasts = False
        if self.active and self._is_released(truth):
            self.active = self.lasts = False
            if self.hold_of == OF_ALL:
                self.inert = None if self.run else False
            else:
                self._forget()
            return State.CLEARED
        if self._is_held(step, now):
            if self.cooldown is not None:
                self.inert = None
            else:
                self.inert = (True if self.release is None else None) if self.active else False
            return None
        if not self._count(truth, step, now) or self.spent:
            self.inert = None if self.active or self.since is not None or self.run else False
            return None
        self.fires += 1
        self.active = self.lasts = True
        self.fired_step, self.fired_at, self.fired_checks = step, now, self.checks
        self.fired_onset = step if self.onset is None else self.onset
        self._forget()
        self.inert = None
        return State.FIRED

    def fail(self) -> State:
        """Take an error instead of a result."""
        self.checks += 1
        self.errors += 1
        return State.ERROR

    def arm(self) -> None:
        """Let it fire again, as if it never had: at the next check that is true, if its condition held since it fired.

        Whatever else counts towards `for` is kept.
        """
        if self.lasts:
            all_but_one = int(self.needed) - 1
            begun = self.fired_step if self.fired_onset is None else self.fired_onset
            self.onset = int(begun or 0)
            if self.timed:
                fired = self.fired_step if self.hold_period.measure == "steps" else self.fired_at
                self.since = (fired or 0) - self.needed
            else:
                self.run = all_but_one
            if self.hold_of > 0:
                self.results = deque([True] * all_but_one, maxlen=self.hold_of)
                self.result_steps = deque([self.onset] * all_but_one, maxlen=self.hold_of)
        self.fires = self.fired_checks = self.errors = 0
        self.fired_step = self.fired_at = self.fired_onset = None
        self.active = self.lasts = False
        self.inert = None

    def revised(self, deeds: object, *, elsewhere: bool) -> str:
        """Why it is armed anew by a revision, if it is.

        `deeds`: what it did before; None in states that did not have it yet. `elsewhere`: something of the document
        has changed.
        """
        reason = ""
        if deeds not in (None, self.rule.deeds):
            reason = "its 'do' or 'mode' has changed: it is armed anew"
        elif elsewhere and self.disabled:
            reason = "it was disabled by errors: it is armed anew"
        if reason:
            self.arm()
        elif elsewhere:
            self.errors = 0
        return reason

    def _warms_up(self, step: int, now: float) -> bool:
        """Whether the warm-up is over."""
        if self.began is None:
            self.began = now
        warmup = self.rule.warmup
        if warmup is not None:
            gone = {"steps": step, "seconds": now - self.began, "checks": self.checks - 1}[warmup.measure]
            if gone < warmup.amount:
                return False
        self.warm = True
        return True

    def _is_released(self, truth: bool | None) -> bool:
        return truth is False if self.release is None else self.release() is True

    def _is_held(self, step: int, now: float) -> bool:
        """Whether it may not fire yet: it was not cleared, or cools down."""
        if self.active and (self.release is not None or self.cooldown is None):
            return True
        return not self.is_cool(step, now)

    def is_cool(self, step: int, now: float) -> bool:
        """Whether the cooldown is over."""
        if self.cooldown is None or self.fired_step is None or self.fired_at is None:
            return True
        return self._gone(self.cooldown, step, now) >= self.cooldown.amount

    def _gone(self, period: Period, step: int, now: float) -> float:
        """Since it last fired."""
        if period.measure == "steps":
            return step - (self.fired_step or 0)
        return now - (self.fired_at or 0) if period.measure == "seconds" else self.checks - self.fired_checks

    def _count(self, truth: bool | None, step: int, now: float) -> bool:
        """Whether the condition has been true for long enough."""
        if truth is None:
            return False
        if self.timed:
            if not truth:
                self.since = self.onset = None
                return False
            at = step if self.hold_period.measure == "steps" else now
            # a training that was rolled back comes to the same steps again
            if self.since is None or at < self.since:
                self.since, self.onset = at, step
            return at - self.since >= self.needed
        if self.hold_of == OF_ALL:
            self.run += truth
            if truth and self.onset is None:
                self.onset = step
        elif self.hold_of:
            self.results.append(truth)
            self.result_steps.append(step)
            self.run = sum(self.results)
            if self.run == 0:
                self.results.clear()
                self.result_steps.clear()
            true_at = (at for at, true in zip(self.result_steps, self.results, strict=True) if true)
            self.onset = next(true_at, None)
        else:
            self.run = self.run + 1 if truth else 0
            if self.run <= 1:
                self.onset = step if truth else None
        return self.run >= self.needed

    def _forget(self) -> None:
        self.run = 0
        self.since = self.onset = None
        self.results.clear()
        self.result_steps.clear()
        self.inert = None if self.active else False

    def progress(self, step: int, now: float) -> float:
        """How much there is of what is needed, in the rule's own measure."""
        if not self.timed:
            return float(self.run)
        at = step if self.hold_period.measure == "steps" else now
        return 0.0 if self.since is None else float(at - self.since)

    def left(self, state: State, step: int, now: float) -> Period | None:
        """After how much more it counts again, if it warms up or cools down."""
        period = {State.WARMUP: self.rule.warmup, State.COOLDOWN: self.cooldown}.get(state)
        if period is None:
            return None
        if state is State.COOLDOWN:
            gone = self._gone(period, step, now)
        else:
            gone = {"steps": step, "seconds": now - (self.began or 0), "checks": self.checks - 1}[period.measure]
        return period._replace(amount=max(0.0, float(period.amount - gone)))

    def state(self, step: int, now: float) -> State:
        """How the rule stands."""
        if self.disabled:
            return State.DISABLED
        if not self.warm and self.checks:
            return State.WARMUP
        if self.spent:
            return State.SPENT
        if self.active and (self.release is not None or self.cooldown is None):
            return State.FIRED
        if not self.is_cool(step, now):
            return State.COOLDOWN
        if self.run or self.since is not None:
            return State.PENDING
        return State.UNKNOWN if self.truth is None else State.ARMED

    def saved(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "identity": self.rule.identity,
            "deeds": self.rule.deeds,
            **{name: getattr(self, name) for name in (*_COUNTERS, *_FLAGS, _LASTS)},
            **{name: encoded(getattr(self, name)) for name in _NUMBERS},
            **{name: getattr(self, name) for name in _STEPS},
            "results": list(self.results),
            "result_steps": list(self.result_steps),
            "truth": self.truth,
        }

    def restore(self, state: Any) -> None:
        """Take that back. Raises ValueError, TypeError or KeyError if it is damaged."""
        counters = [state[name] for name in _COUNTERS]
        flags = [state[name] for name in _FLAGS]
        results, truth = state["results"], state["truth"]
        steps = {name: state.get(name) for name in _STEPS}
        result_steps = state.get("result_steps", [state["fired_step"] or 0] * len(results))
        if any(type(value) is not int or value < 0 for value in counters):
            raise ValueError("a counter is damaged")
        lasts = state.get(_LASTS, state["active"] and self.release is None)
        if any(type(value) is not bool for value in (*flags, *results, lasts)) or truth not in (True, False, None):
            raise ValueError("a flag is damaged")
        if any(type(step) not in (int, type(None)) for step in steps.values()) or len(result_steps) != len(results):
            raise ValueError("a step is damaged")
        for name, value in zip((*_COUNTERS, *_FLAGS), (*counters, *flags), strict=True):
            setattr(self, name, value)
        for name in _NUMBERS:
            setattr(self, name, decoded(state[name]))
        for name, at in steps.items():
            setattr(self, name, at)
        self.results = deque(results, maxlen=max(self.hold_of, 1))
        self.result_steps = deque((int(at) for at in result_steps), maxlen=max(self.hold_of, 1))
        self.truth, self.lasts = truth, lasts
        # a rule may have lost or got a warm-up since
        self.warm = self.warm or self.rule.warmup is None
        # the next check finds out
        self.inert = None
