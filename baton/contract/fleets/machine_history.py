"""Define the answer to how many machines a fleet had over time, by what they did."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from baton.contract.base import AnswerModel, EpochSeconds, WireModel

MAX_POINTS = 500


class MachineHistoryQuery(WireModel):
    """Query of the machines over time. Example: `?hours=24&points=120`"""

    hours: Annotated[float, Field(gt=0, le=90 * 24)] = 24
    """Time before now; the control plane keeps events for 90 days."""
    points: Annotated[int, Field(ge=1, le=MAX_POINTS)] = 120
    """Number of equal spans of time, for example the width of a drawing in pixels."""


class MachineHistory(AnswerModel):
    """Machines of a fleet over time: for each of equal spans the average number by what the machines did.

    The sum of a list times the length of a span is the number of machine-hours. Example: `{"since": 1790000000,
    "until": 1790007200, "starting": [0.1, 0], "idle": [0.2, 0.3], "busy": [1.7, 1.4], "ending": [0, 0.3]}`
    """

    since: EpochSeconds
    """Begin of the first span; later than asked for a fleet with more events than one answer reads."""
    until: EpochSeconds
    """End of the last span: now, by the fleets' clock."""
    starting: list[float]
    """Machines before their first claim: `planned` to `registered`."""
    idle: list[float]
    """Machines in state `ready`: rented, and without a job."""
    busy: list[float]
    ending: list[float]
    """Machines that are given back or are lost: `draining`, `lost`, `terminating`."""
