"""Define the keys of the seven tables. functions/storage/README.md lists the access patterns."""

from __future__ import annotations

import zlib
from typing import NamedTuple

TABLE_PREFIX = "baton-"
"""Default prefix of table names. The authorizer reads this default without the settings, because the
settings load pydantic."""

PACK = "PACK"
SHARED = "SHARED"
TIMER = "TIMER"
"""Partition of the index `timers`: jobs by `Job.timer_at`."""
RETENTION = "RETENTION"
"""Partition of the index `timers`: ended jobs by `Job.retention_at`, which delay no timer."""
RULES_DUE = "RULES"
"""Partition of the index `timers`: jobs whose rules are due, by `RuleStateRecord.next_at`."""
SEATS = "SEATS"
"""Partition of the index `timers`: elastic jobs that have not ended or whose seats have not ended."""
DUE = "DUE"
"""The one partition of the index `due`."""
WATCH = "WATCH"
"""Key of the reclaim watermark in the heartbeats table."""

FLEETS = "FLEETS"
"""Partition of all fleets of all tenants, by `fleet_sk`."""
RETIRED_FLEET = "FLEET"
"""Sort key of a fleet whose job has ended, in the partition of its machines."""
FLEET_LEDGER = "LEDGER"
"""Sort key of a fleet's ledger."""
LIVE_MACHINE = "LIVE#"
"""Prefix of the sort keys of machines that the tick watches; the id of the machine follows."""
FLEET_HOLDINGS = "L"
"""Common prefix of the ledger and of those machines, in this order; no other sort key of the partition has it."""
ENDED_MACHINE = "ENDED#"
"""Prefix of the sort keys of other machines, by the time of their end."""
FLEET_EVENT = "EVENT#"
"""Prefix of the sort keys of a fleet's events, by time."""
FLEET_NUDGE = "nudge"
"""Attribute of a fleet's event after which a tick of the controller follows at once."""
FLEET_CONTROLLER = "CONTROLLER"
"""Partition of the controller's single items: `FENCE`, `DEPLOYMENT`, `CLOCK` and `SPENDING`."""
QUARANTINES = "QUARANTINES"
"""Partition of hosts that are not rented for a time, by `provider:machine_ref`."""
REPUTATIONS = "REPUTATIONS"
"""Partition of the histories of machines, by `provider:gpu_model`."""
ORPHANS = "ORPHANS"
"""Partition of machines that no record explains, by handle."""

DUE_BUCKET_S = 3600
"""Minimum interval between two moves of a lease in the index `due`, however often the lease is renewed. A move costs
two write units. Because the interval exceeds the duration of a lease, a sweep reads nearly every live lease, for half a
read unit each."""


class Key(NamedTuple):
    """Key of an item of a table."""

    partition: str
    sort: str


def job_pk(job_id: str) -> str:
    """Return the partition of all records of a job."""
    return f"JOB#{job_id}"


def job_id_of(pk: str) -> str:
    """Return the job id of a partition of `job_pk`."""
    return pk.removeprefix("JOB#")


def group_pk(tenant: str, group: str) -> str:
    """Return the partition of the member records of a group; the sort keys are job ids."""
    return f"GROUP#{tenant}#{group}"


def pack_pk(tenant: str, blake3: str) -> str:
    """Return the partition of a pack; the only sort key is `PACK`."""
    return f"PACK#{tenant}#{blake3}"


def shared_pk(tenant: str, shared_key: str) -> str:
    """Return the partition of a shared output; the only sort key is `SHARED`."""
    return f"SHARED#{tenant}#{shared_key}"


def ready_pk(tenant: str, queue: str, shard: int) -> str:
    """Return the partition of the index `ready`; its sort key is `Job.ready_rank`."""
    return f"{tenant}#{queue}#{shard}"


def state_pk(tenant: str, state: str) -> str:
    """Return the partition of the index `by_state`."""
    return f"{tenant}#{state}"


def created_sk(created_at: int, record_id: str) -> str:
    """Return the sort key of lists in order of creation."""
    return f"{created_at:011d}#{record_id}"


def due_bucket(job_id: str, now: int) -> int:
    """Return the start of the present bucket; `due_at` is the start plus the duration of the lease.

    `due_at` is never later than the end of a lease prolonged at `now`, and at most one bucket earlier. The buckets of
    different jobs begin at different seconds, so that a fleet does not rewrite the index all at once.
    """
    phase_s = zlib.crc32(job_id.encode()) % DUE_BUCKET_S
    return now - (now - phase_s) % DUE_BUCKET_S


def webhooks_pk(tenant: str) -> str:
    """Return the partition of a tenant's webhooks; its sort keys are their ids."""
    return f"TENANT#{tenant}"


def deliveries_pk(webhook_id: str) -> str:
    """Return the partition of a webhook's deliveries."""
    return f"HOOK#{webhook_id}"


def delivery_sk(at: int, job_id: str, seq: int) -> str:
    """Return the sort key of a delivery, by the instant of the event."""
    return f"{at:011d}#{job_id}#{seq:010d}"


def recipes_pk(tenant: str) -> str:
    """Return the partition of a tenant's recipes."""
    return f"TENANT#{tenant}"


def recipe_sk(name: str, version: int) -> str:
    """Return the sort key of a recipe: versions of one name in order."""
    return f"{name}@{version:06d}"


def rings_pk(tenant: str) -> str:
    """Return the partition of a tenant's rings; its sort keys are their names."""
    return f"TENANT#{tenant}"


def ring_pk(tenant: str, name: str, ring_id: str) -> str:
    """Return the partition of a ring's records, unique to the ring."""
    return f"RING#{tenant}#{name}#{ring_id}"


def fleet_sk(tenant: str, name: str) -> str:
    """Return the sort key of a fleet: the fleets of a tenant by name."""
    return f"{tenant}#{name}"


def fleet_pk(tenant: str, name: str) -> str:
    """Return the partition of a fleet's ledger, machines and events."""
    return f"FLEET#{tenant}#{name}"


def ended_machine_sk(ended_at: int, machine_id: str) -> str:
    """Return the sort key of a machine that the tick no longer watches."""
    return f"{ENDED_MACHINE}{ended_at:011d}#{machine_id}"


def fleet_event_sk(at: int, written_ns: int, place: int) -> str:
    """Return the sort key of a fleet's event: by time, within one second in the order of the writes."""
    return f"{FLEET_EVENT}{at:011d}#{written_ns:020d}#{place:02d}"


def fleet_of(pk: str) -> tuple[str, str] | None:
    """Return tenant and name of a partition of `fleet_pk`; None for another partition."""
    if not pk.startswith("FLEET#"):
        return None
    tenant, _, name = pk.removeprefix("FLEET#").rpartition("#")
    return tenant, name


def fleet_event_number(sort: str) -> int:
    """Return a number that rises with the writes of a fleet's events, from a sort key of `fleet_event_sk`.

    Raises ValueError.
    """
    _, _, written_ns, place = sort.split("#")
    return int(written_ns) * 100 + int(place)


def provider_call_pk(provider: str) -> str:
    """Return the partition of the times of a provider's next calls; its sort keys are the kinds of calls."""
    return f"CALL#{provider}"


def api_key_pk(key_id: str) -> str:
    """Return the partition of an API key."""
    return f"KEY#{key_id}"


def grant_pk(token_sha256: str) -> str:
    """Return the partition of a transfer token."""
    return f"GRANT#{token_sha256}"


def object_key(tenant: str, key: str) -> str:
    """Return the physical S3 key of a tenant's object."""
    return f"{tenant}/{key}"
