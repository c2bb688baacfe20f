"""Who holds the packs that checkpoints consist of: what a commit may rely on, and what retention may delete.

Each rule decides from an item as it was read, and the write is conditional on the item still being so. Docs:
docs/decisions/0007-chunks-in-packs.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton.contract.errors import ErrorCode
from baton.contract.manifest import Pack
from functions.domain.errors import Refusal
from functions.domain.jobs.transaction import Delete, Transaction, write_job
from functions.domain.records import Job, PackRecord

FUNCTION_TIMEOUT_S = 25
"""How long one call of the API may take; the deployed functions are ended then."""
SWEEPER_TIMEOUT_S = 55
"""The same for the sweeper: a sweep ends before the next one begins."""
DEAD_AFTER_S = 2 * FUNCTION_TIMEOUT_S
"""Whoever condemned a pack so long ago has deleted it or is dead. The second half is for clocks that differ, and for a
request that the network has delivered late."""
CONDEMNED_KEPT_S = 86_400
"""How long the item of a condemned pack stays; any commit that read it as it was before has ended by then."""


@dataclass(frozen=True)
class PackSnapshot:
    """A pack as a manifest declares it, and its item as it was read; None if there was none."""

    pack: Pack
    record: PackRecord | None

    def referenced_by(self, job_id: str) -> bool:
        """True if the item named the job as a holder."""
        return self.record is not None and job_id in self.record.jobs


@dataclass(frozen=True, kw_only=True)
class CondemnPack:
    """Nobody may rely on the pack from here on; its object will be deleted. Refused unless its item is as `seen`."""

    pack: Pack
    seen: PackRecord | None
    at: int


@dataclass(frozen=True, kw_only=True)
class ReleasePack:
    """The job holds the pack no longer; others do. Refused unless its item is as `seen`."""

    pack: Pack
    seen: PackRecord


PackWrite = CondemnPack | ReleasePack


def needs_verification(job_id: str, sighting: PackSnapshot, now: int) -> bool:
    """True if only the object store can say whether the pack is there; False if the job has seen it and holds it.

    Refuses a pack that is being deleted, which passes by itself, and one that was verified with another size or
    checksum: whoever declares that is wrong.
    """
    pack, record = sighting.pack, sighting.record
    if record is None:
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


def may_reference(sighting: PackSnapshot, current: PackRecord | None) -> bool:
    """True if what was seen of the object store still stands: the pack has not been deleted in between."""
    pack, seen = sighting.pack, sighting.record
    if seen is None or current is None:
        return seen is current
    if seen.condemned_at is not None:
        return current.version == seen.version
    if not current.jobs or seen.doubted != current.doubted:
        return False
    return seen.doubted or (current.size_bytes, current.crc64nvme) == (pack.size_bytes, pack.crc64nvme)


def referenced_record(tenant: str, job_id: str, pack: Pack, current: PackRecord | None, version: str) -> PackRecord:
    """The item once the job holds the pack too. A job that holds it already lets go of nothing it decided before."""
    return PackRecord(
        tenant=tenant,
        blake3=pack.blake3,
        size_bytes=pack.size_bytes,
        crc64nvme=pack.crc64nvme,
        jobs=(current.jobs if current else frozenset()) | {job_id},
        version=version,
    )


def may_release(write: PackWrite, current: PackRecord | None) -> bool:
    """True if the item is as it was when the decision was made: nobody has come to hold the pack since."""
    if write.seen is None or current is None:
        return write.seen is current
    return current.version == write.seen.version


def released_record(tenant: str, job_id: str, write: PackWrite, current: PackRecord | None, version: str) -> PackRecord:
    """The item of a pack once the job has let go of it."""
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
    """What a job does about packs that none of its checkpoints names any more: condemn what nobody else holds, release
    what somebody does, and leave alone what is not the job's.

    `ends_by`: until when the function that condemns them may live. What it condemns counts from there, so that it is
    dead when others take that over; for the sweeper that is an instant that lies ahead, at first.

    What is condemned already is condemned again, by whomever: he may be dead, and to delete twice does no harm.
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


def delete_records(job: Job, forgotten: Sequence[Delete]) -> Transaction:
    """Forget records, and raise the job's `rev`: a commit that has looked at its packs, and a command that has chosen a
    checkpoint, must look again. Only behind it are the packs let go that were read before."""
    return write_job(job.model_copy(update={"rev": job.rev + 1})).also(*forgotten)
