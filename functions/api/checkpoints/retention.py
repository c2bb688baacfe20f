"""Letting go of old checkpoints: the records by the policy, then the packs that nobody names any more."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from blake3 import blake3
from pydantic import ValidationError

from baton.contract.errors import ErrorCode
from baton.contract.manifest import Manifest, Pack, parse_manifest
from baton.contract.names import CHECKPOINTS_BUCKET
from functions.api.http.context import Context
from functions.api.http.paging import every_item
from functions.api.operations.sweeper import by_itself
from functions.api.worker.lease_guard import WRITE_TRIES
from functions.domain.checkpoints import packs as rules
from functions.domain.checkpoints.commit import past
from functions.domain.checkpoints.object_keys import (
    attempt_of,
    attempts_prefix,
    manifests_prefix,
    pack_key,
    parse_manifest_key,
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

MAX_FORGOTTEN = 50
"""Records in one transaction."""

JOBS_A_SWEEP = 20
LOOKED_AT = 200
"""Due jobs among which these are looked for: some may be changing, or be damaged, and must not hold up the others."""


def read_manifest(context: Context, job: Job, record: CheckpointRecord) -> Manifest:
    """The manifest of a committed checkpoint, verified; refuses if it is damaged.

    A manifest of another version is not damaged: reporting damage would make the job resume from an older checkpoint.
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
class Plan:
    """What retention will do: to be carried out once the job has been written as it was decided on."""

    forgotten: tuple[Delete, ...]
    packs: list[PackWrite]
    leaving: dict[str, set[str]]
    """Manifests that go, and the packs that must have gone before each."""
    zips: set[str]
    """What goes of an original client's checkpoints."""


class Retention:
    """Forget records; behind that let go of packs, delete their objects, then the manifests.

    The order is what makes it safe. A pack is let go only if its item is as it was read *before* the records were
    forgotten, and that raised the job's `rev`. So whoever commits the pack meanwhile either has read the job before,
    and loses his `rev`; or holds it anew, since no checkpoint names it, and the item is another. Whatever is
    interrupted leaves a manifest without a record behind, which says what is still to be deleted.
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
        """`job` as it is, or will be once what is being committed is written. `known`: what manifests name that need
        not be read. `ends_by`: until when the function may live that does this; by default it began at `now`."""
        self._context = context
        self._job = job
        self._now = now
        self._ends_by = now + FUNCTION_TIMEOUT_S if ends_by is None else ends_by
        self._known = dict(known or {})
        self._orphans: set[str] = set()
        """Manifests whose records are forgotten by now."""
        self._deleted: set[str] = set()
        """Packs."""
        self._more_at: int | None = None
        """When something can go that could not yet when the last plan was made."""

    def run(self, *, left_behind: bool = False) -> None:
        """All of it, behind a commit. A failure is logged, and made good later: the commit stands.

        `left_behind`: look also for manifests and zips that never became a checkpoint, or whose retention was
        interrupted, and for zips that a later attempt has stored anew.
        """
        with self._failures_logged():
            self._until_done(left_behind=left_behind)

    def run_at_end(self) -> bool:
        """All of it, and what is left behind, for a job that has ended: nobody comes after. False if it failed.

        What cannot go yet, because somebody reads it or something fails, is left to the sweeper: the job says when. A
        job that says nothing and of which nothing is left is not written.
        """
        again_at: int | None = next_try_at(self._job, self._now)
        done = False
        with self._failures_logged():
            self._until_done(left_behind=True)
            again_at, done = self._more_at, True
        with self._failures_logged():
            self._leave_word(again_at)
        return done

    def _leave_word(self, again_at: int | None) -> None:
        """Whoever has written the job since has left word himself, or has taken it up again."""
        if not self._job.state.terminal or self._job.retention_at == again_at:
            return
        with suppress(WriteConflict):
            self._context.jobs.apply(schedule_retention(self._job, again_at))

    def finish(self, plan: Plan) -> None:
        """Carry out a plan, once the job is written as it was made for. A failure is logged."""
        with self._failures_logged():
            if not self._carry_out(plan):
                self._job = self._context.jobs.get(self._job.id) or self._job
                self._until_done(left_behind=False)

    def _until_done(self, *, left_behind: bool) -> None:
        for _ in range(WRITE_TRIES):
            if self._run(left_behind=left_behind):
                return
            job = self._context.jobs.get(self._job.id)
            if job is None:
                return
            self._job = job
        raise Refusal(ErrorCode.CONFLICT, "The job or its packs are being changed by others all the time.")

    def _run(self, *, left_behind: bool) -> bool:
        """False if somebody else wrote in between."""
        plan = self.plan(checkpoints_of(self._context, self._job), left_behind=left_behind)
        if plan is None:
            return True
        change = rules.delete_records(self._job, plan.forgotten)
        try:
            self._context.jobs.apply(change)
        except WriteConflict:
            return False
        self._job = change.job
        return self._carry_out(plan)

    def plan(self, records: Sequence[CheckpointRecord], *, left_behind: bool = False) -> Plan | None:
        """What is to be done if these are the job's checkpoints; None for nothing. Changes nothing.

        Raises Refusal if the manifest of a checkpoint that stays cannot be read, and StorageUnavailable.
        """
        job, now = self._job, self._now
        policy = job.spec.policy.retention
        over = surplus(records, policy, current_step=job.checkpoint_step, in_history=job.in_history)
        free = [record for record in over if record.protected_until <= now]
        going = free[:MAX_FORGOTTEN]
        kept = [record for record in records if record not in going]
        leaving = self._orphans - {record.manifest_key for record in kept}
        leaving |= {record.manifest_key for record in going if record.legacy_key is None}
        protected = {record.step for record in records if record.protected_until > now}
        spared: set[str] = set()
        if left_behind or (going and protected):
            for step, key in self._without_record(records):
                # Who was given URLs for another branch's checkpoint of this step goes on reading it.
                (spared if step in protected else leaving).add(key)
        strays = self._stray_zips(records) if left_behind else set()
        read = {key for key in strays if zip_step(key) in protected}
        strays -= read
        waits = [*over, *(records if spared or read else ())]
        self._more_at = now if len(free) > len(going) else _free_at(waits, now)
        if not going and not leaving and not strays:
            return None
        still_named = {digest for record in kept for digest in self._named_by(record)}
        still_named |= {pack.blake3 for key in spared for pack in self._named_at(key)}
        named: dict[str, Pack] = {}
        by_manifest: dict[str, set[str]] = {}
        for key in leaving:
            packs = [pack for pack in self._named_at(key) if pack.blake3 not in still_named | self._deleted]
            by_manifest[key] = {pack.blake3 for pack in packs}
            named |= {pack.blake3: pack for pack in packs}
        # As they were moments ago will do: what has changed since is refused, and then read for certain.
        seen = self._context.packs.get_many(job.tenant, named, consistent=bool(self._orphans))
        kept_zips = {record.legacy_key for record in kept}
        sightings = [PackSnapshot(pack, seen.get(digest)) for digest, pack in named.items()]
        return Plan(
            forgotten=tuple(delete_checkpoint(job.id, record, now) for record in going),
            packs=rules.release_plan(job.id, sightings, self._ends_by),
            leaving=by_manifest,
            zips={record.legacy_key for record in going if record.legacy_key is not None} - kept_zips | strays,
        )

    def unnamed(
        self, held: Sequence[PackSnapshot], records: Sequence[CheckpointRecord], newest_step: int | None
    ) -> list[PackSnapshot]:
        """Those of the job's packs that none of its checkpoints names, as far as the manifests tell that a plan has
        read, or the newest one's: somebody may be just about to let go of them."""
        left = {one.pack.blake3: one for one in held}
        for record in records:
            if left and (record.manifest_key in self._known or record.step == newest_step):
                try:
                    named = self._named_by(record)
                except (Refusal, StorageUnavailable):
                    continue  # They are held once more, which costs a write each and needs no manifest.
                left = {digest: one for digest, one in left.items() if digest not in named}
        return list(left.values())

    def _carry_out(self, plan: Plan) -> bool:
        """False if packs have changed since they were read: another plan is needed for what names them."""
        self._orphans |= plan.leaving.keys()
        refused = self._context.packs.remove_references(self._job.tenant, self._job.id, plan.packs)
        condemned = {one.pack.blake3 for one in plan.packs if isinstance(one, CondemnPack)} - refused
        self._delete([pack_key(digest) for digest in condemned])
        self._deleted |= condemned
        done = {key for key, digests in plan.leaving.items() if not digests & refused}
        self._delete(done | plan.zips)
        self._orphans -= done
        return not refused

    @contextmanager
    def _failures_logged(self) -> Iterator[None]:
        try:
            yield
        except (Refusal, StorageUnavailable) as error:
            logger.warning("retention left something behind", extra={"job_id": self._job.id, "reason": str(error)})

    def _delete(self, keys: Iterable[str]) -> None:
        if ordered := sorted(keys):
            self._context.objects.delete_many(self._job.tenant, CHECKPOINTS_BUCKET, ordered)

    def _without_record(self, records: Sequence[CheckpointRecord]) -> Iterator[tuple[int, str]]:
        """Steps and keys of manifests of which nothing can become a checkpoint any more, and nothing is one."""
        recorded = {record.manifest_key for record in records}
        listing = every_item(
            lambda cursor: self._context.objects.list(
                self._job.tenant, CHECKPOINTS_BUCKET, manifests_prefix(self._job.id), limit=1000, cursor=cursor
            )
        )
        for entry in listing:
            place = parse_manifest_key(self._job.id, entry.key)
            if entry.key not in recorded and place is not None and past(self._job, *place):
                yield place[0], entry.key

    def _stray_zips(self, records: Sequence[CheckpointRecord]) -> set[str]:
        """Return the keys of original clients' zips that no checkpoint names, and no call can name any more.

        A zip is registered under its own attempt's fence only, and the attempts before the job's last one are over. The
        last one may come back as long as the job has not ended, even if its lease was revoked.
        """
        job, named = self._job, {record.legacy_key for record in records}
        last_over = job.epoch if job.state.terminal else job.epoch - 1
        listing = every_item(
            lambda cursor: self._context.objects.list(
                job.tenant, CHECKPOINTS_BUCKET, attempts_prefix(job.id), limit=1000, cursor=cursor
            )
        )
        over = [entry.key for entry in listing if (attempt_of(job.id, entry.key) or job.epoch + 1) <= last_over]
        return {key for key in over if key not in named and zip_step(key) is not None}

    def _named_by(self, record: CheckpointRecord) -> set[str]:
        """The packs of a committed checkpoint. Refuses if its manifest is damaged."""
        if record.legacy_key is not None:
            return set()
        if record.manifest_key not in self._known:
            self._known[record.manifest_key] = read_manifest(self._context, self._job, record).packs
        return {pack.blake3 for pack in self._known[record.manifest_key]}

    def _named_at(self, key: str) -> Sequence[Pack]:
        """The packs of a manifest that is to be deleted; none if nobody can read it any more."""
        if key not in self._known:
            data = self._context.objects.read(self._job.tenant, CHECKPOINTS_BUCKET, key)
            try:
                self._known[key] = parse_manifest(data).packs if data is not None else []
            except ValidationError:
                logger.warning("a manifest cannot be read; its packs stay", extra={"reason": key})
                self._known[key] = []
        return self._known[key]


def _free_at(records: Iterable[CheckpointRecord], now: int) -> int | None:
    """When nobody reads any of these checkpoints any more; None if nobody does now."""
    return max((one.protected_until for one in records if one.protected_until > now), default=None)


def checkpoints_of(context: Context, job: Job) -> list[CheckpointRecord]:
    """All that are committed, newest step first."""
    return list(every_item(lambda cursor: context.jobs.history(CheckpointRecord, job.id, limit=1000, cursor=cursor)))


def run_due_retentions(context: Context, began_at: int) -> int:
    """Let go of what ended jobs do not keep; answers with the number of jobs. `began_at`: when this function began.

    Each job says itself when it is to be looked at, and says so until everything is done: whatever ends this, a later
    sweep goes on.
    """
    ends_by = began_at + SWEEPER_TIMEOUT_S
    done = 0
    for job_id in context.jobs.due_retentions(began_at, limit=LOOKED_AT):
        if done == JOBS_A_SWEEP or context.clock.now() > ends_by - FUNCTION_TIMEOUT_S:
            break
        done += by_itself(job_id, _run, context, job_id, ends_by)
    return done


def _run(context: Context, job_id: str, ends_by: int) -> bool:
    """False if nothing is due: the index may be behind."""
    now = context.clock.now()
    job = context.jobs.get(job_id)
    if job is None or job.retention_at is None or job.retention_at > now:
        return False
    return Retention(context, job, now, ends_by=ends_by).run_at_end()
