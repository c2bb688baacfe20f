"""Retention: delete checkpoint records by the policy, then the packs that no manifest references any more.

The sweeper runs the retention of jobs that ended without a last call of their worker: stopped, timed out, or failed.
That retention runs an hour after the end (`retention.LATE_AFTER_S`). By then no call and no upload of the last attempt
is in progress, and a user who stopped the job for a change has retried the job.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from blake3 import blake3
from pydantic import ValidationError

from baton.contract.checkpoints.manifest import Manifest, Pack, parse_manifest
from baton.contract.errors import ErrorCode
from baton.contract.names import CHECKPOINTS_BUCKET
from functions.api.http.context import Context
from functions.api.http.paging import iterate_items
from functions.api.operations.sweeper import run_isolated
from functions.api.worker.lease_guard import WRITE_TRIES
from functions.domain.checkpoints import packs as rules
from functions.domain.checkpoints.commit import past
from functions.domain.checkpoints.object_keys import (
    attempt_of,
    attempts_prefix,
    manifests_prefix,
    pack_key,
    parse_manifest_key,
    relay_prefix,
    zip_step,
)
from functions.domain.checkpoints.packs import (
    FUNCTION_TIMEOUT_S,
    SWEEPER_TIMEOUT_S,
    CondemnPack,
    PackSnapshot,
    PackWrite,
)
from functions.domain.checkpoints.retention import next_try_at, schedule_retention, surplus
from functions.domain.errors import Refusal, StorageUnavailable, WriteConflict
from functions.domain.jobs.transaction import Delete, delete_checkpoint
from functions.domain.records import CheckpointRecord, Job

logger = logging.getLogger("baton.checkpoints")

MAX_DELETED_RECORDS = 50
"""Limit of the records that one transaction deletes."""

JOBS_A_SWEEP = 20
DUE_JOBS_READ = 200
"""Due jobs read by one sweep, because some may change or be damaged and must not block the others."""


def read_manifest(context: Context, job: Job, record: CheckpointRecord) -> Manifest:
    """Read and verify the manifest of a committed checkpoint; refuse a damaged manifest.

    A manifest of another version does not count as damaged, since a damage report would lose the checkpoint.
    """
    data = context.objects.read(job.tenant, CHECKPOINTS_BUCKET, record.manifest_key)
    if data is None or blake3(data).hexdigest() != record.manifest_blake3:
        raise Refusal(
            ErrorCode.CHECKPOINT_NOT_FOUND, f"The manifest of step {record.step} is damaged or gone.", field="step"
        )
    try:
        return parse_manifest(data)
    except ValidationError as error:
        raise Refusal(
            ErrorCode.UNAVAILABLE,
            f"The manifest of step {record.step} has a version that this control plane cannot read; "
            "use the release that committed the checkpoint.",
            field="step",
        ) from error


@dataclass(frozen=True)
class DeletionPlan:
    """Deletions of a retention run, to execute after the write of the job from which the plan was made."""

    records: tuple[Delete, ...]
    packs: list[PackWrite]
    packs_by_manifest: dict[str, set[str]]
    """Manifests to delete, and the packs to delete before each manifest."""
    zips: set[str]
    """Zips of original clients to delete."""


class RetentionRunner:
    """Runner of a job's retention: delete records, then references to packs, then objects, then manifests.

    The order makes concurrent commits and interruptions safe. A reference to a pack is removed only if the pack's item
    is as it was *before* the deletion of the records, which raised the job's `rev`. A commit of the same pack either
    has read the job before, and fails on the `rev`; or adds a reference, since no checkpoint names the pack, and
    thereby changes the item. An interruption leaves a manifest without a record, from which a later run continues.
    """

    def __init__(
        self,
        context: Context,
        job: Job,
        now: int,
        known: Mapping[str, Sequence[Pack]] | None = None,
        *,
        ends_by: int | None = None,
    ) -> None:
        """`job`: the job as stored, or as the commit in progress will write the job. `known`: packs by manifest, for
        manifests that need no read. `ends_by`: the end of this function's time; by default the function began at
        `now`."""
        self._context = context
        self._job = job
        self._now = now
        self._ends_by = now + FUNCTION_TIMEOUT_S if ends_by is None else ends_by
        self._known = dict(known or {})
        self._orphans: set[str] = set()
        """Manifests whose records this run has deleted."""
        self._deleted: set[str] = set()
        """Packs whose objects this run has deleted."""
        self._more_at: int | None = None
        """Time at which checkpoints that the last plan had to keep can be deleted; None: nothing is pending."""

    def run(self, *, left_behind: bool = False) -> None:
        """Run retention after a commit. After a logged failure a later run continues; the commit remains valid.

        `left_behind`: delete also manifests and zips that never became a checkpoint or whose retention was interrupted,
        and zips that a later attempt has stored again.
        """
        with self._log_failures():
            self._run_until_done(left_behind=left_behind)

    def run_at_job_end(self) -> bool:
        """Run retention for an ended job, including `left_behind`. Returns False after a failure.

        The sweeper later deletes objects that a client still reads or that a failure left: `retention_at` of the job is
        the time of that run. A job without `retention_at` and without a pending deletion is not written.
        """
        again_at: int | None = next_try_at(self._job, self._now)
        done = False
        with self._log_failures():
            self._run_until_done(left_behind=True)
            self._delete_relayed()
            again_at, done = self._more_at, True
        with self._log_failures():
            self._schedule_next_run(again_at)
        return done

    def _schedule_next_run(self, again_at: int | None) -> None:
        """Write `retention_at`. After a conflict the other writer has set the time, or has retried the job."""
        if not self._job.state.terminal or self._job.retention_at == again_at:
            return
        with suppress(WriteConflict):
            self._context.jobs.apply(schedule_retention(self._job, again_at))

    def execute_plan(self, plan: DeletionPlan) -> None:
        """Execute a plan after the write of the job for which the plan was made. A failure is logged."""
        with self._log_failures():
            if not self._execute(plan):
                self._job = self._context.jobs.get(self._job.id) or self._job
                self._run_until_done(left_behind=False)

    def _run_until_done(self, *, left_behind: bool) -> None:
        for _ in range(WRITE_TRIES):
            if self._run(left_behind=left_behind):
                return
            job = self._context.jobs.get(self._job.id)
            if job is None:
                return
            self._job = job
        raise Refusal(ErrorCode.CONFLICT, f"Other calls changed the job or its packs during all {WRITE_TRIES} tries.")

    def _run(self, *, left_behind: bool) -> bool:
        """Plan, write and execute once; return False after a conflicting write."""
        plan = self.plan(read_checkpoints(self._context, self._job), left_behind=left_behind)
        if plan is None:
            return True
        change = rules.delete_records(self._job, plan.records)
        try:
            self._context.jobs.apply(change)
        except WriteConflict:
            return False
        self._job = change.job
        return self._execute(plan)

    def plan(self, records: Sequence[CheckpointRecord], *, left_behind: bool = False) -> DeletionPlan | None:
        """Return the deletions for a job with these checkpoints, without writing; None without deletions.

        Raises Refusal if the manifest of a kept checkpoint cannot be read, and StorageUnavailable.
        """
        job, now = self._job, self._now
        policy = job.spec.policy.retention
        over = surplus(records, policy, current_step=job.checkpoint_step, in_history=job.in_history)
        free = [record for record in over if record.protected_until <= now]
        expired = free[:MAX_DELETED_RECORDS]
        kept = [record for record in records if record not in expired]
        manifests = self._orphans - {record.manifest_key for record in kept}
        manifests |= {record.manifest_key for record in expired if record.legacy_key is None}
        protected = {record.step for record in records if record.protected_until > now}
        spared: set[str] = set()
        if left_behind or (expired and protected):
            for step, key in self._find_orphan_manifests(records):
                # A client may still read another branch's checkpoint of a protected step.
                (spared if step in protected else manifests).add(key)
        strays = self._find_stray_zips(records) if left_behind else set()
        read = {key for key in strays if zip_step(key) in protected}
        strays -= read
        waits = [*over, *(records if spared or read else ())]
        self._more_at = now if len(free) > len(expired) else _find_release_time(waits, now)
        if not expired and not manifests and not strays:
            return None
        still_named = {digest for record in kept for digest in self._read_referenced(record)}
        still_named |= {pack.blake3 for key in spared for pack in self._read_manifest_packs(key)}
        named: dict[str, Pack] = {}
        by_manifest: dict[str, set[str]] = {}
        for key in manifests:
            packs = [pack for pack in self._read_manifest_packs(key) if pack.blake3 not in still_named | self._deleted]
            by_manifest[key] = {pack.blake3 for pack in packs}
            named |= {pack.blake3: pack for pack in packs}
        # An eventually consistent read suffices first: the store refuses the write of a changed item, and the next
        # plan reads consistently.
        seen = self._context.packs.get_many(job.tenant, named, consistent=bool(self._orphans))
        kept_zips = {record.legacy_key for record in kept}
        snapshots = [PackSnapshot(pack, seen.get(digest)) for digest, pack in named.items()]
        return DeletionPlan(
            records=tuple(delete_checkpoint(job.id, record, now) for record in expired),
            packs=rules.release_plan(job.id, snapshots, self._ends_by),
            packs_by_manifest=by_manifest,
            zips={record.legacy_key for record in expired if record.legacy_key is not None} - kept_zips | strays,
        )

    def find_unreferenced(
        self, referenced: Sequence[PackSnapshot], records: Sequence[CheckpointRecord], newest_step: int | None
    ) -> list[PackSnapshot]:
        """Return the referenced packs that no known manifest of the job names.

        Retention may be about to remove the references to such packs. Known are the manifests that a plan has read, and
        the newest manifest.
        """
        left = {one.pack.blake3: one for one in referenced}
        for record in records:
            if left and (record.manifest_key in self._known or record.step == newest_step):
                try:
                    named = self._read_referenced(record)
                except (Refusal, StorageUnavailable):
                    continue  # The commit adds the references again, at the cost of a write for each pack.
                left = {digest: one for digest, one in left.items() if digest not in named}
        return list(left.values())

    def _execute(self, plan: DeletionPlan) -> bool:
        """Execute the plan; return False if packs have changed since the read, so that the job needs another plan."""
        self._orphans |= plan.packs_by_manifest.keys()
        refused = self._context.packs.remove_references(self._job.tenant, self._job.id, plan.packs)
        condemned = {one.pack.blake3 for one in plan.packs if isinstance(one, CondemnPack)} - refused
        self._delete([pack_key(digest) for digest in condemned])
        self._deleted |= condemned
        done = {key for key, digests in plan.packs_by_manifest.items() if not digests & refused}
        self._delete(done | plan.zips)
        self._orphans -= done
        return not refused

    @contextmanager
    def _log_failures(self) -> Iterator[None]:
        try:
            yield
        except (Refusal, StorageUnavailable) as error:
            logger.warning("retention left something behind", extra={"job_id": self._job.id, "reason": str(error)})

    def _delete(self, keys: Iterable[str]) -> None:
        if ordered := sorted(keys):
            self._context.objects.delete_many(self._job.tenant, CHECKPOINTS_BUCKET, ordered)

    def _delete_relayed(self) -> None:
        """Delete what nodes of an elastic job have sent each other, and no node has read."""
        while self._job.spec.nodes is not None:
            page = self._context.objects.list(
                self._job.tenant, CHECKPOINTS_BUCKET, relay_prefix(self._job.id), limit=1000
            )
            self._delete(one.key for one in page.items)
            if page.cursor is None:
                return

    def _find_orphan_manifests(self, records: Sequence[CheckpointRecord]) -> Iterator[tuple[int, str]]:
        """Yield steps and keys of manifests that are no checkpoint and can no longer become a checkpoint."""
        recorded = {record.manifest_key for record in records}
        listing = iterate_items(
            lambda cursor: self._context.objects.list(
                self._job.tenant, CHECKPOINTS_BUCKET, manifests_prefix(self._job.id), limit=1000, cursor=cursor
            )
        )
        for entry in listing:
            place = parse_manifest_key(self._job.id, entry.key)
            if entry.key not in recorded and place is not None and past(self._job, *place):
                yield place[0], entry.key

    def _find_stray_zips(self, records: Sequence[CheckpointRecord]) -> set[str]:
        """Return the keys of original clients' zips that no checkpoint names, and that no call can register any more.

        Only the zip's own attempt can register the zip, and the attempts before the job's last attempt are over. The
        last attempt may return until the job ends, even after the revocation of its lease.
        """
        job, named = self._job, {record.legacy_key for record in records}
        last_over = job.epoch if job.state.terminal else job.epoch - 1
        listing = iterate_items(
            lambda cursor: self._context.objects.list(
                job.tenant, CHECKPOINTS_BUCKET, attempts_prefix(job.id), limit=1000, cursor=cursor
            )
        )
        over = [entry.key for entry in listing if (attempt_of(job.id, entry.key) or job.epoch + 1) <= last_over]
        return {key for key in over if key not in named and zip_step(key) is not None}

    def _read_referenced(self, record: CheckpointRecord) -> set[str]:
        """Return the digests of the packs of a committed checkpoint; refuse a damaged manifest."""
        if record.legacy_key is not None:
            return set()
        if record.manifest_key not in self._known:
            self._known[record.manifest_key] = read_manifest(self._context, self._job, record).packs
        return {pack.blake3 for pack in self._known[record.manifest_key]}

    def _read_manifest_packs(self, key: str) -> Sequence[Pack]:
        """Return the packs of a manifest to delete; empty for an unreadable manifest."""
        if key not in self._known:
            data = self._context.objects.read(self._job.tenant, CHECKPOINTS_BUCKET, key)
            try:
                self._known[key] = parse_manifest(data).packs if data is not None else []
            except ValidationError:
                logger.warning("a manifest cannot be read; its packs stay", extra={"reason": key})
                self._known[key] = []
        return self._known[key]


def _find_release_time(records: Iterable[CheckpointRecord], now: int) -> int | None:
    """Return the time at which the protection of all these checkpoints ends; None without a protected checkpoint."""
    return max((one.protected_until for one in records if one.protected_until > now), default=None)


def read_checkpoints(context: Context, job: Job) -> list[CheckpointRecord]:
    """Read all committed checkpoints of a job, newest step first."""
    return list(iterate_items(lambda cursor: context.jobs.history(CheckpointRecord, job.id, limit=1000, cursor=cursor)))


def run_due_retentions(context: Context, began_at: int) -> int:
    """Run the due retentions of ended jobs; return the number of jobs. `began_at`: the start of this function.

    A job keeps its `retention_at` until its retention is complete, so a later sweep continues after an interruption.
    """
    ends_by = began_at + SWEEPER_TIMEOUT_S
    done = 0
    for job_id in context.jobs.due_retentions(began_at, limit=DUE_JOBS_READ):
        if done == JOBS_A_SWEEP or context.clock.now() > ends_by - FUNCTION_TIMEOUT_S:
            break
        done += run_isolated(job_id, _run, context, job_id, ends_by)
    return done


def _run(context: Context, job_id: str, ends_by: int) -> bool:
    """Run a job's retention if due; return False otherwise, because the index may be behind."""
    now = context.clock.now()
    job = context.jobs.get(job_id)
    if job is None or job.retention_at is None or job.retention_at > now:
        return False
    return RetentionRunner(context, job, now, ends_by=ends_by).run_at_job_end()
