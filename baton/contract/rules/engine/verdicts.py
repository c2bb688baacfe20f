"""Verdict: the state of a rule as a small record for display, transfer and storage."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import NamedTuple

from baton.contract.rules.document.actions import Action
from baton.contract.rules.document.durations import OF_ALL, Measure, Period
from baton.contract.rules.document.rule import Mode, Severity


class State(StrEnum):
    """States of a rule."""

    ARMED = "armed"
    """The condition is false, or was never checked."""
    WARMUP = "warmup"
    PENDING = "pending"
    """The condition is true, but `for` is not satisfied yet."""
    UNKNOWN = "unknown"
    """The condition depends on an unknown value."""
    FIRED = "fired"
    """The rule fired and is not cleared."""
    COOLDOWN = "cooldown"
    CLEARED = "cleared"
    """Result of an observation only: the rule can fire again."""
    SPENT = "spent"
    """The rule has fired `max_fires` times."""
    ERROR = "error"
    """Result of an observation only: the check failed."""
    DISABLED = "disabled"
    """Too many errors."""


class Operand(NamedTuple):
    """A metric or aggregate of a condition with its value."""

    text: str
    value: float | bool | None


class Verdict(NamedTuple):
    """State of a rule after an observation."""

    rule: str
    state: State
    step: int
    at: float
    """Time of the observation in seconds."""
    operands: tuple[Operand, ...] = ()
    done: float = 0.0
    """Progress towards `needed`, in checks, steps or seconds."""
    needed: float = 1
    measure: Measure = "checks"
    of: int = 0
    """Window of checks for `needed`; -1 counts all checks since the last firing."""
    fires: int = 0
    next_step: int | None = None
    """Step of the next check, for a period in steps."""
    next_at: float | None = None
    """Time of the next check in seconds, for a period in seconds."""
    left: Period | None = None
    """Rest of a warm-up or cooldown."""
    actions: tuple[Action, ...] = ()
    """Actions to execute now: those of a fired rule, or a stop after an error with `on_error: stop`."""
    severity: Severity = "warning"
    mode: Mode = "enforce"
    reason: str = ""
    """Reason of an error."""
    onset: int = 0
    """For a fired rule: first step of the condition that satisfied `for`."""

    def describe(self) -> str:
        """Format the verdict: `armed, 3 of 5, last value 2.31, next check step 1200`."""
        parts = [str(self.state)]
        if self.state in (State.ARMED, State.PENDING, State.UNKNOWN) and (self.needed > 1 or self.of):
            within = f" (of the last {self.of})" if self.of else "" if self.measure == "checks" else f" {self.measure}"
            within = " (of all)" if self.of == OF_ALL else within
            parts.append(f"{_format_value(self.done)} of {_format_value(self.needed)}{within}")
        if self.left is not None:
            steps = self.left.measure == "steps"
            parts.append(
                f"counts from step {_format_value(self.step + self.left.amount)}" if steps else f"counts in {self.left}"
            )
        if len(self.operands) == 1:
            parts.append(f"last value {_format_value(self.operands[0].value)}")
        elif self.operands:
            parts.append(", ".join(f"{one.text} = {_format_value(one.value)}" for one in self.operands))
        if self.next_step is not None:
            parts.append(f"next check step {self.next_step}")
        if self.next_at is not None:
            parts.append(f"next check in {_format_value(max(0.0, self.next_at - self.at))} s")
        if self.reason:
            parts.append(self.reason)
        return ", ".join(parts)


def _format_value(value: float | bool | None) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, bool):
        return "true" if value else "false"
    if math.isnan(value):
        return "NaN"
    return format(value, ".10g" if value == value // 1 else ".4g")
