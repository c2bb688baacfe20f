"""Among how many ready jobs a worker chooses: few while it is alone, more while others take them from under its hands.

The choice is by chance among the leading jobs that rank alike. With a window of W jobs and n claims under way at once,
about n / W of the claims meet a job that is just being taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.contract.work import WorkQuery
from functions.domain.claimants import Claimant
from functions.domain.matching import equals, mismatch
from functions.domain.ports import Randomness
from functions.domain.records import Job
from functions.domain.transaction import OpenLease, Transaction

SMALLEST_WINDOW = 10
LARGEST_WINDOW = 160
GROWTH = 4
DECAY = 32
"""A claim without conflict takes one part in this many off the window."""


@dataclass
class ClaimWindow:
    """The number of jobs to choose from; kept by one process over its claims.

    Threads may share it: a lost update only makes the window a little larger or smaller.
    """

    size: int = SMALLEST_WINDOW

    def conflicted(self) -> None:
        """Somebody else was faster: spread out."""
        self.size = min(self.size * GROWTH, LARGEST_WINDOW)

    def succeeded(self) -> None:
        """A claim without conflict: draw together, slowly."""
        self.size = max(self.size - max(self.size // DECAY, 1), SMALLEST_WINDOW)

    def choose(self, candidates: Sequence[Job], random: Randomness) -> Job:
        """One of the first `size` candidates that rank alike. There must be at least one."""
        leading = equals(candidates[: self.size])
        return leading[random.below(len(leading))] if len(leading) > 1 else leading[0]


def with_rings(change: Transaction, ring_token_sha256: str | None) -> Transaction:
    """A claim whose lease opens the rings that the job names; as it is where it names none."""
    rings, lease = change.job.spec.rings, change.lease
    if not rings or ring_token_sha256 is None or not isinstance(lease, OpenLease):
        return change
    opened = lease.lease.model_copy(update={"rings": rings, "ring_token_sha256": ring_token_sha256})
    return change.replacing(lease, OpenLease(lease=opened))


def with_claimant(change: Transaction, claimant: Claimant | None) -> Transaction:
    """Return the claim with the original client that its lease belongs to; unchanged for a lease with a token."""
    opening = change.lease
    if claimant is None or not isinstance(opening, OpenLease):
        return change
    # An empty machine id comes from a variable without a value, on every such machine alike.
    updates = {"claimant": claimant, "machine_id": opening.lease.machine_id or None}
    return change.replacing(opening, OpenLease(lease=opening.lease.model_copy(update=updates)))


def suitable(candidates: Sequence[Job], worker: WorkQuery, now: int) -> list[Job]:
    """The jobs that this worker may have, in the same order.

    A job whose deadline has passed is nobody's: its timer ends it.
    """
    return [
        job for job in candidates if mismatch(job, worker, now) is None and (job.timer_at is None or job.timer_at > now)
    ]
