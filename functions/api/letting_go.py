"""Letting go of old checkpoints: the records by the policy, then the packs that nobody names any more."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence

from blake3 import blake3
from pydantic import ValidationError

from contract.errors import ErrorCode
from contract.manifest import Manifest, ManifestV1, Pack, parse_manifest
from contract.names import CHECKPOINTS_BUCKET
from functions.api.context import Call, Context
from functions.api.leasing import WRITE_TRIES
from functions.api.paging import every_item
from functions.domain import packs as rules
from functions.domain.change import CondemnPack, Forget, PackWrite, mark_of
from functions.domain.checkpoints import manifests_prefix, pack_key, past, step_and_epoch
from functions.domain.errors import Refusal, StorageUnavailable, WriteConflict
from functions.domain.packs import Sighting
from functions.domain.records import CheckpointRecord, Job
from functions.domain.retention import expendable

logger = logging.getLogger("baton.checkpoints")

MAX_FORGOTTEN = 50
"""Records in one transaction; it has room for as many packs besides."""


def let_go_of_old(
    context: Context,
    call: Call,
    job: Job,
    *,
    known: Mapping[str, Sequence[Pack]] | None = None,
    left_behind: bool = False,
) -> None:
    """Retention, after a commit or at the end. A failure here is logged and made good later: the commit stands.

    `known`: what manifests name that need not be read. `left_behind`: look also for manifests that never became a
    checkpoint, or whose retention was interrupted.
    """
    try:
        _Retention(context, call, job, dict(known or {})).run(left_behind=left_behind)
    except (Refusal, StorageUnavailable) as error:
        logger.warning("retention left something behind", extra={"job_id": job.id, "reason": str(error)})


def read_manifest(context: Context, call: Call, record: CheckpointRecord) -> Manifest | ManifestV1:
    """The manifest of a committed checkpoint, verified; refuses if it is damaged."""
    data = context.objects.read(call.tenant, CHECKPOINTS_BUCKET, record.manifest_key)
    if data is None or blake3(data).hexdigest() != record.manifest_blake3:
        raise Refusal(
            ErrorCode.CHECKPOINT_NOT_FOUND, f"The manifest of step {record.step} is damaged or gone.", field="step"
        )
    return parse_manifest(data)


class _Retention:
    """Forget records and condemn packs in one transaction, delete objects, then manifests.

    The transaction is conditional on the job as the decision was made on. Whatever is interrupted leaves a manifest
    without a record behind, which says what is still to be deleted.
    """

    def __init__(self, context: Context, call: Call, job: Job, known: dict[str, Sequence[Pack]]) -> None:
        self._context = context
        self._call = call
        self._job = job
        self._known = known
        self._orphans: set[str] = set()
        """Manifests whose records are forgotten by now."""
        self._zips: set[str] = set()
        """The same of an original client's checkpoints."""
        self._deleted: set[str] = set()
        """Packs."""

    def run(self, *, left_behind: bool) -> None:
        """Raises Refusal and StorageUnavailable."""
        for _ in range(WRITE_TRIES):
            try:
                self._run(left_behind=left_behind)
            except WriteConflict:
                job = self._context.jobs.get(self._job.id)
                if job is None:
                    return
                self._job = job
            else:
                return
        raise Refusal(ErrorCode.CONFLICT, "The job is being changed by others all the time.")

    def _run(self, *, left_behind: bool) -> None:
        job, now = self._job, self._call.now
        records = list(every_item(lambda cursor: self._context.jobs.checkpoints(job.id, limit=1000, cursor=cursor)))
        going = expendable(
            records,
            job.spec.policy.retention,
            current_step=job.checkpoint_step,
            now=now,
            in_history=job.in_history,
        )[:MAX_FORGOTTEN]
        kept = [record for record in records if record not in going]
        leaving = self._orphans - {record.manifest_key for record in kept}
        leaving |= {record.manifest_key for record in going if record.legacy_key is None}
        protected = {record.step for record in records if record.protected_until > now}
        spared: set[str] = set()
        if left_behind or (going and protected):
            for step, key in self._without_record(records):
                # Who was given URLs for another branch's checkpoint of this step goes on reading it.
                (spared if step in protected else leaving).add(key)
        if not going and not leaving:
            return
        still_named = {digest for record in kept for digest in self._named_by(record)}
        still_named |= {pack.blake3 for key in spared for pack in self._named_at(key)}
        named: dict[str, Pack] = {}
        by_manifest: dict[str, set[str]] = {}
        for key in leaving:
            packs = [pack for pack in self._named_at(key) if pack.blake3 not in still_named]
            by_manifest[key] = {pack.blake3 for pack in packs}
            named |= {pack.blake3: pack for pack in packs if pack.blake3 not in self._deleted}
        seen = self._context.packs.get_many(self._call.tenant, named)
        parting = rules.parting(job.id, [Sighting(pack, seen.get(digest)) for digest, pack in named.items()], now)
        self._write(going, parting.writes)
        done = {key for key, digests in by_manifest.items() if not digests & parting.busy}
        self._delete(done | self._zips - {record.legacy_key for record in kept if record.legacy_key})

    def _write(self, going: Sequence[CheckpointRecord], writes: Sequence[PackWrite]) -> None:
        """Each round raises the job's `rev`, and so must follow upon the one before. Raises WriteConflict."""
        forgotten = [Forget(record=record, now=self._call.now) for record in going]
        while forgotten or writes:
            change, writes = rules.let_go(self._job, forgotten, writes)
            self._context.jobs.apply(change)
            self._job = change.job
            self._orphans |= {one.record.manifest_key for one in forgotten if one.record.legacy_key is None}
            self._zips |= {one.record.legacy_key for one in forgotten if one.record.legacy_key is not None}
            forgotten = []
            condemned = [write.pack.blake3 for write in change.packs if isinstance(write, CondemnPack)]
            self._delete([pack_key(digest) for digest in condemned])
            self._context.packs.mark_gone(self._call.tenant, condemned, mark_of(change), self._call.now)
            self._deleted |= set(condemned)

    def _delete(self, keys: Iterable[str]) -> None:
        if ordered := sorted(keys):
            self._context.objects.delete_many(self._call.tenant, CHECKPOINTS_BUCKET, ordered)

    def _without_record(self, records: Sequence[CheckpointRecord]) -> Iterator[tuple[int, str]]:
        """Steps and keys of manifests of which nothing can become a checkpoint any more, and nothing is one."""
        recorded = {record.manifest_key for record in records}
        listing = every_item(
            lambda cursor: self._context.objects.list(
                self._call.tenant, CHECKPOINTS_BUCKET, manifests_prefix(self._job.id), limit=1000, cursor=cursor
            )
        )
        for entry in listing:
            place = step_and_epoch(self._job.id, entry.key)
            if entry.key not in recorded and place is not None and past(self._job, *place):
                yield place[0], entry.key

    def _named_by(self, record: CheckpointRecord) -> set[str]:
        """The packs of a checkpoint that stays."""
        if record.legacy_key is not None:
            return set()
        if record.manifest_key not in self._known:
            self._known[record.manifest_key] = read_manifest(self._context, self._call, record).packs
        return {pack.blake3 for pack in self._known[record.manifest_key]}

    def _named_at(self, key: str) -> Sequence[Pack]:
        """The packs of a manifest that is to be deleted; none if nobody can read it any more."""
        if key not in self._known:
            data = self._context.objects.read(self._call.tenant, CHECKPOINTS_BUCKET, key)
            try:
                self._known[key] = parse_manifest(data).packs if data is not None else []
            except ValidationError:
                logger.warning("a manifest cannot be read; its packs stay", extra={"reason": key})
                self._known[key] = []
        return self._known[key]
