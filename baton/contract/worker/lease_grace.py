"""The times of a lease: how a worker renews it, and when the sweeper may revoke it.

Both sides keep to these numbers: the grace of an expired lease follows from the worker's retries and from the outages
that the sweeper cannot notice.
"""

from __future__ import annotations

import math

LEASE_INTERVALS = 3
"""Heartbeat intervals that a lease lasts: it outlives two lost heartbeats."""
SWEEP_INTERVAL_S = 60
"""Seconds between two runs of the sweeper, which revokes expired leases."""
RETRY_PAUSES = 3
"""After a failed heartbeat, a worker pauses for at most the heartbeat interval divided by this number."""


def heartbeat_budget_s(heartbeat_interval_s: int) -> float:
    """Return the time in seconds after which a worker gives one heartbeat call up."""
    return max(float(heartbeat_interval_s), 2.0)


def renewal_window_s(heartbeat_interval_s: int) -> int:
    """Return the seconds within which a live worker renews its lease, once the API answers: one call and one pause."""
    return math.ceil(heartbeat_budget_s(heartbeat_interval_s) + heartbeat_interval_s / RETRY_PAUSES)


def unseen_outage_s(sweep_interval_s: float) -> int:
    """Return the length in seconds of the longest outage that can pass between two sweeps without notice.

    Sweeps may be late by a quarter of their interval, and by a second for clocks that count whole seconds.
    """
    return math.ceil(sweep_interval_s + max(sweep_interval_s / 4, 1))


def revocation_grace_s(heartbeat_interval_s: int, sweep_interval_s: float = SWEEP_INTERVAL_S) -> int:
    """Return the seconds for which the sweeper spares an expired lease.

    The last heartbeat of a live worker was accepted at 0; its next one is due at one interval. An outage that no sweep
    has noticed can begin just before and ends `unseen_outage_s` later (one second more, since times are whole seconds);
    the worker renews within `renewal_window_s` from then on. Until then a live worker looks like a dead one.
    """
    renewed_s = heartbeat_interval_s + unseen_outage_s(sweep_interval_s) + 1 + renewal_window_s(heartbeat_interval_s)
    return max(renewed_s - LEASE_INTERVALS * heartbeat_interval_s, 0)
