"""What is to be done at a step boundary, by a rule or by a command. Plain values: ranks and processes share them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from baton.contract.rules.document.actions import NAMES
from baton.contract.rules.engine.verdicts import Verdict
from baton.contract.rules.language.messages import Message

log = logging.getLogger("baton.rules")

Outcome = Literal["applied", "failed", "rejected"]
SAID_ONCE = frozenset({"log", "alert"})
"""Not by every process."""
_AT_THE_END = SAID_ONCE | {"stop", "rollback", "pause", "requeue"}
MAX_WAITING_ORDERS = 1000
"""Of the first of several processes, in a loop that never comes to where ranks agree."""


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


class Waiting:
    """What the first of several processes decided, until all of them do it.

    A vote tells the others that there is something, and after the next step they do what there was at that vote: what
    was decided since waits for the next one. So a training that is interrupted does each thing after the same step.
    """

    def __init__(self) -> None:
        self._orders: list[Order] = []
        self._offered = 0
        """So many of them a vote has told of."""

    def __len__(self) -> int:
        return len(self._orders)

    def add(self, orders: Iterable[Order]) -> None:
        """What is too much is left out, and that is told."""
        for order in orders:
            if len(self._orders) >= MAX_WAITING_ORDERS:
                log.warning("%s of %s is left out: checkpoint_due is never asked", order.action, order.rule)
                return
            self._orders.append(order)

    def add_first(self, order: Order) -> None:
        """To be done at the very next occasion."""
        self._orders.insert(0, order)
        self._offered += 1

    def offer(self) -> None:
        """A vote goes out."""
        self._offered = len(self._orders)

    @property
    def offered(self) -> bool:
        """Whether it told of any."""
        return self._offered > 0

    def take(self) -> list[Order]:
        """Those it told of; they wait no longer."""
        taken, self._orders, self._offered = self._orders[: self._offered], self._orders[self._offered :], 0
        return taken

    def take_all(self) -> list[Order]:
        """There is nobody else any more."""
        self.offer()
        return self.take()

    def take_last(self) -> tuple[list[Order], list[Order]]:
        """After the last step of all: what the first process can do alone, and what comes too late."""
        orders = self.take_all()
        still = [order for order in orders if order.action in _AT_THE_END]
        return still, [order for order in orders if order not in still]

    def state(self) -> dict[str, Any]:
        """Plain JSON."""
        return {"waiting": [order.as_values() for order in self._orders], "offered": self._offered}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on with that."""
        self._orders = [Order.of_values(values) for values in state.get("waiting", ())]
        self._offered = int(state.get("offered", len(self._orders)))


def _said(value: float | bool | None) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, bool):
        return "true" if value else "false"
    return format(value, ".6g") if math.isfinite(value) else str(value)


class Ending:
    """Of one process. What it announces may be lost with its machine, and the checkpoint counts the rule as fired."""

    def __init__(self) -> None:
        self._ends: int | None = None
        self._order: Order | None = None

    def begin(self, ends: int | None) -> None:
        """`ends`: how many the control plane has written down in the job's life; None where it does not say."""
        self._ends = ends

    @property
    def announced(self) -> bool:
        """Whether the agent was told of one."""
        return self._order is not None

    def announce(self, order: Order) -> None:
        """The agent was told of this one."""
        if order.action != "requeue":  # that is brought about by any end of the attempt
            self._order = order

    def state(self) -> dict[str, Any] | None:
        """Plain JSON; None where there is none."""
        return {"order": self._order.as_values(), "ends": self._ends or 0} if self._order is not None else None

    def left_over(self, state: Mapping[str, Any] | None, wants: Callable[[str, str], bool]) -> Order | None:
        """The end that the process which saved this announced, if it has not come; None if it is over.

        `wants`: whether a rule (its name, the action's) is in force as it was, and still does that.
        """
        if not state or self._ends is None or self._ends > state["ends"]:
            return None
        order = Order.of_values(state["order"])
        return order if order.command or wants(order.rule, order.action) else None


Undone = Callable[[int, Literal["applied", "rejected", "expired"], str], object]


class Commands:
    """What has arrived, in its order. Sequence numbers tell what came before."""

    def __init__(self, clock: Callable[[], float], not_done: Undone) -> None:
        """`not_done` is told number, status and reason of a command for which nothing is to be done."""
        self._clock = clock
        self._not_done = not_done
        self._last_seq = 0
        self._again: list[Order] = []
        """Applied after the checkpoint that this training goes on from: due after the same steps again."""
        self.done_again = 0
        """Number of the one that a checkpoint brings with it: whoever hands it out once more is not obeyed twice."""
        self.sets_seq = 0
        """Of the newest `set` that the training's present state has in it."""

    @property
    def waiting(self) -> bool:
        """Whether some are due at a later step."""
        return bool(self._again)

    def stamped(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """A message with the moment at which it is too late for it."""
        life_s = message.get("expires_in_s")
        if isinstance(life_s, bool) or not isinstance(life_s, int | float):
            return message
        return {**message, "until": self._clock() + min(life_s, 1e9)}

    def order_of(self, message: Mapping[str, Any], step: int) -> Order | None:
        """What is to be done now; None if nothing is, or only at a later step."""
        again = message.get("status") == "applied"
        try:
            order = order_of_command(message, int(message["step"]) if again else step)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            log.warning("a command cannot be read: %s", error)
            return None
        if again:
            if order.command > self.sets_seq:
                self._again.append(order)
            return None
        if order.command <= self._last_seq:
            return None
        if order.command == self.done_again:
            return None
        self._last_seq = order.command
        if order.action == "set" and order.command <= self.sets_seq:
            # It was carried out, and a checkpoint taken, but the answer was lost with the process.
            self._not_done(order.command, "applied", "before the checkpoint that the training goes on from")
            return None
        until = message.get("until")
        if until is not None and self._clock() > until:
            self._not_done(order.command, "expired", "no step ended in time")
            return None
        return order

    def due_again(self, step: int) -> list[Order]:
        """Those that were applied after this step, or before it."""
        due = [order for order in self._again if order.step <= step]
        self._again = [order for order in self._again if order.step > step]
        return due

    def applied(self, order: Order) -> None:
        """It is part of the training's state now."""
        if order.action == "set":
            self.sets_seq = max(self.sets_seq, order.command)
