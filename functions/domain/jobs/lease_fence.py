"""Check the fence of a write, and choose the directive of a heartbeat.

Protocol after dstack's pipelines (a lock token guards the final apply) and the DynamoDB lock client
(one clock decides, here the clock of the server).
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass

from baton.contract.errors import ErrorCode
from baton.contract.worker.control import Directive
from functions.domain.errors import Refusal
from functions.domain.records import Lease

REPROOF_WINDOW_S = 3600
"""Time after the end of an unrevoked lease in which a heartbeat may prove the lease again."""

REVOKED = "interrupted"
"""Value of `closed` of a lease that the sweeper revoked or whose agent reported a crash."""

FIRST_PROGRESS_FACTOR = 2
"""The first checkpoint of an original client may take this many times as long as later checkpoints, because the client
loads models and generates class images first."""

LEASE_RETENTION_S = 7 * 86_400
"""TTL of a lease row, counted from the end of the lease."""


@dataclass(frozen=True, kw_only=True)
class Fence:
    """Proof that a worker presents with a write at `now`.

    `token_sha256` is None for an original client. If the lease names a machine, an original client must name the same
    machine. Otherwise API key and source address must equal those of the claim, and a write must name the attempt.
    """

    job_id: str
    tenant: str
    now: int
    epoch: int | None = None
    token_sha256: str | None = None
    machine_id: str | None = None
    key_id: str | None = None
    source_address: str | None = None
    heartbeat: bool = False
    """True for a heartbeat. An original client's heartbeat may omit machine id and attempt, but requires progress."""

    def admits(self, lease: Lease | None, *, reproof_window_s: int = 0) -> bool:
        """Return True if `lease` permits the bearer to write. The stores express this check as a condition."""
        return (
            lease is not None
            and lease.tenant == self.tenant
            and not lease.closed
            and self.bears(lease)
            and lease.expires_at + reproof_window_s > self.now
            and not (self.heartbeat and lease.claimant is not None and lease.claimant.progress_by <= self.now)
        )

    def recovers(self, lease: Lease | None) -> bool:
        """Return True if the bearer may take back a revoked lease. The stores express this check as a condition.

        An original client must name the machine of its claim: without the name, a zombie of an earlier attempt behind
        the same address would take the lease.
        """
        if lease is None or lease.closed != REVOKED or not self.bears(lease):
            return False
        if lease.token_sha256 is None and (lease.machine_id is None or lease.machine_id != self.machine_id):
            return False
        shows_progress = lease.claimant is None or lease.claimant.progress_by > self.now
        return shows_progress and lease.expires_at + REPROOF_WINDOW_S > self.now

    def bears(self, lease: Lease) -> bool:
        """Return True if the bearer is the attempt of the lease, live or not."""
        if lease.tenant != self.tenant or (self.epoch is not None and lease.epoch != self.epoch):
            return False
        if lease.token_sha256 is not None:
            return self.token_sha256 is not None and hmac.compare_digest(lease.token_sha256, self.token_sha256)
        if self.token_sha256 is not None:
            # The bearer is a lease-aware worker of an earlier attempt, and an original client holds the job.
            return False
        if lease.machine_id is not None and (self.machine_id is not None or not self.heartbeat):
            return lease.machine_id == self.machine_id
        claimant = lease.claimant
        return (
            claimant is not None
            and (claimant.key_id, claimant.source_address) == (self.key_id, self.source_address)
            and (self.heartbeat or self.epoch is not None)
        )

    def ended_directive(self, lease: Lease | None) -> Directive | None:
        """Return the directive for the bearer of a lease that a user's command closed; None for another lease."""
        if lease is None or lease.tenant != self.tenant or lease.token_sha256 is None or not self.bears(lease):
            return None
        return {"canceled": Directive.CANCEL, "failed": Directive.CANCEL, "paused": Directive.PAUSE}.get(lease.closed)

    def refusal(self, lease: Lease | None) -> Refusal:
        """Return the refusal for a bearer that the fence does not admit."""
        if lease is None or lease.tenant != self.tenant:
            return Refusal(ErrorCode.JOB_NOT_RUNNING, f"Job {self.job_id} is not running.")
        if lease.token_sha256 is not None and self.token_sha256 is None:
            return Refusal(ErrorCode.LEASE_REQUIRED, field="x-lease-token")
        if not self.bears(lease):
            if self.token_sha256 is None:
                return self._other_client(lease)
            return Refusal(
                ErrorCode.LEASE_LOST,
                f"Job {self.job_id} is held by attempt {lease.epoch}, or the lease token is not that attempt's.",
                field="x-lease-token",
            )
        if lease.closed == "canceled":
            return Refusal(ErrorCode.JOB_CANCELED, f"Job {self.job_id} was canceled.")
        if self.recovers(lease):
            return Refusal(
                ErrorCode.LEASE_EXPIRED,
                f"The lease of attempt {lease.epoch} ran out at {lease.expires_at} and was revoked.",
                field="x-lease-token",
            )
        if lease.closed:
            return Refusal(
                ErrorCode.LEASE_LOST, f"Attempt {lease.epoch} of job {self.job_id} has ended: {lease.closed}."
            )
        return Refusal(
            ErrorCode.LEASE_EXPIRED,
            f"The lease of attempt {lease.epoch} ran out at {lease.expires_at}; it is {self.now} now.",
            field="x-lease-token",
        )

    def _other_client(self, lease: Lease) -> Refusal:
        """Return the refusal for a client without a lease token that does not bear the lease."""
        held = f"Job {self.job_id} is held by attempt {lease.epoch}"
        if self.epoch is not None and self.epoch != lease.epoch:
            return Refusal(ErrorCode.LEASE_LOST, f"{held}; the key is of attempt {self.epoch}.", field="key")
        if lease.machine_id is not None:
            named = "another machine" if self.machine_id is not None else "no machine"
            return Refusal(ErrorCode.LEASE_LOST, f"{held} on a machine; the call names {named}.", field="machine_id")
        if self.epoch is None:
            return Refusal(
                ErrorCode.LEASE_LOST, f"{held}; the key does not begin with that attempt's prefix.", field="key"
            )
        return Refusal(ErrorCode.LEASE_LOST, f"{held}, which was claimed with another API key or address.")


def fence_of(lease: Lease, now: int) -> Fence:
    """Return the fence of the bearer of `lease`, for writes that the control plane makes on behalf of the bearer."""
    claimant = lease.claimant
    return Fence(
        job_id=lease.job_id,
        tenant=lease.tenant,
        now=now,
        epoch=lease.epoch,
        token_sha256=lease.token_sha256,
        machine_id=lease.machine_id,
        key_id=claimant.key_id if claimant else None,
        source_address=claimant.source_address if claimant else None,
    )


def describe_expiry(lease: Lease, now: int) -> str:
    """Return why a lease expired: heartbeats stopped, or an original client showed no progress for too long."""
    claimant = lease.claimant
    if claimant is not None and claimant.progress_by < lease.expires_at:
        return f"no checkpoint within the time allowed, which ended {now - claimant.progress_by} s ago"
    return f"no heartbeat for {now - (lease.expires_at - lease.duration_s)} s"


def directive_for(lease: Lease, now: int) -> tuple[Directive, str]:
    """Return the directive of a heartbeat and its reason: the user's, or `checkpoint` before the time is used up."""
    if lease.directive is not Directive.CONTINUE:
        return lease.directive, lease.directive_reason
    if lease.stop_at is not None and now >= lease.stop_at - 2 * lease.heartbeat_interval_s:
        return Directive.CHECKPOINT, "the time allowed for this job is nearly used up"
    return Directive.CONTINUE, ""
