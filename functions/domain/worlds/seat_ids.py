"""Derive the ids of an elastic job's seats."""

from __future__ import annotations

from functions.domain.records import derive_id


def seat_id(job_id: str, seat: int) -> str:
    """Return the id of one seat of an elastic job."""
    return derive_id("seat", f"{job_id}\n{seat}")


def seat_ids(job_id: str, seats: int) -> list[str]:
    """Return the ids of all seats of an elastic job, by seat."""
    return [seat_id(job_id, seat) for seat in range(seats)]
