"""The claim of a job: one query and one transaction without competing claims."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from baton.contract.worker.calls import WorkQuery
from functions.api.operations.sweeper import run_due_timers
from functions.domain.errors import FenceBroken, WriteConflict
from functions.domain.jobs import transitions as rules
from functions.domain.jobs.job_selection import SMALLEST_WINDOW, ClaimWindow, select_suitable, with_claimant, with_rings
from functions.domain.jobs.transaction import OpenLease
from functions.domain.ports import JobStore, Randomness
from functions.domain.records import Attempt, Claimant, Job, Lease

MAX_CONFLICTS = 16
"""Conflicts in one call after which the answer is an empty list; the worker repeats the claim soon."""

MAX_CANDIDATES = 5000
"""Limit of the jobs of a shard that a claim reads to find a job for the worker."""

LARGEST_PAGE = 500
PAGE_GROWTH = 4


@dataclass(frozen=True)
class ClaimedJob:
    """A job that the calling worker has claimed."""

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
    tags: Mapping[str, str]

    def find_suitable(self, shard: int, first_page: int) -> list[Job]:
        """Return the suitable jobs of the shard's first page with a suitable job; empty without such a page."""
        limit, cursor, seen = first_page, None, 0
        while seen < MAX_CANDIDATES:
            page = self.jobs.ready(self.tenant, self.worker.queue, shard, limit=limit, cursor=cursor)
            found = select_suitable(page.items, self.worker, self.now)
            if self.tags:
                found = [job for job in found if self.tags.items() <= job.spec.tags.items()]
            if self.original:
                # The original's workers run jobs in the original's form only.
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
    tags: Mapping[str, str],
    ring_token_sha256: str | None = None,
    shards: int,
    now: int,
    random: Randomness,
    window: ClaimWindow,
    claimant: Claimant | None = None,
) -> ClaimedJob | None:
    """Claim the best job for this worker, at random among equals; None without a suitable job.

    `token_sha256`: digest of the lease token; None for a worker of the original orchestrator. `tags`: of the only jobs
    to choose from. `ring_token_sha256`: digest of the token for the job's rings. `claimant`: the identity of a worker
    without a lease token. Without a ready job the claim runs due timers of the queue, and tries again. Ranks are
    compared within a shard; the first shard is random.

    A claim does not revoke expired leases: the index of leases shows nearly all live leases, and a claim has no time to
    read all leases. The sweeper revokes expired leases.
    """
    search = _Search(jobs=jobs, worker=worker, tenant=tenant, now=now, original=token_sha256 is None, tags=tags)

    def claim_from(shard: int) -> ClaimedJob | None:
        for _ in range(MAX_CONFLICTS):
            candidates = search.find_suitable(shard, window.size)
            if not candidates:
                return None
            job = _with_checkpoint(jobs, window.choose(candidates, random.below))
            change = rules.claim(job, worker, token_sha256=token_sha256, key_id=key_id, now=now)
            change = with_claimant(with_rings(change, ring_token_sha256), claimant)
            assert change.attempt is not None and isinstance(change.lease, OpenLease)
            try:
                jobs.apply(change)
            except (WriteConflict, FenceBroken):
                window.widen()
                continue
            window.narrow()
            return ClaimedJob(change.job, change.attempt, change.lease.lease)
        return None

    def claim_from_any() -> ClaimedJob | None:
        claims = (claim_from(shard) for shard in _order_shards(shards, random))
        return next((claimed for claimed in claims if claimed is not None), None)

    claimed = claim_from_any()
    if claimed is None and run_due_timers(jobs, tenant=tenant, queue=worker.queue, now=now):
        claimed = claim_from_any()
    return claimed


def _with_checkpoint(jobs: JobStore, job: Job) -> Job:
    """Return a seat with the newest checkpoint of its elastic job, which the attempt resumes; others unchanged."""
    elastic = jobs.get(job.spec.seat.job) if job.spec.seat is not None else None
    return job if elastic is None else job.model_copy(update={"checkpoint_step": elastic.checkpoint_step})


def peek_next(
    jobs: JobStore,
    worker: WorkQuery,
    *,
    tenant: str,
    tags: Mapping[str, str],
    shards: int,
    now: int,
    original: bool,
) -> Job | None:
    """Return a job that a claim might take now, without claiming the job; None without a suitable job."""
    search = _Search(jobs=jobs, worker=worker, tenant=tenant, now=now, original=original, tags=tags)
    found = [job for shard in range(shards) for job in search.find_suitable(shard, SMALLEST_WINDOW)[:1]]
    return min(found, key=lambda job: job.ready_rank, default=None)


def _order_shards(shards: int, random: Randomness) -> Iterator[int]:
    """Return all shards in order, from a random shard on."""
    first = random.below(shards) if shards > 1 else 0
    return ((first + offset) % shards for offset in range(shards))
