"""What the controller says of itself: a line in the log, a message to the agent."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpu_client.controller.orders import Order

log = logging.getLogger("baton.rules")

STATUS_EVERY_S = 15.0
STATUS_SOON_S = 1.0
"""After a decision how the rules stand is said sooner, but not at every step of a rule that fires at every step."""
MAX_TOLD_CHARS = 1000
MAX_OPERANDS = 32
MAX_STATUSES_CHARS = 48_000
"""All of them are one line of the channel, which has an end (64 KiB)."""

Send = Callable[[Mapping[str, Any]], object]


class Teller:
    """Of one process. Those that are not the first say nothing: they decide nothing."""

    def __init__(
        self, first: bool, clock: Callable[[], float], epoch_at: Callable[[int], float | None] = lambda step: None
    ) -> None:
        """`clock`: monotonic seconds. `epoch_at`: in which pass over the data a step was."""
        self._first = first
        self._epoch_at = epoch_at
        self._clock = clock
        self._said_at = -math.inf
        self.send: Send | None = None
        """None: there is no agent."""
        self.odd_one = 0
        """Of several processes, the one that reported what is not finite, in what is looked at now."""

    @property
    def hears(self) -> bool:
        """Whether there is anybody to be told."""
        return self.send is not None and self._first

    def say(self, message: Mapping[str, Any]) -> None:
        """To the agent."""
        if self.send is not None and self._first:
            self.send(message)

    def decided(self, decision: dict[str, Any]) -> None:
        """A decision as the engine tells it, or what came of one."""
        if not self._first:
            return
        decision["operands"] = dict(list(decision.get("operands", {}).items())[:MAX_OPERANDS])
        if self.odd_one and any(_odd(value) for value in decision["operands"].values()):
            decision["rank"] = self.odd_one
        decision["message"] = str(decision.get("message", ""))[:MAX_TOLD_CHARS]
        if (epoch := self._epoch_at(decision["step"])) is not None:
            decision["training_epoch"] = epoch
        level = logging.INFO if decision.get("severity") == "info" else logging.WARNING
        log.log(level, "%s", _line(decision))
        self.say({**decision, "type": "decision", "decision": decision["type"]})
        self.changed()

    def outcome(self, order: Order, outcome: str, said: str, *, step: int) -> None:
        """What became of an order."""
        told = {"type": f"action.{outcome}", "revision": order.revision, "step": step}
        whose = {"rule": order.rule} if order.rule else {"command": order.command}
        self.decided({**told, **whose, "actions": [order.action], "message": said})

    def result(self, seq: int, status: str, message: str, *, step: int) -> None:
        """What became of a command."""
        said = message[:MAX_TOLD_CHARS]
        self.say({"type": "command_result", "seq": seq, "status": status, "step": step, "message": said})

    def in_force(self, revision: int, step: int, *, rejected: int | None = None, reason: str = "") -> None:
        """Which rules are in force now, and which could not be."""
        told = {"type": "rules_in_force", "revision": revision, "step": step}
        if rejected is not None:
            told |= {"rejected": rejected, "reason": reason[:MAX_TOLD_CHARS]}
            log.warning("revision %d of the rules is rejected: %s", rejected, reason)
        self.say(told)
        self._said_at = -math.inf  # seldom enough to be followed at once by how its rules stand

    def leaving(self, order: Order) -> None:
        """How the training is to be reported when it has ended."""
        ended_by = {"revision": order.revision, "step": order.step, "message": order.why[:MAX_TOLD_CHARS]}
        ended_by |= {"rule": order.rule} if order.rule else {"command": order.command}
        arguments = {**order.arguments, "before_step": order.onset}
        self.say({"type": "leaving", "kind": order.action, "ended_by": ended_by, "arguments": arguments})

    def changed(self) -> None:
        """How rules stand has changed."""
        self._said_at = min(self._said_at, self._clock() - STATUS_EVERY_S + STATUS_SOON_S)

    def statuses(self, found: Callable[[], Sequence[dict[str, Any]]], *, at_once: bool = False) -> None:
        """How each rule stands, if it is time to say so."""
        if self.send is None or not self._first:
            return
        now = self._clock()
        if not at_once and now - self._said_at < STATUS_EVERY_S:
            return
        self._said_at = now
        self.say({"type": "rule_statuses", "statuses": _fitting(found())})


def _odd(value: object) -> bool:
    """As the engine tells it: what is not finite is a text."""
    return isinstance(value, str) or (isinstance(value, float) and not math.isfinite(value))


def _fitting(statuses: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """With as many words as fit into one message: of 200 rules less is said than of 20."""
    room = MAX_STATUSES_CHARS // max(1, len(statuses)) - 150  # the rule's name, its state, and the punctuation
    return [{**one, "said": _short(str(one["said"]), room)} for one in statuses]


def _short(text: str, room: int) -> str:
    # JSON says what is not ASCII in six characters or more.
    return text[:room] if text.isascii() else text[: room // 12]


def _line(decision: Mapping[str, Any]) -> str:
    """For the job's log: `[rules] step 120: rule.fired spike: loss = 7.25 -> rollback`."""
    who = decision.get("rule") or (f"command {decision['command']}" if decision.get("command") else "")
    operands = ", ".join(f"{text} = {value}" for text, value in decision["operands"].items())
    parts = [f"[rules] step {decision['step']}: {decision['type']} {who}".rstrip(), operands, decision["message"]]
    line = ": ".join(part for part in parts if part)
    actions = ", ".join(decision.get("actions", ()))
    return f"{line} -> {actions}" if actions and decision["type"] == "rule.fired" else line
