"""How a rule stands, as a small record that can be shown, sent and stored."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import NamedTuple

from baton.contract.rules.document.actions import Action
from baton.contract.rules.document.durations import OF_ALL, Measure, Period
from baton.contract.rules.document.rule import Mode, Severity


class State(StrEnum):
    """Of a rule."""

    ARMED = "armed"
    """Its condition is false, or was never checked."""
    WARMUP = "warmup"
    PENDING = "pending"
    """Its condition is true, but not for long enough yet."""
    UNKNOWN = "unknown"
    """Its condition depends on what is not known."""
    FIRED = "fired"
    """It fired, and has not been cleared since."""
    COOLDOWN = "cooldown"
    CLEARED = "cleared"
    """Only as an answer to an observation: from now on it can fire again."""
    SPENT = "spent"
    """It has fired as often as it may."""
    ERROR = "error"
    """Only as an answer to an observation: it could not be checked."""
    DISABLED = "disabled"
    """After too many errors."""


class Operand(NamedTuple):
    """A metric or an aggregate of a condition, and its value."""

    text: str
    value: float | bool | None


class Verdict(NamedTuple):
    """How a rule stands after an observation."""

    rule: str
    state: State
    step: int
    at: float
    """The observation's time, in seconds."""
    operands: tuple[Operand, ...] = ()
    done: float = 0.0
    """How much of `needed` there is, in checks, steps or seconds."""
    needed: float = 1
    measure: Measure = "checks"
    of: int = 0
    """Where `needed` is of the last so many checks, or -1 where of all since it last fired."""
    fires: int = 0
    next_step: int | None = None
    """When it is checked next, if that is a matter of steps."""
    next_at: float | None = None
    """The same, if it is a matter of time."""
    left: Period | None = None
    """Of a warm-up or cooldown: after how much more a check counts again."""
    actions: tuple[Action, ...] = ()
    """What is to be done now: only when it fired (or failed, and says that the training ends then)."""
    severity: Severity = "warning"
    mode: Mode = "enforce"
    reason: str = ""
    """Of an error."""
    onset: int = 0
    """If it fired: the first step at which the condition, which has now held for long enough, was true."""

    def describe(self) -> str:
        """`armed, 3 of 5, last value 2.31, next check step 1200`."""
        parts = [str(self.state)]
        if self.state in (State.ARMED, State.PENDING, State.UNKNOWN) and (self.needed > 1 or self.of):
            within = f" (of the last {self.of})" if self.of else "" if self.measure == "checks" else f" {self.measure}"
            within = " (of all)" if self.of == OF_ALL else within
            parts.append(f"{_said(self.done)} of {_said(self.needed)}{within}")
        if self.left is not None:
            steps = self.left.measure == "steps"
            parts.append(
                f"counts from step {_said(self.step + self.left.amount)}" if steps else f"counts in {self.left}"
            )
        if len(self.operands) == 1:
            parts.append(f"last value {_said(self.operands[0].value)}")
        elif self.operands:
            parts.append(", ".join(f"{one.text} = {_said(one.value)}" for one in self.operands))
        if self.next_step is not None:
            parts.append(f"next check step {self.next_step}")
        if self.next_at is not None:
            parts.append(f"next check in {_said(max(0.0, self.next_at - self.at))} s")
        if self.reason:
            parts.append(self.reason)
        return ", ".join(parts)


def _said(value: float | bool | None) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, bool):
        return "true" if value else "false"
    if math.isnan(value):
        return "NaN"
    return format(value, ".10g" if value == value // 1 else ".4g")
