"""Every key of the six tables, in one place. functions/storage/README.md lists the access patterns."""

from __future__ import annotations

import zlib
from typing import NamedTuple

TABLE_PREFIX = "baton-"
"""Default beginning of the tables' names. The authorizer reads this default without the settings, because the
settings load pydantic."""

PACK = "PACK"
SHARED = "SHARED"
TIMER = "TIMER"
"""Partition of the index `timers`: jobs by `Job.timer_at`."""
RETENTION = "RETENTION"
"""Another one: ended jobs by `Job.retention_at`. However many there are, no timer waits for them."""
RULES_DUE = "RULES"
"""A third one: jobs whose rules are to be looked at, by `StandingRecord.next_at`."""
DUE = "DUE"
"""The one partition of the index `due`."""
WATCH = "WATCH"
"""Key of the item in the heartbeats table that says when expired leases were last looked after."""

DUE_BUCKET_S = 3600
"""A lease moves in the index `due` at most once in this many seconds, however often it is prolonged. A move is two
writes; a sweep reads half a unit for nearly each live lease, whatever this is beyond a few leases' duration."""


class Key(NamedTuple):
    """Where an item of a table is stored."""

    partition: str
    sort: str


def job_pk(job_id: str) -> str:
    """Partition of everything that belongs to a job."""
    return f"JOB#{job_id}"


def job_id_of(pk: str) -> str:
    """The inverse of `job_pk`."""
    return pk.removeprefix("JOB#")


def group_pk(tenant: str, group: str) -> str:
    """Partition of what is known of the jobs of a group; its sort keys are their ids."""
    return f"GROUP#{tenant}#{group}"


def pack_pk(tenant: str, blake3: str) -> str:
    """Partition of a pack; its one sort key is `PACK`."""
    return f"PACK#{tenant}#{blake3}"


def shared_pk(tenant: str, shared_key: str) -> str:
    """Partition of what jobs share under a key; its one sort key is `SHARED`."""
    return f"SHARED#{tenant}#{shared_key}"


def ready_pk(tenant: str, queue: str, shard: int) -> str:
    """Partition of the index `ready`; its sort key is `Job.ready_rank`."""
    return f"{tenant}#{queue}#{shard}"


def state_pk(tenant: str, state: str) -> str:
    """Partition of the index `by_state`."""
    return f"{tenant}#{state}"


def created_sk(created_at: int, record_id: str) -> str:
    """Sort key of lists in order of creation."""
    return f"{created_at:011d}#{record_id}"


def due_bucket(job_id: str, now: int) -> int:
    """Start of the present bucket; lease duration added to it gives `due_at`.

    `due_at` is never later than the end of a lease prolonged at `now`, and at most one bucket earlier. The buckets of
    different jobs begin at different seconds, so that a fleet does not rewrite the index all at once.
    """
    phase_s = zlib.crc32(job_id.encode()) % DUE_BUCKET_S
    return now - (now - phase_s) % DUE_BUCKET_S


def webhooks_pk(tenant: str) -> str:
    """Partition of a tenant's webhooks; its sort keys are their ids."""
    return f"TENANT#{tenant}"


def deliveries_pk(webhook_id: str) -> str:
    """Partition of a webhook's deliveries."""
    return f"HOOK#{webhook_id}"


def delivery_sk(at: int, job_id: str, seq: int) -> str:
    """Sort key of a delivery: in order of the events' instants."""
    return f"{at:011d}#{job_id}#{seq:010d}"


def recipes_pk(tenant: str) -> str:
    """Partition of a tenant's recipes."""
    return f"TENANT#{tenant}"


def recipe_sk(name: str, version: int) -> str:
    """Sort key of a recipe: versions of one name in order."""
    return f"{name}@{version:06d}"


def rings_pk(tenant: str) -> str:
    """Partition of a tenant's rings; its sort keys are their names."""
    return f"TENANT#{tenant}"


def ring_pk(tenant: str, name: str, ring_id: str) -> str:
    """Partition of a ring's records; its sort keys are theirs. No other ring, of whatever name, ever has it."""
    return f"RING#{tenant}#{name}#{ring_id}"


def api_key_pk(key_id: str) -> str:
    """Partition of an API key."""
    return f"KEY#{key_id}"


def grant_pk(token_sha256: str) -> str:
    """Partition of a transfer token."""
    return f"GRANT#{token_sha256}"


def object_key(tenant: str, key: str) -> str:
    """Physical S3 key of a tenant's object."""
    return f"{tenant}/{key}"
