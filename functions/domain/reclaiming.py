"""When a lease that ran out is taken away: not while workers could not have prolonged it.

When the control plane itself was down, every lease ran out although every machine lives. The watch remembers when
somebody last looked after leases that ran out; a gap in it is taken for an outage, and after an outage each worker has
one lease duration to prove its lease again.
"""

from __future__ import annotations

from functions.domain.records import Lease
from functions.domain.stored import Record

OUTAGE_S = 180
"""A watch not kept for this long means that the control plane was down: three runs of the sweeper missed."""

WATCH_RENEWED_S = 30
"""A watch younger than this need not be written again."""


class Watch(Record):
    """When leases were last looked after (`seen_at`), and since when without a gap (`since`); 0 is for ever."""

    seen_at: int
    since: int = 0


def watched(before: Watch | None, now: int) -> Watch:
    """The watch to keep, given the one kept before. It is the same one while that is fresh."""
    if before is None:
        return Watch(seen_at=now)
    if now - before.seen_at > OUTAGE_S:
        return Watch(seen_at=now, since=now)
    if now - before.seen_at < WATCH_RENEWED_S:
        return before
    return Watch(seen_at=now, since=before.since)


def reclaimable(lease: Lease, watch: Watch, now: int) -> bool:
    """True if the attempt is to be ended as interrupted."""
    return not lease.closed and lease.expires_at <= now and watch.since + lease.duration_s <= now
