"""What is to be done at a step boundary, by a rule or by a command. Plain values: ranks and processes share them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from contract.rules.actions import NAMES
from contract.rules.messages import Message
from contract.rules.verdicts import Verdict

Outcome = Literal["applied", "failed", "rejected"]


@dataclass(frozen=True, slots=True)
class Order:
    """One thing to do. Exactly one of `rule` and `command` says who wants it."""

    action: str
    """As in rule documents: `stop`, `set`, ..."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """The action's parameters; texts are filled in."""
    rule: str = ""
    command: int = 0
    """Its sequence number."""
    revision: int = 0
    step: int = 0
    """At which it was decided."""
    onset: int = 0
    """The first step of what led to it."""
    why: str = ""

    @property
    def takes_steps(self) -> bool:
        """Whether it begins behind the step at which it is carried out."""
        return self.action == "profile"

    def as_values(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)

    @staticmethod
    def of_values(values: Mapping[str, Any]) -> Order:
        """From that."""
        return Order(**values)


def orders_of(verdict: Verdict, revision: int, values: Mapping[str, float | None]) -> Iterator[Order]:
    """What a rule that fired wants. `values` fill its texts."""
    if verdict.mode == "dry_run":
        return
    why = ", ".join(f"{one.text} = {_said(one.value)}" for one in verdict.operands)
    for action in verdict.actions:
        arguments: dict[str, Any] = {}
        for one in fields(action):
            value = getattr(action, one.name)
            arguments[one.name] = value.render(values) if isinstance(value, Message) else value
        yield Order(
            NAMES[type(action)],
            arguments,
            rule=verdict.rule,
            revision=revision,
            step=verdict.step,
            onset=verdict.onset or verdict.step,
            why=verdict.reason or why,
        )


def order_of_command(message: Mapping[str, Any], step: int) -> Order:
    """From a message of the agent. Raises ValueError or TypeError for what is no command."""
    kind, seq, arguments = message["kind"], message["seq"], message.get("arguments", {})
    if not isinstance(kind, str) or type(seq) is not int or not isinstance(arguments, dict):
        raise ValueError("a command has 'kind', 'seq' and 'arguments'")
    return Order(kind, dict(arguments), command=seq, step=step, onset=step, why=f"command {seq}")


def _said(value: float | bool | None) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, bool):
        return "true" if value else "false"
    return format(value, ".6g") if math.isfinite(value) else str(value)
