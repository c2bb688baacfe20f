"""The end that a rule or command has announced, and whether one of which a checkpoint tells is still to come."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gpu_client.controller.orders import Order


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
