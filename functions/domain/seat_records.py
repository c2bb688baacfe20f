"""Define the stored values of an elastic job's seats."""

from __future__ import annotations

from functions.domain.record_base import Record


class Seat(Record):
    """Seat of an elastic job: the place of one machine."""

    job: str
    """Id of the elastic job."""
    seat: int
    min: int
    max: int


class SeatMark(Record):
    """Newest attempt at a seat that the elastic job has recorded."""

    epoch: int = 0
    running: bool = False
    world_epoch: int = 0
    """Number of this attempt among the attempts at all seats; manifests of checkpoints name this number."""
