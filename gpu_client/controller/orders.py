"""Queue the orders of rules and commands for a step boundary, and remember the exit that awaits its record."""

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
ONCE_PER_TRAINING = frozenset({"log", "alert"})
"""Actions that the first rank alone carries out."""
_WITHOUT_OTHER_RANKS = ONCE_PER_TRAINING | {"stop", "rollback", "pause", "requeue"}
MAX_WAITING_ORDERS = 1000
"""Limit of the queue, for loops that never call checkpoint_due."""


@dataclass(frozen=True, slots=True)
class Order:
    """Action to carry out, decided by either `rule` or `command`."""

    action: str
    """Name in rule documents: `stop`, `set`, ..."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of the action; texts are rendered."""
    rule: str = ""
    command: int = 0
    """Sequence number of the command."""
    revision: int = 0
    step: int = 0
    """Step of the decision."""
    onset: int = 0
    """First step of the observations that led to the decision."""
    why: str = ""

    @property
    def takes_steps(self) -> bool:
        """Return True if the action begins after the step of its execution."""
        return self.action == "profile"

    def as_values(self) -> dict[str, Any]:
        """Return the order as plain JSON."""
        return asdict(self)

    @staticmethod
    def of_values(values: Mapping[str, Any]) -> Order:
        """Make an order from plain JSON."""
        return Order(**values)


def make_orders(verdict: Verdict, revision: int, values: Mapping[str, float | None]) -> Iterator[Order]:
    """Yield the orders of a rule that fired. `values` fill the texts of the orders."""
    if verdict.mode == "dry_run":
        return
    why = ", ".join(f"{one.text} = {_operand_text(one.value)}" for one in verdict.operands)
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


def parse_command(message: Mapping[str, Any], step: int) -> Order:
    """Make an order from an agent's message. Raises KeyError, ValueError or TypeError for a malformed command."""
    kind, seq, arguments = message["kind"], message["seq"], message.get("arguments", {})
    if not isinstance(kind, str) or type(seq) is not int or not isinstance(arguments, dict):
        raise ValueError("a command has 'kind', 'seq' and 'arguments'")
    return Order(kind, dict(arguments), command=seq, step=step, onset=step, why=f"command {seq}")


class OrderQueue:
    """Queue of the first rank's decisions that all ranks have still to carry out.

    A vote announces the queue; after the next step all ranks carry out the announced orders. Later decisions wait for
    the next vote. Therefore an interrupted training repeats each action after the same step.
    """

    def __init__(self) -> None:
        self._orders: list[Order] = []
        self._announced = 0
        """Number of orders that a vote has announced."""

    def __len__(self) -> int:
        return len(self._orders)

    def add(self, orders: Iterable[Order]) -> None:
        """Append orders; orders beyond the limit are dropped with a warning."""
        for order in orders:
            if len(self._orders) >= MAX_WAITING_ORDERS:
                log.warning("%s of %s is dropped: checkpoint_due is never called", order.action, order.rule)
                return
            self._orders.append(order)

    def add_first(self, order: Order) -> None:
        """Insert an order at the front, so that the next vote announces the order."""
        self._orders.insert(0, order)
        self._announced += 1

    def mark_announced(self) -> None:
        """Mark all orders as announced by a vote."""
        self._announced = len(self._orders)

    @property
    def announced(self) -> bool:
        """Return True if a vote has announced an order."""
        return self._announced > 0

    def take(self) -> list[Order]:
        """Remove and return the announced orders."""
        taken, self._orders, self._announced = self._orders[: self._announced], self._orders[self._announced :], 0
        return taken

    def take_all(self) -> list[Order]:
        """Remove and return all orders, in a training with a single rank."""
        self.mark_announced()
        return self.take()

    def take_last(self) -> tuple[list[Order], list[Order]]:
        """Return, after the last step, the orders that the first rank can carry out alone, and the late orders."""
        orders = self.take_all()
        in_time = [order for order in orders if order.action in _WITHOUT_OTHER_RANKS]
        return in_time, [order for order in orders if order not in in_time]

    def state(self) -> dict[str, Any]:
        """Return the queue as plain JSON."""
        return {"waiting": [order.as_values() for order in self._orders], "offered": self._announced}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a saved queue."""
        self._orders = [Order.of_values(values) for values in state.get("waiting", ())]
        self._announced = int(state.get("offered", len(self._orders)))


def _operand_text(value: float | bool | None) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, bool):
        return "true" if value else "false"
    return format(value, ".6g") if math.isfinite(value) else str(value)


class PendingExit:
    """Record of the exit that this process announced.

    The announcement can be lost with the machine, while the checkpoint counts the rule as fired.
    """

    def __init__(self) -> None:
        self._ends: int | None = None
        self._order: Order | None = None

    def begin(self, ends: int | None) -> None:
        """Set the number of exits in the control plane's records; None if unknown."""
        self._ends = ends

    @property
    def announced(self) -> bool:
        """Return True if the agent received an exit."""
        return self._order is not None

    def announce(self, order: Order) -> None:
        """Remember the exit that the agent received."""
        if order.action != "requeue":  # Any end of the attempt has the effect of `requeue`.
            self._order = order

    def state(self) -> dict[str, Any] | None:
        """Return the exit as plain JSON; None without an exit."""
        return {"order": self._order.as_values(), "ends": self._ends or 0} if self._order is not None else None

    def unreported(self, state: Mapping[str, Any] | None, is_in_force: Callable[[str, str], bool]) -> Order | None:
        """Return the exit that the saving process announced and the control plane has not recorded, or None.

        `is_in_force`: returns True if a rule (name, action) is unchanged and still has the action.
        """
        if not state or self._ends is None or self._ends > state["ends"]:
            return None
        order = Order.of_values(state["order"])
        return order if order.command or is_in_force(order.rule, order.action) else None


OnNotDone = Callable[[int, Literal["applied", "rejected", "expired"], str], object]


class CommandQueue:
    """Queue of live commands in the order of arrival; a step boundary carries out each command at most once."""

    def __init__(self, clock: Callable[[], float], on_not_done: OnNotDone) -> None:
        """`on_not_done` receives number, status and reason of a command without effect."""
        self._clock = clock
        self._on_not_done = on_not_done
        self._last_seq = 0
        self._replays: list[Order] = []
        """Commands that an earlier attempt applied after the checkpoint; each is due after its former step."""
        self.restored_seq = 0
        """Sequence number of the command whose exit the checkpoint contains; the queue ignores its redelivery."""
        self.sets_seq = 0
        """Sequence number of the newest `set` in the present state of the training."""

    @property
    def has_replays(self) -> bool:
        """Return True if replays are due at later steps."""
        return bool(self._replays)

    def with_deadline(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Add the expiry of a command, by the queue's clock."""
        life_s = message.get("expires_in_s")
        if isinstance(life_s, bool) or not isinstance(life_s, int | float):
            return message
        return {**message, "until": self._clock() + min(life_s, 1e9)}

    def is_expired(self, message: Mapping[str, Any]) -> bool:
        """Return True for a command whose deadline has passed."""
        until = message.get("until")
        return until is not None and self._clock() > until

    def order_of(self, message: Mapping[str, Any], step: int) -> Order | None:
        """Return the order of a command that is due now, or None."""
        again = message.get("status") == "applied"
        try:
            order = parse_command(message, int(message["step"]) if again else step)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            log.warning("a command cannot be read: %s", error)
            return None
        if again:
            if order.command > self.sets_seq:
                self._replays.append(order)
            return None
        if order.command <= self._last_seq:
            return None
        if order.command == self.restored_seq:
            return None
        self._last_seq = order.command
        if order.action == "set" and order.command <= self.sets_seq:
            # An earlier process applied the command and saved a checkpoint, but its answer was lost.
            self._on_not_done(order.command, "applied", "before the checkpoint that the training resumed from")
            return None
        if self.is_expired(message):
            self._on_not_done(order.command, "expired", "no step ended in time")
            return None
        return order

    def due_replays(self, step: int) -> list[Order]:
        """Remove and return the replays that are due at or before this step."""
        due = [order for order in self._replays if order.step <= step]
        self._replays = [order for order in self._replays if order.step > step]
        return due

    def applied(self, order: Order) -> None:
        """Record that the state of the training contains the order."""
        if order.action == "set":
            self.sets_seq = max(self.sets_seq, order.command)
