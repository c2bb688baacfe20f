"""Test one random life of a few jobs on the twins and on the emulated cloud: equal outcomes, equal reads."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from baton.contract.jobs.job import FailureClass, JobState, Reason
from baton.contract.jobs.policy import Policy
from baton.contract.worker.calls import FailRequest, WorkQuery
from functions.api.operations.sweeper import run_timer, sweep
from functions.api.worker.job_claim import claim_next
from functions.domain.checkpoints import commit as checkpoint_rules
from functions.domain.checkpoints import packs
from functions.domain.errors import FenceBroken, Refusal, WriteConflict
from functions.domain.jobs import transitions as rules
from functions.domain.jobs.attempt_end import LATE_AFTER_S
from functions.domain.jobs.job_selection import ClaimWindow
from functions.domain.jobs.lease_fence import Fence
from functions.domain.jobs.transaction import Transaction, delete_checkpoint
from functions.domain.records import Attempt, CheckpointRecord, Event, Job, TransferGrant
from tests.conformance.store_kit import NOW, TENANT, progress_at, submission
from tests.kits.api.fakes import FakeClock, SeededRandomness
from tests.kits.clouds.store_sets import Cloud, memory_cloud

STEPS = 350
POLICY = Policy(
    backoff_s=20, heartbeat_interval_s=10, max_failures=9, max_interruptions=40, avoid_machine_s=50, max_node_faults=9
)


@dataclass
class Life:
    """A run of random calls on one store; seed and answers of the store determine every draw."""

    cloud: Cloud
    seed: int
    now: int = NOW
    old: list[Job] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    log: list[tuple[str, object]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.chance = SeededRandomness(self.seed + 1)
        self.window = ClaimWindow()

    def run(self) -> None:
        acts: list[Callable[[], object]] = [
            self.submit,
            self.claim,
            self.claim,
            self.heartbeat,
            self.heartbeat,
            self.commit,
            self.end,
            self.end,
            self.command,
            self.sweep,
            self.time,
            self.protect,
            self.redeem,
        ]
        for _ in range(STEPS):
            act = self.random.choice(acts)
            outcome: object
            try:
                outcome = act()
            except (Refusal, WriteConflict, FenceBroken) as refused:
                found = refused.lease if isinstance(refused, FenceBroken) else None
                outcome = (type(refused).__name__, getattr(refused, "code", None), found)
            self.log.append((act.__name__, outcome))

    def any_job(self) -> Job | None:
        """A job as it is, or as it was some time ago."""
        if not self.old:
            return None
        job = self.random.choice(self.old[-30:])
        return job if self.random.random() < 0.2 else self.cloud.jobs.get(job.id)

    def any_running(self) -> Job | None:
        jobs = self.cloud.jobs.list_jobs(TENANT, state=JobState.RUNNING, limit=20).items
        return self.random.choice(jobs) if jobs else self.any_job()

    def apply(self, change: Transaction) -> Job:
        self.cloud.jobs.apply(change)
        self.old.append(change.job)
        return change.job

    def fence(self, job: Job) -> Fence:
        lease = self.cloud.leases.get(job.id)
        token = lease.token_sha256 if lease and self.random.random() < 0.9 else "0" * 64
        epoch = self.random.choice([None, job.epoch, job.epoch, job.epoch - 1])
        return Fence(job_id=job.id, tenant=TENANT, now=self.now, epoch=epoch, token_sha256=token, machine_id="m-1")

    def submit(self) -> object:
        policy = POLICY
        if self.random.random() < 0.2:
            policy = policy.model_copy(update={"deadline_at": self.now + self.random.randrange(1, 200)})
        return self.apply(
            submission(
                job_id=self.chance.job_id(),
                policy=policy,
                priority=self.random.choice([10, 50]),
                shard=self.random.randrange(2),
                now=self.now,
            )
        )

    def claim(self) -> object:
        claimed = claim_next(
            self.cloud.jobs,
            WorkQuery(machine_id=self.random.choice(["m-1", "m-2"])),
            tenant=TENANT,
            key_id="k",
            token_sha256=self.chance.token(),
            tags={},
            shards=2,
            now=self.now,
            random=self.chance,
            window=self.window,
        )
        if claimed is None:
            return None
        self.old.append(claimed.job)
        return claimed.job, claimed.attempt, claimed.lease

    def heartbeat(self) -> object:
        job = self.any_running()
        if job is None:
            return None
        progress = progress_at(self.random.randrange(10**6), self.now) if self.random.random() < 0.5 else None
        return self.cloud.leases.heartbeat(self.fence(job), progress, self.random.choice([None, "training"]))

    def commit(self) -> object:
        job = self.any_running()
        attempt = self.cloud.jobs.read(Attempt, job.id, job.epoch) if job else None
        if job is None or attempt is None:
            return None
        step = (job.checkpoint_step or 0) + self.random.randrange(0, 3)
        record = CheckpointRecord(
            step=step,
            epoch=job.epoch,
            committed_at=self.now,
            num_files=1,
            total_bytes=step,
            metrics={"loss": self.random.random()},
            manifest_key="m",
        )
        return self.apply(checkpoint_rules.commit(job, self.fence(job), record, now=self.now))

    def end(self) -> object:
        job = self.any_running()
        attempt = self.cloud.jobs.read(Attempt, job.id, job.epoch) if job else None
        if job is None or attempt is None:
            return None
        fence = self.fence(job)
        how = self.random.randrange(4)
        if how == 0:
            change = rules.complete(job, attempt, fence, artifacts=[], progress=None, now=self.now)
        elif how == 1:
            failure = self.random.choice(list(FailureClass))
            report = FailRequest(job_id=job.id, machine_id="m-1", failure_class=failure, log_tail=["\u00fc"])
            change = rules.fail(job, attempt, fence, report, progress=None, now=self.now)
        else:
            change = rules.release(job, attempt, fence, reason=Reason(code="sigterm"), progress=None, now=self.now)
        return self.apply(change)

    def command(self) -> object:
        job = self.any_job()
        if job is None:
            return None
        attempt = self.cloud.jobs.read(Attempt, job.id, job.epoch)
        how = self.random.randrange(5)
        if how == 0:
            return self.apply(rules.cancel(job, attempt, message="", now=self.now))
        if how == 1:
            return self.apply(rules.pause(job, message="", now=self.now))
        if how == 2:
            return self.apply(rules.resume(job, now=self.now))
        if how == 3 and job.state is JobState.RUNNING and attempt is not None:
            lease = self.cloud.leases.get(job.id)
            assert lease is not None
            return self.apply(rules.interrupt(job, attempt, lease, now=self.now))
        return self.apply(rules.retry(job, chosen=None, keep_checkpoint=True, reset_counters=True, now=self.now))

    def sweep(self) -> object:
        if self.random.random() < 0.5:
            return sweep(self.cloud.jobs, self.cloud.leases, FakeClock(self.now), page=3)
        due = self.cloud.jobs.due_timers(self.now, limit=2)
        return due, [run_timer(self.cloud.jobs, job_id, self.now) for job_id in due]

    def time(self) -> object:
        self.now += self.random.choice([1, 5, 20, 31, 200])
        return self.now

    def protect(self) -> object:
        job = self.any_job()
        if job is None:
            return None
        records = self.cloud.jobs.history(CheckpointRecord, job.id, limit=2).items
        if not records:
            return None
        record = self.random.choice(records)
        if self.random.random() < 0.6:
            return self.cloud.jobs.protect_checkpoint(job.id, record.step, self.now + 40)
        return self.apply(packs.delete_records(job, [delete_checkpoint(job.id, record, self.now)]))

    def redeem(self) -> object:
        if not self.tokens or self.random.random() < 0.4:
            grant = TransferGrant(
                token_sha256=self.chance.token(),
                purpose="download",
                tenant=TENANT,
                bucket="training-data",
                key="k",
                expires_at=self.now + 30,
            )
            self.cloud.tokens.put_grant(grant)
            self.tokens.append(grant.token_sha256)
        return self.cloud.tokens.redeem(self.random.choice(self.tokens), self.now)

    def readings(self) -> dict[str, object]:
        """Return everything that the stores let a caller read at the end of a run."""
        jobs, leases = self.cloud.jobs, self.cloud.leases
        ids = sorted({job.id for job in self.old})
        found: dict[str, object] = {
            "jobs": jobs.get_many(ids),
            "leases": leases.get_many(ids),
            "due": list(leases.due_pages(self.now + 400, size=7)),
            "watch": leases.reclaim_watermark(),
            "timers": jobs.due_timers(self.now + 400, limit=100),
            "retentions": jobs.due_retentions(self.now + LATE_AFTER_S, limit=100),
            "grants": [self.cloud.tokens.get_grant(token) for token in self.tokens],
        }
        for shard in range(2):
            found[f"ready {shard}"] = jobs.ready(TENANT, "default", shard, limit=7)
        for state in (None, *JobState):
            found[f"list {state}"] = jobs.list_jobs(TENANT, state=state, limit=5)
            found[f"newest {state}"] = jobs.list_jobs(TENANT, state=state, limit=5, newest_first=True)
        for job_id in ids:
            found[f"history {job_id}"] = (
                jobs.history(Event, job_id, limit=1000),
                jobs.history(Attempt, job_id, limit=1000),
                jobs.history(CheckpointRecord, job_id, limit=1000),
            )
        for index in ("ready", "timers", "due", "by_tenant", "by_state"):
            found[f"index {index}"] = self.cloud.members(index)
        return found


# Lives that meet all that is asked for below: a command that comes too late is rare.
@pytest.mark.parametrize("seed", [2, 3, 5])
def test_both_stores_live_the_same_life(ministack: Cloud, seed: int) -> None:
    twin, real = Life(memory_cloud(), seed), Life(ministack, seed)
    twin.run()
    real.run()
    for number, (expected, got) in enumerate(zip(twin.log, real.log, strict=True)):
        assert got == expected, f"step {number}"
    expected_readings, readings = twin.readings(), real.readings()
    for name, expected_reading in expected_readings.items():
        assert readings[name] == expected_reading, name
    check_indexes(twin)
    outcomes = Counter(
        (act, outcome[0] if isinstance(outcome, tuple) and isinstance(outcome[0], str) else outcome is not None)
        for act, outcome in twin.log
    )
    # The lives must meet refusals of all kinds, or they would prove little.
    for needed in (("claim", True), ("heartbeat", True), ("heartbeat", "FenceBroken"), ("commit", True)):
        assert outcomes[needed] >= 5, outcomes
    for needed in (("end", True), ("end", "FenceBroken"), ("command", "Refusal"), ("command", "WriteConflict")):
        assert outcomes[needed] >= 1, outcomes


def check_indexes(life: Life) -> None:
    """Sparse indexes hold exactly what the rules say."""
    jobs = life.cloud.jobs.get_many(sorted({job.id for job in life.old}))
    leases = life.cloud.leases.get_many([job.id for job in jobs])
    assert life.cloud.members("ready") == {job.id for job in jobs if job.claimable}
    timed = {job.id for job in jobs if job.timer_at is not None}
    late = {job.id for job in jobs if job.retention_at is not None}
    assert life.cloud.members("timers") == timed | late and not timed & late
    assert set(life.cloud.jobs.due_retentions(life.now + LATE_AFTER_S, limit=100)) == late
    assert late, "no job of this life ended without its worker's call"
    assert life.cloud.members("due") == {job_id for job_id, lease in leases.items() if not lease.closed}
    running = {job.id for job in jobs if job.state is JobState.RUNNING}
    assert life.cloud.members("due") == running
