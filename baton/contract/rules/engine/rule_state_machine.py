"""State machine of one rule: `for`, warm-up, cooldown, `once` and hysteresis.

An unknown condition neither counts nor resets. During warm-up and cooldown, and until a fired rule is cleared, nothing
counts. A false condition clears a rule without `clear`; a rule with `cooldown` and without `clear` may fire again
while its condition stays true. A rule that has reached `max_fires` keeps counting, because a revision may let it fire
again.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from baton.contract.rules.document.durations import OF_ALL, Period
from baton.contract.rules.document.rule import Rule
from baton.contract.rules.engine.verdicts import State
from baton.contract.rules.numbers import decode, encode
from baton.contract.rules.windows.series import Series
from baton.contract.rules.windows.window_closures import Reader

MAX_ERRORS = 3

_COUNTERS = ("checks", "run", "fires", "fired_checks", "errors")
_NUMBERS = ("began", "since", "fired_step", "fired_at", "due_step", "due_at")
_STEPS = ("onset", "fired_onset")
"""Absent in states of versions that did not count them."""
_FLAGS = ("warm", "active")
_LASTS = "lasts"
"""Absent in states of versions that did not keep it."""


class RuleStateMachine:
    """Counters and state of one rule."""

    __slots__ = (
        *_COUNTERS, *_NUMBERS, *_STEPS, *_FLAGS, _LASTS, "condition", "cooldown", "pending_of", "pending_period",
        "index", "inert", "needed", "reads", "release", "result_steps", "results", "rule",  "timed", "truth",
    )  # fmt: skip

    def __init__(self, rule: Rule, condition: Reader, release: Reader | None) -> None:
        """Create the machine; `release` is the compiled `clear`."""
        self.rule = rule
        self.condition = condition
        self.release = release
        self.pending_period, self.pending_of = rule.pending
        self.needed = self.pending_period.amount
        self.timed = self.pending_period.measure != "checks"
        self.cooldown = rule.cooldown
        self.reads: list[Series] = []
        """Series that its expressions read."""
        self.index = 0
        """Position among the rules."""
        self.clear_all()

    def clear_all(self) -> None:
        """Reset to the state before the first check."""
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
        """True from firing until the rule is cleared."""
        self.lasts = False
        """True while active, if the condition has not been false since the rule fired."""
        self.onset: int | None = None
        """Step at which the present progress towards `for` began."""
        self.fired_onset: int | None = None
        """Onset of the last firing."""
        self.results: deque[bool] = deque(maxlen=max(self.pending_of, 1))
        self.result_steps: deque[int] = deque(maxlen=max(self.pending_of, 1))
        self.truth: bool | None = False
        self.inert: bool | None = False if self.warm else None
        """Result that changes nothing at present: False while nothing counts, True while a fired rule waits for a
        false condition, None if every result matters.
        """

    @property
    def disabled(self) -> bool:
        """Return True if errors have disabled the rule."""
        return self.errors >= MAX_ERRORS

    @property
    def spent(self) -> bool:
        """Return True if the rule has fired `max_fires` times."""
        return self.rule.max_fires is not None and self.fires >= self.rule.max_fires

    def check(self, truth: bool | None, step: int, now: float) -> State | None:
        """Take a result; return FIRED or CLEARED, or None if neither happened."""
        self.checks += 1
        self.truth = truth
        if not self.warm and not self._warms_up(step, now):
            return None
        if truth is False:
            self.lasts = False
        if self.active and self._is_released(truth):
            self.active = self.lasts = False
            if self.pending_of == OF_ALL:
                self.inert = None if self.run else False
            else:
                self._reset_pending()
            return State.CLEARED
        if self._is_blocked(step, now):
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
        self._reset_pending()
        self.inert = None
        return State.FIRED

    def fail(self) -> State:
        """Count an error instead of a result."""
        self.checks += 1
        self.errors += 1
        return State.ERROR

    def arm(self) -> None:
        """Let the rule fire again at the next true check, if its condition has held since it fired.

        All other progress towards `for` remains.
        """
        if self.lasts:
            all_but_one = int(self.needed) - 1
            begun = self.fired_step if self.fired_onset is None else self.fired_onset
            self.onset = int(begun or 0)
            if self.timed:
                fired = self.fired_step if self.pending_period.measure == "steps" else self.fired_at
                self.since = (fired or 0) - self.needed
            else:
                self.run = all_but_one
            if self.pending_of > 0:
                self.results = deque([True] * all_but_one, maxlen=self.pending_of)
                self.result_steps = deque([self.onset] * all_but_one, maxlen=self.pending_of)
        self.fires = self.fired_checks = self.errors = 0
        self.fired_step = self.fired_at = self.fired_onset = None
        self.active = self.lasts = False
        self.inert = None

    def apply_revision(self, saved_identity: object, *, elsewhere: bool) -> str:
        """Arm the rule anew if a revision requires it, and return the reason; otherwise "".

        `saved_identity`: action identity in the saved state; None if its version had none. `elsewhere`: another part
        of the document changed.
        """
        reason = ""
        if saved_identity not in (None, self.rule.action_identity):
            reason = "its 'do' or 'mode' has changed: it is armed anew"
        elif elsewhere and self.disabled:
            reason = "it was disabled by errors: it is armed anew"
        if reason:
            self.arm()
        elif elsewhere:
            self.errors = 0
        return reason

    def _warms_up(self, step: int, now: float) -> bool:
        """Check whether the warm-up is over."""
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

    def _is_blocked(self, step: int, now: float) -> bool:
        """Check whether hysteresis or cooldown prevents firing."""
        if self.active and (self.release is not None or self.cooldown is None):
            return True
        return not self.is_cool(step, now)

    def is_cool(self, step: int, now: float) -> bool:
        """Check whether the cooldown is over."""
        if self.cooldown is None or self.fired_step is None or self.fired_at is None:
            return True
        return self._elapsed(self.cooldown, step, now) >= self.cooldown.amount

    def _elapsed(self, period: Period, step: int, now: float) -> float:
        """Return the part of `period` since the rule last fired."""
        if period.measure == "steps":
            return step - (self.fired_step or 0)
        return now - (self.fired_at or 0) if period.measure == "seconds" else self.checks - self.fired_checks

    def _count(self, truth: bool | None, step: int, now: float) -> bool:
        """Count a result; return whether `for` is satisfied."""
        if truth is None:
            return False
        if self.timed:
            if not truth:
                self.since = self.onset = None
                return False
            at = step if self.pending_period.measure == "steps" else now
            # A rollback repeats steps, therefore an earlier step restarts the count.
            if self.since is None or at < self.since:
                self.since, self.onset = at, step
            return at - self.since >= self.needed
        if self.pending_of == OF_ALL:
            self.run += truth
            if truth and self.onset is None:
                self.onset = step
        elif self.pending_of:
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

    def _reset_pending(self) -> None:
        self.run = 0
        self.since = self.onset = None
        self.results.clear()
        self.result_steps.clear()
        self.inert = None if self.active else False

    def progress(self, step: int, now: float) -> float:
        """Return the progress towards `for`, in the rule's own measure."""
        if not self.timed:
            return float(self.run)
        at = step if self.pending_period.measure == "steps" else now
        return 0.0 if self.since is None else float(at - self.since)

    def left(self, state: State, step: int, now: float) -> Period | None:
        """Return the rest of a warm-up or cooldown."""
        period = {State.WARMUP: self.rule.warmup, State.COOLDOWN: self.cooldown}.get(state)
        if period is None:
            return None
        if state is State.COOLDOWN:
            gone = self._elapsed(period, step, now)
        else:
            gone = {"steps": step, "seconds": now - (self.began or 0), "checks": self.checks - 1}[period.measure]
        return period._replace(amount=max(0.0, float(period.amount - gone)))

    def state(self, step: int, now: float) -> State:
        """Return the state at a step and time."""
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

    def save(self) -> dict[str, Any]:
        """Return the state as plain values."""
        return {
            "identity": self.rule.identity,
            "deeds": self.rule.action_identity,
            **{name: getattr(self, name) for name in (*_COUNTERS, *_FLAGS, _LASTS)},
            **{name: encode(getattr(self, name)) for name in _NUMBERS},
            **{name: getattr(self, name) for name in _STEPS},
            "results": list(self.results),
            "result_steps": list(self.result_steps),
            "truth": self.truth,
        }

    def restore(self, state: Any) -> None:
        """Restore a state. Raises ValueError, TypeError or KeyError if it is damaged."""
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
            setattr(self, name, decode(state[name]))
        for name, at in steps.items():
            setattr(self, name, at)
        self.results = deque(results, maxlen=max(self.pending_of, 1))
        self.result_steps = deque((int(at) for at in result_steps), maxlen=max(self.pending_of, 1))
        self.truth, self.lasts = truth, lasts
        # A revision may have added or removed the warm-up.
        self.warm = self.warm or self.rule.warmup is None
        # The next check recomputes the inert result.
        self.inert = None
