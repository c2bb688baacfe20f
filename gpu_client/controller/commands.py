"""Live commands: each carried out once, at a step boundary, or not at all."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from gpu_client.controller.orders import Order, order_of_command

log = logging.getLogger("baton.rules")


class Commands:
    """What has arrived, in its order. Sequence numbers tell what came before."""

    def __init__(self, clock: Callable[[], float], expired: Callable[[int], object]) -> None:
        """`expired` is told the number of a command that came too late."""
        self._clock = clock
        self._expired = expired
        self._last_seq = 0
        self._again: list[Order] = []
        """Applied after the checkpoint that this training goes on from: due after the same steps again."""
        self.sets_seq = 0
        """Of the newest `set` that the training's present state has in it."""

    @property
    def waiting(self) -> bool:
        """Whether some are due at a later step."""
        return bool(self._again)

    def stamped(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """A message with the moment at which it is too late for it."""
        life_s = message.get("expires_in_s")
        return {**message, "until": self._clock() + life_s} if isinstance(life_s, int | float) else message

    def order_of(self, message: Mapping[str, Any], step: int) -> Order | None:
        """What is to be done now; None if nothing is, or only at a later step."""
        again = message.get("status") == "applied"
        try:
            order = order_of_command(message, int(message["step"]) if again else step)
        except (KeyError, TypeError, ValueError) as error:
            log.warning("a command cannot be read: %s", error)
            return None
        if order.command <= (self.sets_seq if again else self._last_seq):
            return None
        if again:
            self._again.append(order)
            return None
        self._last_seq = order.command
        until = message.get("until")
        if until is not None and self._clock() > until:
            self._expired(order.command)
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
