"""Decide when the sweeper may revoke an expired lease: not before the worker could have renewed the lease.

A lease of a live machine expires while the API is down, slow or throttling. Therefore each sweep first proves that the
API answers, and the watermark records since when every sweep has proved this in time. Outages that the watermark shows
postpone revocations until workers had time to renew their leases. The grace of each lease
(baton/contract/worker/lease_grace.py) covers outages between two sweeps, which the watermark cannot show.
"""

from __future__ import annotations

from baton.contract.worker.lease_grace import renewal_window_s, revocation_grace_s, unseen_outage_s
from functions.domain.record_base import Record
from functions.domain.records import Lease


class ReclaimWatermark(Record):
    """Availability of the API in the observation of the sweeper.

    `seen_at`: the last sweep, 0 if the API did not answer then. `since`: the end of the last noticed outage, 0 if the
    sweeper has noticed no outage.
    """

    seen_at: int
    since: int = 0


def update_watermark(
    before: ReclaimWatermark | None, now: int, *, sweep_interval_s: float, served: bool
) -> ReclaimWatermark:
    """Return the watermark after a sweep at `now` that found the API answering (`served`) or not."""
    if not served:
        return ReclaimWatermark(seen_at=0, since=now)
    if before is None:
        return ReclaimWatermark(seen_at=now)
    noticed = now - before.seen_at > unseen_outage_s(sweep_interval_s)
    return ReclaimWatermark(seen_at=max(now, before.seen_at), since=now if noticed else before.since)


def is_reclaimable(lease: Lease, watch: ReclaimWatermark, now: int, *, sweep_interval_s: float) -> bool:
    """Return True if the lease may be revoked and its attempt ended as interrupted."""
    interval_s = lease.heartbeat_interval_s
    return (
        not lease.closed
        and watch.seen_at > 0
        and lease.expires_at + revocation_grace_s(interval_s, sweep_interval_s) <= now
        and watch.since + renewal_window_s(interval_s) <= now
    )
