"""Decide which packs a commit may rely on, and which packs retention may delete.

Each decision is made from an item as it was read, and the write requires the item to be unchanged. The design is in
docs/decisions/0007-chunks-in-packs.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton.contract.checkpoints.manifest import Pack
from baton.contract.errors import ErrorCode
from functions.domain.errors import Refusal
from functions.domain.jobs.transaction import Delete, Transaction, write_job
from functions.domain.records import Job, PackRecord

FUNCTION_TIMEOUT_S = 25
"""Longest time that one call of the API may take; Lambda ends the function then."""
SWEEPER_TIMEOUT_S = 55
"""Longest time that a sweep may take: a sweep ends before the next sweep begins."""
DEAD_AFTER_S = 2 * FUNCTION_TIMEOUT_S
"""Age of a condemnation at which its function has deleted the pack or is dead. The second half allows for clocks that
differ and for a request that the network delivers late."""
CONDEMNED_RETENTION_S = 86_400
"""TTL of the item of a condemned pack; exceeds the longest commit."""


@dataclass(frozen=True)
class PackSnapshot:
    """Pack as declared in a manifest, and the pack's item as read; None for a missing item."""

    pack: Pack
    record: PackRecord | None

    def referenced_by(self, job_id: str) -> bool:
        """Return True if the item has a reference of the job."""
        return self.record is not None and job_id in self.record.jobs


@dataclass(frozen=True, kw_only=True)
class CondemnPack:
    """Write that condemns a pack: no commit may rely on the pack. Requires the item to be `seen`."""

    pack: Pack
    seen: PackRecord | None
    at: int


@dataclass(frozen=True, kw_only=True)
class ReleasePack:
    """Write that removes the job's reference to a pack with other references. Requires the item to be `seen`."""

    pack: Pack
    seen: PackRecord


PackWrite = CondemnPack | ReleasePack


def needs_verification(job_id: str, sighting: PackSnapshot, now: int) -> bool:
    """Return True if the object must be verified; False if the job has a reference to the verified pack.

    Refuses a pack that is being deleted, until the deletion is complete, and a pack that was verified with another size
    or checksum than the manifest declares.
    """
    pack, record = sighting.pack, sighting.record
    if record is None:
        return True
    if record.condemned_at is not None:
        if now - record.condemned_at < DEAD_AFTER_S:
            raise Refusal(
                ErrorCode.CONFLICT, f"Pack {pack.blake3} is being deleted, because no checkpoint referenced the pack."
            )
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


def may_reference(sighting: PackSnapshot, current: PackRecord | None) -> bool:
    """Return True if the pack cannot have been deleted since its verification."""
    pack, seen = sighting.pack, sighting.record
    if seen is None or current is None:
        return seen is current
    if seen.condemned_at is not None:
        return current.version == seen.version
    if not current.jobs or seen.doubted != current.doubted:
        return False
    return seen.doubted or (current.size_bytes, current.crc64nvme) == (pack.size_bytes, pack.crc64nvme)


def referenced_record(tenant: str, job_id: str, pack: Pack, current: PackRecord | None, version: str) -> PackRecord:
    """Return the item with the job's reference and a new version, which invalidates earlier decisions to release."""
    return PackRecord(
        tenant=tenant,
        blake3=pack.blake3,
        size_bytes=pack.size_bytes,
        crc64nvme=pack.crc64nvme,
        jobs=(current.jobs if current else frozenset()) | {job_id},
        version=version,
    )


def may_release(write: PackWrite, current: PackRecord | None) -> bool:
    """Return True if the item is unchanged since the decision: no job has added a reference."""
    if write.seen is None or current is None:
        return write.seen is current
    return current.version == write.seen.version


def released_record(tenant: str, job_id: str, write: PackWrite, current: PackRecord | None, version: str) -> PackRecord:
    """Return the item of a pack after a release or a condemnation."""
    if isinstance(write, ReleasePack):
        return (current or write.seen).model_copy(
            update={"jobs": (current or write.seen).jobs - {job_id}, "version": version}
        )
    known = current or write.pack
    return PackRecord(
        tenant=tenant,
        blake3=write.pack.blake3,
        size_bytes=known.size_bytes,
        crc64nvme=known.crc64nvme,
        condemned_at=write.at,
        version=version,
    )


def release_plan(job_id: str, sightings: Iterable[PackSnapshot], ends_by: int) -> list[PackWrite]:
    """Return the writes for packs that no checkpoint of the job references any more.

    Packs without references of other jobs are condemned, packs with such references are released, and packs without a
    reference of the job are left alone. A condemned pack is condemned again, because the function that condemned the
    pack may be dead and a second deletion is harmless.

    `ends_by`: latest end of the calling function. A condemnation counts from that end, so that the function is dead
    when another function takes over; for the sweeper the instant may lie in the future.
    """
    at = ends_by - FUNCTION_TIMEOUT_S
    writes: list[PackWrite] = []
    for sighting in sightings:
        pack, record = sighting.pack, sighting.record
        if record is None or not record.jobs or record.jobs == {job_id}:
            writes.append(CondemnPack(pack=pack, seen=record, at=at))
        elif job_id in record.jobs:
            writes.append(ReleasePack(pack=pack, seen=record))
    return writes


def delete_records(job: Job, deletes: Sequence[Delete]) -> Transaction:
    """Delete records and raise the job's `rev`.

    A commit that has read its packs, and a command that has chosen a checkpoint, then conflict and read again. Packs
    are released only after this write.
    """
    return write_job(job.model_copy(update={"rev": job.rev + 1})).also(*deletes)
