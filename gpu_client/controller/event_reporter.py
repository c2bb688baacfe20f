"""Report the controller's decisions: lines in the log, messages to the agent."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpu_client.controller.orders import Order

log = logging.getLogger("baton.rules")

STATUS_EVERY_S = 15.0
STATUS_SOON_S = 1.0
"""Delay in seconds of the statuses after a decision, so that frequent firings share a message."""
MAX_MESSAGE_CHARS = 1000
MAX_OPERANDS = 32
MAX_STATUSES_CHARS = 48_000
"""Maximum size of all statuses together, which share one line of the channel (64 KiB)."""

Send = Callable[[Mapping[str, Any]], object]


class EventReporter:
    """Reporter of one process. Only the first rank reports, because only the first rank decides."""

    def __init__(
        self, first: bool, clock: Callable[[], float], epoch_at: Callable[[int], float | None] = lambda step: None
    ) -> None:
        """`clock`: monotonic seconds. `epoch_at`: returns the epoch of a step."""
        self._first = first
        self._epoch_at = epoch_at
        self._clock = clock
        self._statuses_sent_at = -math.inf
        self.send: Send | None = None
        """Sender of a message to the agent; None without an agent."""
        self.nonfinite_rank = 0
        """Rank of the NaN or infinity in the observation under evaluation; 0 without such a value."""

    @property
    def connected(self) -> bool:
        """Return True if an agent receives the messages."""
        return self.send is not None and self._first

    def send_message(self, message: Mapping[str, Any]) -> None:
        """Send a message to the agent."""
        if self.send is not None and self._first:
            self.send(message)

    def report_decision(self, decision: dict[str, Any]) -> None:
        """Report a decision of the engine, or the outcome of a decision."""
        if not self._first:
            return
        decision["operands"] = dict(list(decision.get("operands", {}).items())[:MAX_OPERANDS])
        if self.nonfinite_rank and any(_is_nonfinite(value) for value in decision["operands"].values()):
            decision["rank"] = self.nonfinite_rank
        decision["message"] = str(decision.get("message", ""))[:MAX_MESSAGE_CHARS]
        if (epoch := self._epoch_at(decision["step"])) is not None:
            decision["training_epoch"] = epoch
        level = logging.INFO if decision.get("severity") == "info" else logging.WARNING
        log.log(level, "%s", _line(decision))
        self.send_message({**decision, "type": "decision", "decision": decision["type"]})
        self.mark_changed()

    def report_outcome(self, order: Order, outcome: str, text: str, *, step: int) -> None:
        """Report the outcome of an order."""
        message = {"type": f"action.{outcome}", "revision": order.revision, "step": step}
        source = {"rule": order.rule} if order.rule else {"command": order.command}
        self.report_decision({**message, **source, "actions": [order.action], "message": text})

    def report_command(self, seq: int, status: str, message: str, *, step: int) -> None:
        """Report the outcome of a command."""
        text = message[:MAX_MESSAGE_CHARS]
        self.send_message({"type": "command_result", "seq": seq, "status": status, "step": step, "message": text})

    def report_rules(self, revision: int, step: int, *, rejected: int | None = None, reason: str = "") -> None:
        """Report the rules in force, and a rejected revision with its reason."""
        message = {"type": "rules_in_force", "revision": revision, "step": step}
        if rejected is not None:
            message |= {"rejected": rejected, "reason": reason[:MAX_MESSAGE_CHARS]}
            log.warning("revision %d of the rules is rejected: %s", rejected, reason)
        self.send_message(message)
        self._statuses_sent_at = -math.inf  # Revisions are rare, therefore the statuses follow at once.

    def report_exit(self, order: Order) -> None:
        """Report the exit that will end the training."""
        ended_by = {"revision": order.revision, "step": order.step, "message": order.why[:MAX_MESSAGE_CHARS]}
        ended_by |= {"rule": order.rule} if order.rule else {"command": order.command}
        arguments = {**order.arguments, "before_step": order.onset}
        self.send_message({"type": "leaving", "kind": order.action, "ended_by": ended_by, "arguments": arguments})

    def mark_changed(self) -> None:
        """Schedule the statuses after a state change of a rule."""
        self._statuses_sent_at = min(self._statuses_sent_at, self._clock() - STATUS_EVERY_S + STATUS_SOON_S)

    def report_statuses(self, found: Callable[[], Sequence[dict[str, Any]]], *, at_once: bool = False) -> None:
        """Send the status of each rule if the interval has passed."""
        if self.send is None or not self._first:
            return
        now = self._clock()
        if not at_once and now - self._statuses_sent_at < STATUS_EVERY_S:
            return
        self._statuses_sent_at = now
        self.send_message({"type": "rule_statuses", "statuses": _fitting(found())})


def _is_nonfinite(value: object) -> bool:
    """Return True for NaN and infinities, which the engine encodes as text."""
    return isinstance(value, str) or (isinstance(value, float) and not math.isfinite(value))


def _fitting(statuses: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Shorten the texts so that all statuses fit into one message."""
    room = MAX_STATUSES_CHARS // max(1, len(statuses)) - 150  # The rule's name, state and punctuation take 150.
    return [{**one, "said": _short(str(one["said"]), room)} for one in statuses]


def _short(text: str, room: int) -> str:
    # JSON encodes a character outside ASCII in six characters or more.
    return text[:room] if text.isascii() else text[: room // 12]


def _line(decision: Mapping[str, Any]) -> str:
    """Format a decision for the log, as `[rules] step 120: rule.fired spike: loss = 7.25 -> rollback`."""
    origin = decision.get("rule") or (f"command {decision['command']}" if decision.get("command") else "")
    operands = ", ".join(f"{text} = {value}" for text, value in decision["operands"].items())
    parts = [f"[rules] step {decision['step']}: {decision['type']} {origin}".rstrip(), operands, decision["message"]]
    line = ": ".join(part for part in parts if part)
    actions = ", ".join(decision.get("actions", ()))
    return f"{line} -> {actions}" if actions and decision["type"] == "rule.fired" else line
