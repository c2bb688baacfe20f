"""Live commands: each carried out once, at a step boundary, or not at all."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal

from gpu_client.controller.orders import Order, order_of_command

log = logging.getLogger("baton.rules")

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
