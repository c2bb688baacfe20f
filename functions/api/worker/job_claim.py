"""Handing out work: the claim that costs one Query and one transaction when nobody interferes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from baton.contract.work import WorkQuery
from functions.api.operations.sweeper import run_due_timers
from functions.domain.errors import FenceBroken, WriteConflict
from functions.domain.jobs import transitions as rules
from functions.domain.jobs.job_selection import SMALLEST_WINDOW, ClaimWindow, select_suitable, with_claimant, with_rings
from functions.domain.jobs.transaction import OpenLease
from functions.domain.ports import JobStore, Randomness
from functions.domain.records import Attempt, Claimant, Job, Lease

MAX_CONFLICTS = 16
"""Lost races in one call, after which the worker is told that there is nothing: it asks again soon."""

MAX_CANDIDATES = 5000
"""Jobs that do not suit a worker are passed over up to this number in a shard."""

LARGEST_PAGE = 500
PAGE_GROWTH = 4


@dataclass(frozen=True)
class Claimed:
    """A job that now belongs to the worker that asked."""

    job: Job
    attempt: Attempt
    lease: Lease


@dataclass(frozen=True, kw_only=True)
class _Search:
    jobs: JobStore
    worker: WorkQuery
    tenant: str
    now: int
    original: bool
    claimant: Claimant | None = None

    def fitting(self, shard: int, first_page: int) -> list[Job]:
        """Jobs of the first page of the shard that holds any for this worker; none if there are none."""
        limit, cursor, seen = first_page, None, 0
        while seen < MAX_CANDIDATES:
            page = self.jobs.ready(self.tenant, self.worker.queue, shard, limit=limit, cursor=cursor)
            found = select_suitable(page.items, self.worker, self.now)
            if self.original:
                # The original orchestrator's workers know one kind of job, and nothing of commands.
                found = [job for job in found if job.spec.dreambooth is not None]
            if found or page.cursor is None:
                return found
            seen += len(page.items)
            cursor = page.cursor
            limit = min(limit * PAGE_GROWTH, LARGEST_PAGE, MAX_CANDIDATES - seen)
        return []


def claim_next(
    jobs: JobStore,
    worker: WorkQuery,
    *,
    tenant: str,
    key_id: str | None,
    token_sha256: str | None,
    ring_token_sha256: str | None = None,
    shards: int,
    now: int,
    random: Randomness,
    window: ClaimWindow,
    claimant: Claimant | None = None,
) -> Claimed | None:
    """Claim the best job for this worker, by chance among equals; None if there is nothing for it.

    `token_sha256`: digest of the lease token; None for a worker of the original orchestrator. `ring_token_sha256`: of
    the token for the rings that the job may name. `claimant`: of a worker without a lease token. When nothing is ready,
    jobs of the queue whose backoff is over are made ready first. Ranks are compared within a shard; the shard to begin
    with is drawn by chance.

    Jobs of lost machines are the sweeper's: the index of leases shows nearly all live ones, and a claim cannot read
    them all to find the lost ones.
    """
    search = _Search(jobs=jobs, worker=worker, tenant=tenant, now=now, original=token_sha256 is None, claimant=claimant)

    def from_any_shard() -> Claimed | None:
        for shard in _from_random(shards, random):
            claimed = _claim_from(
                search,
                shard,
                key_id=key_id,
                token_sha256=token_sha256,
                ring_token_sha256=ring_token_sha256,
                random=random,
                window=window,
            )
            if claimed is not None:
                return claimed
        return None

    claimed = from_any_shard()
    if claimed is None and run_due_timers(jobs, tenant=tenant, queue=worker.queue, now=now):
        claimed = from_any_shard()
    return claimed


def peek_next(jobs: JobStore, worker: WorkQuery, *, tenant: str, shards: int, now: int, original: bool) -> Job | None:
    """A job that a claim might get now. Changes nothing; None if nothing is ready for this worker."""
    search = _Search(jobs=jobs, worker=worker, tenant=tenant, now=now, original=original)
    found = [job for shard in range(shards) for job in search.fitting(shard, SMALLEST_WINDOW)[:1]]
    return min(found, key=lambda job: job.ready_rank, default=None)


def _claim_from(
    search: _Search,
    shard: int,
    *,
    key_id: str | None,
    token_sha256: str | None,
    ring_token_sha256: str | None,
    random: Randomness,
    window: ClaimWindow,
) -> Claimed | None:
    for _ in range(MAX_CONFLICTS):
        candidates = search.fitting(shard, window.size)
        if not candidates:
            return None
        job = window.choose(candidates, random.below)
        change = rules.claim(job, search.worker, token_sha256=token_sha256, key_id=key_id, now=search.now)
        change = with_claimant(with_rings(change, ring_token_sha256), search.claimant)
        assert change.attempt is not None and isinstance(change.lease, OpenLease)
        try:
            search.jobs.apply(change)
        except (WriteConflict, FenceBroken):
            window.widen()
            continue
        window.narrow()
        return Claimed(change.job, change.attempt, change.lease.lease)
    return None


def _from_random(shards: int, random: Randomness) -> Iterator[int]:
    """All shards, beginning anywhere."""
    first = random.below(shards) if shards > 1 else 0
    return ((first + offset) % shards for offset in range(shards))
