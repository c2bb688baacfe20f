"""Define the event that the control plane publishes when a machine or the money of a fleet changes."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import Field

from baton.contract.base import AnswerModel, EpochSeconds


class FleetEventType(StrEnum):
    """Kind of the event. `machine.*`: the state that a machine entered, its move (`machine.reallocated`), or its long
    stay in a state (`machine.overdue`).
    """

    MACHINE_PLANNED = "machine.planned"
    MACHINE_REQUESTED = "machine.requested"
    MACHINE_AMBIGUOUS = "machine.ambiguous"
    MACHINE_BOOTING = "machine.booting"
    MACHINE_REGISTERED = "machine.registered"
    MACHINE_READY = "machine.ready"
    MACHINE_BUSY = "machine.busy"
    MACHINE_DRAINING = "machine.draining"
    MACHINE_LOST = "machine.lost"
    MACHINE_TERMINATING = "machine.terminating"
    MACHINE_GONE = "machine.gone"
    MACHINE_FAILED = "machine.failed"
    MACHINE_REALLOCATED = "machine.reallocated"
    MACHINE_OVERDUE = "machine.overdue"
    BUDGET_WARNING = "budget.warning"
    BUDGET_DRAINED = "budget.drained"
    BUDGET_EXHAUSTED = "budget.exhausted"
    BALANCE_LOW = "balance.low"
    CHARGE_DIFFERS = "charge.differs"


class PublishedFleetEvent(AnswerModel):
    """A change of a fleet, published after its commit: the `detail` of an event on the bus.

    Example: `{"schema_version": 1, "id": "fleet/nights#179000000012345678900", "type": "machine.gone",
    "tenant": "default", "fleet": "nights", "machine": "a1b2c3d4-nights-9f8e7d", "at": 1790000000, "usd": 0.31, ...}`
    """

    schema_version: Literal[1] = 1
    """Increases when a field changes its meaning or disappears. New fields and types do not increase it."""
    id: str = Field(description="`fleet/<name>#<number>`: the same for every delivery of the same event")
    type: FleetEventType
    tenant: str
    fleet: str
    machine: str | None = None
    at: EpochSeconds
    reason: str = ""
    usd: float = 0
    """Money spent on the machine, or by the fleet, so far."""

    @property
    def subject(self) -> str:
        """Return what the event is about; the events of one subject are delivered in their order."""
        return self.id.rpartition("#")[0]

    @property
    def seq(self) -> int:
        """Return a number that rises with each event of the fleet."""
        return int(self.id.rpartition("#")[2])
