"""Define the answer to what rents machines for a job, and what the machines cost so far."""

from __future__ import annotations

from baton.contract.base import AnswerModel, Epoch, EpochSeconds
from baton.contract.fleets.fleet import FleetView, MachineView

FAILED_WAITING_JOBS = "it failed the jobs that wait"
"""Reason for the end of a free machine that every waiting job avoids."""
REPLACED_NODE = "a slow node is replaced"
"""Beginning of the reason for the end of a machine in whose place another one trains."""


class ServingFleet(AnswerModel):
    """Fleet whose queues contain the queue of the job.

    Example: `{"fleet": {"spec": {"name": "nights", ...}, ...}, "cannot": "needs 24 GiB VRAM, fleet nights ..."}`
    """

    fleet: FleetView
    cannot: str = ""
    """Why the machines of the fleet can never run the job; empty if they can."""


class RentedAttempt(AnswerModel):
    """Attempt of the job on a rented machine.

    Example: `{"epoch": 1, "machine": {"id": "a1b2c3d4-nights-9f8e7d", ...}, "held_s": 1800, "usd": 0.2}`
    """

    epoch: Epoch
    seat: int | None = None
    """Node of an elastic job, whose attempts are numbered seat by seat; None for another job."""
    machine: MachineView
    held_s: int
    """Time for which the machine held the job, by the fleets' clock."""
    usd: float
    """Price of the machine for this time."""


class JobMachines(AnswerModel):
    """Fleets that serve a job's queue, the rented machines of its attempts, and their cost.

    Example: `{"fleets": [], "attempts": [], "usd": 0.31, "at": 1700000000}`
    """

    fleets: list[ServingFleet]
    attempts: list[RentedAttempt]
    """Oldest first, those of an elastic job seat by seat; attempts on other machines are left out."""
    usd: float
    at: EpochSeconds
    """Time of this answer by the fleets' clock."""
