"""Steer one node of an elastic training: one node decides for all nodes, which act after the same round.

The round thread calls the methods of `RoundObserver` (`gpu_client/elastic/rounds/world_metrics.py`), the training's
main thread the others. Each node evaluates the rules once a round, on the metrics of the world. The first member's
orders count and travel in the statuses that all members exchange before the commit; the other members keep their own
results for the case that the first member vanishes. Commands reach each node through its agent, and any node passes
a command on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from baton.contract.rules.document.rule import REPORT
from baton.contract.rules.metrics import Reduce
from gpu_client.controller.orders import ONCE_PER_TRAINING, Order, parse_command
from gpu_client.controller.rule_engine import RuleEngine

MAX_SENT_ORDERS = 16
"""Orders in one status, which has to fit into an exchange."""
MAX_JOURNAL = 32
"""Newest settings that a joining node receives."""
MAX_DONE = 1000
MAX_WAITING_DECISIONS = 200
MAX_WHY_CHARS = 300

log = logging.getLogger("baton.rules")

_REFUSED = {
    "rollback": "the other nodes hold the state of later rounds",
    "requeue": "the nodes have machines of their own",
    "skip_batch": "the rules see a batch after its round",
}
"""Actions that cannot be right for a world; the control plane refuses rules with these actions."""


class NodeOrder(NamedTuple):
    """Order for this node. saves: the node saves the newest round. leads: the node reports the outcome."""

    order: Order
    saves: bool
    leads: bool


class WorldSteering:
    """Rules and commands of one node's world. `times`: seconds of the training, which continue when it resumes."""

    def __init__(
        self, engine: RuleEngine, times: Callable[[], float], on_known: Callable[[int], object] = lambda seq: None
    ) -> None:
        """`on_known` receives the number of a command that the resumed state contains, although its answer was lost."""
        self.lock = threading.RLock()
        """Guards the engine and all fields."""
        self.leads: bool | None = None
        """True at the first member of the newest epoch; None before the first status."""
        self._engine = engine
        self._times = times
        self._on_known = on_known
        self._commands: dict[str, tuple[Order, Mapping[str, Any]]] = {}
        """Commands that no committed round has contained, with their messages."""
        self._observed_round = 0
        self._decided: list[tuple[str, Order]] = []
        """Orders of the newest observed round, until its commit."""
        self._left: list[tuple[str, Order]] = []
        """Orders of committed rounds for which the first member's statuses had no room."""
        self._round_decisions: list[dict[str, Any]] = []
        self._is_observing = False
        self._decisions: list[dict[str, Any]] = []
        """Decisions that this node reports if it leads."""
        self._done: dict[str, None] = {}
        self._restored: frozenset[str] = frozenset()
        """Orders of `_done` that the resumed state contains; the first member reports the others."""
        self._journal: list[dict[str, Any]] = []
        """Newest settings with their ids, which a joining node repeats."""
        self._orders: list[NodeOrder] = []

    # --- round thread ------------------------------------------------------------------------------------------------

    @property
    def reads(self) -> frozenset[str]:
        """Return the metrics that rules read."""
        return self._engine.reads

    @property
    def reducers(self) -> Mapping[str, Reduce]:
        """Return the reductions over nodes, by metric that rules read."""
        return self._engine.reducers

    def describe(self, *, leads: bool, enters: bool) -> list[dict[str, Any]]:
        """Return the orders for the next status. enters: the status is the first in an epoch, and bears the journal."""
        with self.lock:
            self.leads = leads
            found = [*self._journal] if enters else []
            if leads:
                found += [_encode(key, one) for key, one in self._list_own_orders()]
            found += [_encode(key, one) for key, (one, _) in self._commands.items()]
            return found[:MAX_SENT_ORDERS] if not enters else found[: MAX_JOURNAL + MAX_SENT_ORDERS]

    def observe(self, number: int, metrics: Mapping[str, float]) -> None:
        """Evaluate the rules on the metrics of a round that may be committed; once for each round."""
        with self.lock:
            if number <= self._observed_round or not self._engine.active:
                return
            self._observed_round = number
            self._round_decisions.clear()
            self._is_observing = True
            try:
                orders = self._engine.observe(metrics, step=number, now=self._times(), event=REPORT)
            finally:
                self._is_observing = False
            self._decided = [
                (f"{number}.{place}.{one.rule}", replace(one, why=one.why[:MAX_WHY_CHARS]))
                for place, one in enumerate(orders)
            ]

    def enter(self, statuses: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        """Take the settings that this node has missed from the first statuses of an epoch."""
        with self.lock:
            self._take([one for orders in statuses for one in orders if one.get("done")], saves=False, leads=False)

    def commit(self, number: int, statuses: Sequence[Sequence[Mapping[str, Any]]], *, saves: bool) -> None:
        """Take the orders of all statuses before the commit of a round; the main thread carries them out next."""
        with self.lock:
            leads = bool(self.leads)
            if leads and number == self._observed_round:
                self._add_decisions(self._round_decisions)
                once = [one for _, one in self._decided if one.action in ONCE_PER_TRAINING]
                self._orders += [NodeOrder(one, saves, leads) for one in once]
            found = [one for orders in statuses for one in orders if not one.get("done")]
            self._take(sorted(found, key=_command_of), saves=saves, leads=leads)
            self._left = [one for one in self._list_own_orders() if one[0] not in self._done] if leads else []
            self._round_decisions, self._decided = [], []

    def _list_own_orders(self) -> list[tuple[str, Order]]:
        return [*self._left, *(one for one in self._decided if one[1].action not in ONCE_PER_TRAINING)]

    def _take(self, found: Iterable[Mapping[str, Any]], *, saves: bool, leads: bool) -> None:
        for one in found:
            try:
                key, order = str(one["id"]), Order.of_values(one["order"])
            except (KeyError, TypeError) as error:
                log.warning("an order of another node cannot be read: %s", error)
                continue
            if key not in self._done:
                self._note_done(key, order)
                self._orders.append(NodeOrder(order, saves, leads))

    def _note_done(self, key: str, order: Order) -> None:
        self._done[key] = None
        if len(self._done) > MAX_DONE:
            del self._done[next(iter(self._done))]
        self._commands.pop(key, None)
        if order.action == "set":
            self._journal = [*self._journal, {**_encode(key, order), "done": True}][-MAX_JOURNAL:]

    # --- main thread -------------------------------------------------------------------------------------------------

    def add_command(
        self, message: Mapping[str, Any], step: int, is_expired: Callable[[Mapping[str, Any]], bool]
    ) -> None:
        """Pass a command of the agent on to all nodes, which act after the next round.

        A command that an earlier attempt applied (`status`) is repeated, unless the state of the training contains it.
        """
        again = message.get("status") == "applied"
        try:
            order = parse_command(message, step)
        except (KeyError, TypeError, ValueError) as error:
            log.warning("a command cannot be read: %s", error)
            return
        key = f"command {order.command}"
        with self.lock:
            for name in [name for name, (_, sent) in self._commands.items() if is_expired(sent)]:
                del self._commands[name]
            if key not in self._done:
                self._commands[key] = order, message
            elif key in self._restored and not again and message.get("status") == "waiting":
                self._on_known(order.command)

    def add_decision(self, decision: dict[str, Any]) -> None:
        """Keep a decision of the engine until this node knows whether it reports decisions."""
        with self.lock:
            (self._round_decisions if self._is_observing else self._decisions).append(decision)
            del self._decisions[:-MAX_WAITING_DECISIONS]

    def _add_decisions(self, decisions: Iterable[dict[str, Any]]) -> None:
        self._decisions += decisions

    def take_decisions(self) -> list[dict[str, Any]]:
        """Remove and return the decisions that this node reports; the first member alone reports."""
        with self.lock:
            if self.leads is None:
                return []
            taken, self._decisions = self._decisions if self.leads else [], []
            return taken

    def take_orders(self) -> list[NodeOrder]:
        """Remove and return the orders to carry out now."""
        with self.lock:
            taken, self._orders = self._orders, []
            return taken

    def state_dict(self) -> dict[str, Any]:
        """Return the orders that the state of the training contains. Plain JSON."""
        with self.lock:
            return {"observed": self._observed_round, "done": [*self._done], "journal": self._journal}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        with self.lock:
            self._observed_round = int(state.get("observed", 0))
            self._done = dict.fromkeys(str(one) for one in state.get("done", ()))
            self._restored = frozenset(self._done)
            self._journal = list(state.get("journal", ()))


def find_refusal(action: str) -> str:
    """Return the reason why no world can carry out an action, or ""."""
    return _REFUSED.get(action, "")


def _encode(key: str, order: Order) -> dict[str, Any]:
    return {"id": key, "order": order.as_values()}


def _command_of(one: Mapping[str, Any]) -> int:
    """Return 0 for an order of a rule, which comes before all commands, else the number of the command."""
    order = one.get("order")
    number = order.get("command", 0) if isinstance(order, Mapping) else 0
    return number if isinstance(number, int) else 0
