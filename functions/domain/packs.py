"""Who holds the packs that checkpoints consist of: what a commit may rely on, and what retention may delete.

Each rule decides from an item as it was read, and the write is conditional on the item still being so. Docs:
docs/decisions/0007-chunks-in-packs.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from contract.errors import ErrorCode
from contract.manifest import Pack
from functions.domain.change import MAX_ACTIONS, Change, CondemnPack, Forget, PackWrite, ReleasePack
from functions.domain.errors import Refusal
from functions.domain.records import Job, PackRecord

FUNCTION_TIMEOUT_S = 25
"""How long one call of the API may take; the deployed functions are ended then."""
DEAD_AFTER_S = 2 * FUNCTION_TIMEOUT_S
"""Whoever condemned a pack so long ago and has not deleted it is dead. The second half is for clocks that differ, and
for a request that the network has delivered late."""
GONE_KEPT_S = 86_400
"""How long the item of a deleted pack stays; any commit that read it as it was before has ended by then."""


@dataclass(frozen=True)
class Sighting:
    """A pack as a manifest declares it, and its item as it was read; None if there was none."""

    pack: Pack
    record: PackRecord | None


def needs_look(job_id: str, sighting: Sighting, now: int) -> bool:
    """True if only the object store can say whether the pack is there; False if the job has seen it and holds it.

    Refuses a pack that is being deleted, which passes by itself, and one that was verified with another size or
    checksum: whoever declares that is wrong.
    """
    pack, record = sighting.pack, sighting.record
    if record is None or record.gone:
        return True
    if record.condemned_at is not None:
        if now - record.condemned_at < DEAD_AFTER_S:
            raise Refusal(ErrorCode.CONFLICT, f"Pack {pack.blake3} is just being deleted: nothing named it any more.")
        return True
    if record.doubted:
        return True
    if (record.size_bytes, record.crc64nvme) != (pack.size_bytes, pack.crc64nvme):
        raise Refusal(
            ErrorCode.CHECKPOINT_CONFLICT,
            f"Pack {pack.blake3} is stored and verified with {record.size_bytes} bytes and CRC-64 {record.crc64nvme}; "
            f"declared are {pack.size_bytes} and {pack.crc64nvme}.",
            field="packs",
        )
    return job_id not in record.jobs


def may_hold(sighting: Sighting, current: PackRecord | None) -> bool:
    """True if what was seen of the object store still stands: the pack has not been deleted in between."""
    pack, seen = sighting.pack, sighting.record
    if seen is None or current is None:
        return seen is current
    if seen.condemned_by is not None:
        return current.condemned_by == seen.condemned_by
    if not current.jobs or seen.doubted != current.doubted:
        return False
    return seen.doubted or (current.size_bytes, current.crc64nvme) == (pack.size_bytes, pack.crc64nvme)


def held(tenant: str, job_id: str, pack: Pack, current: PackRecord | None) -> PackRecord:
    """The item once the job holds the pack too."""
    return PackRecord(
        tenant=tenant,
        blake3=pack.blake3,
        size_bytes=pack.size_bytes,
        crc64nvme=pack.crc64nvme,
        jobs=(current.jobs if current else frozenset()) | {job_id},
    )


def may_condemn(job_id: str, seen: PackRecord | None, current: PackRecord | None) -> bool:
    """True if nobody but the job holds the pack, now as when it was read."""
    if seen is None or current is None:
        return seen is current
    if seen.condemned_by is not None:
        return current.condemned_by == seen.condemned_by
    return current.jobs == {job_id}


def condemned(tenant: str, write: CondemnPack, mark: str, current: PackRecord | None) -> PackRecord:
    """The item of a pack that nobody may rely on any more."""
    known = current or write.pack
    return PackRecord(
        tenant=tenant,
        blake3=write.pack.blake3,
        size_bytes=known.size_bytes,
        crc64nvme=known.crc64nvme,
        condemned_at=write.at,
        condemned_by=mark,
    )


@dataclass(frozen=True)
class Parting:
    """What a job does about packs that none of its checkpoints names any more."""

    writes: tuple[PackWrite, ...]
    busy: frozenset[str]
    """Another retention is deleting them, or has died doing so: their manifests stay to tell of them."""


def parting(job_id: str, sightings: Iterable[Sighting], now: int) -> Parting:
    """Condemn what nobody else holds, release what somebody does, and leave alone what is not the job's."""
    writes: list[PackWrite] = []
    busy: set[str] = set()
    for sighting in sightings:
        pack, record = sighting.pack, sighting.record
        if record is not None and record.jobs:
            if record.jobs == {job_id}:
                writes.append(CondemnPack(pack=pack, seen=record, at=now))
            elif job_id in record.jobs:
                writes.append(ReleasePack(blake3=pack.blake3))
        elif record is None or record.gone or now - (record.condemned_at or 0) >= DEAD_AFTER_S:
            # Uploaded, but never committed; perhaps once more after it was gone.
            writes.append(CondemnPack(pack=pack, seen=record, at=now))
        else:
            busy.add(pack.blake3)
    return Parting(tuple(writes), frozenset(busy))


def let_go(job: Job, forgotten: Sequence[Forget], writes: Sequence[PackWrite]) -> tuple[Change, list[PackWrite]]:
    """As much of it as one transaction holds, and what is left. The job's `rev` rises: a commit that has looked at the
    packs, and a command that has chosen a checkpoint, must look again."""
    room = MAX_ACTIONS - 1 - len(forgotten)
    after = job.model_copy(update={"rev": job.rev + 1})
    change = Change(seen_rev=job.rev, job=after, forgotten=tuple(forgotten), packs=tuple(writes[:room]))
    return change, list(writes[room:])
