"""Account for the writes that the state machine saw accepted, apart from the rules that it checks."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.contract.jobs.job import FailureClass, JobCounters
from baton.contract.worker.control import CommandKind
from functions.domain.jobs.attempt_end import LATE_AFTER_S
from functions.domain.jobs.lease_fence import REPROOF_WINDOW_S
from functions.domain.jobs.transaction import CheckLease, CloseLease, OpenLease, Transaction
from functions.domain.records import Attempt, CheckpointRecord, CommandRecord, Job, Lease

Place = tuple[int, int]
"""A checkpoint of one job: step and epoch."""


@dataclass(frozen=True)
class Worker:
    """A worker as it sees itself: it never learns by itself that it lost the job."""

    job_id: str
    epoch: int
    token_sha256: str | None
    machine_id: str | None
    source_address: str


@dataclass
class Holder:
    """Holder of a job by the account, and the times of its lease."""

    worker: Worker
    duration_s: int
    expires_at: int
    started_at: int
    open: bool = True

    def admits(self, worker: Worker, now: int, *, window_s: int = 0, heartbeat: bool = False) -> bool:
        """Return whether a write by `worker` must be accepted; otherwise it must be refused."""
        mine = self.worker
        if not self.open or now >= self.expires_at + window_s:
            return False
        if mine.token_sha256 is not None or worker.token_sha256 is not None:
            return self.claimed_by(worker)
        # Original clients are told apart by what the claim said of them, and their writes by the attempt as well.
        if not heartbeat and mine.epoch != worker.epoch:
            return False
        if mine.machine_id is not None and (worker.machine_id is not None or not heartbeat):
            return mine.machine_id == worker.machine_id
        return mine.source_address == worker.source_address

    def claimed_by(self, worker: Worker) -> bool:
        """Return whether `worker` received the lease. (A worker with a token need not name its machine.)"""
        return (self.worker.epoch, self.worker.token_sha256) == (worker.epoch, worker.token_sha256)

    def may_heartbeat(self, worker: Worker, now: int) -> bool:
        """Return whether a heartbeat by `worker` must be accepted; a heartbeat may also renew an expired lease."""
        return self.admits(worker, now, window_s=REPROOF_WINDOW_S, heartbeat=True)


@dataclass
class Account:
    """Account of one job."""

    job: Job
    holder: Holder | None = None
    counters: JobCounters = field(default_factory=JobCounters)
    parents: dict[Place, Place | None] = field(default_factory=dict)
    """Checkpoint that each checkpoint continues."""
    results: dict[int, CommandRecord] = field(default_factory=dict)
    """First report on each command; for a `save` or `evaluate` that was lost with its worker, a later report."""
    rollbacks: int = 0

    def enter(self, change: Transaction, now: int, *, lease: Lease | None) -> None:
        """Account for a change that was accepted; `lease` is the row before it."""
        match change.lease:
            case OpenLease(lease=opened):
                address = opened.claimant.source_address if opened.claimant else ""
                worker = Worker(opened.job_id, opened.epoch, opened.token_sha256, opened.machine_id, address)
                self.holder = Holder(worker, opened.duration_s, opened.expires_at, now)
                self.counters = _plus(self.counters, attempts=1)
            case CloseLease(expired_at=expired_at):
                assert self.holder is not None
                assert lease is not None
                self.holder.open = False
                until = now if expired_at is None else lease.expires_at - lease.duration_s
                assert change.attempt is not None
                self._count(change.attempt, max(until - self.holder.started_at, 0))
            case CheckLease() if [one for one in change.records(CheckpointRecord) if not one.damaged]:
                (record,) = change.records(CheckpointRecord)
                self.parents[record.step, record.epoch] = place_of(self.job)
        for command in change.records(CommandRecord):
            if command.status != "waiting":
                assert self._is_lost(self.results.get(command.seq)), "what became of a command is told once"
                assert command.epoch == change.job.epoch
                self.results[command.seq] = command
        self.rollbacks += len(change.job.rollbacks) - len(self.job.rollbacks)
        self.job = change.job

    def _is_lost(self, earlier: CommandRecord | None) -> bool:
        """Return whether the earlier report is absent or lost: its attempt committed nothing from that step on."""
        if earlier is None:
            return True
        repeated = earlier.kind in (CommandKind.SAVE, CommandKind.EVALUATE)
        applied = earlier.status == "applied" and earlier.epoch < self.job.epoch
        return repeated and applied and (self.job.checkpoint_step or -1) < (earlier.step or 0)

    def forget_mishaps(self) -> None:
        """A retry from a clean slate."""
        self.counters = JobCounters(attempts=self.counters.attempts)

    def _count(self, attempt: Attempt, ran_s: int) -> None:
        name = {
            "failed": None if attempt.failure_class in (None, FailureClass.STOPPED_BY_RULE) else "failures",
            "interrupted": "interruptions",
            "released": "releases",
        }.get(str(attempt.end))
        if name == "failures" and attempt.failure_class is not None and attempt.failure_class.node_fault:
            name = "node_faults"
        self.counters = _plus(self.counters, runtime_s=ran_s, **({name: 1} if name else {}))

    def ancestors(self, place: Place | None) -> set[Place]:
        """Return the checkpoint and all checkpoints that it continues."""
        found: set[Place] = set()
        while place is not None and place not in found:
            found.add(place)
            place = self.parents.get(place)
        return found

    def fallback(self, records: list[CheckpointRecord], damaged: Place) -> Place | None:
        """Return the newest sound checkpoint that the damaged one continues: the job falls back on it."""
        sound = {(record.step, record.epoch) for record in records if not record.damaged} - {damaged}
        return max(self.ancestors(damaged) & sound, default=None)

    def below(self, records: list[CheckpointRecord], step: int) -> Place | None:
        """Return the target of a rollback: the newest sound checkpoint before `step` that the job continues."""
        sound = {(record.step, record.epoch) for record in records if not record.damaged}
        line = self.ancestors(place_of(self.job)) & sound
        return max((place for place in line if place[0] < step), default=None)


def place_of(job: Job) -> Place | None:
    """Return the checkpoint that the next attempt resumes from."""
    if job.checkpoint_step is None or job.checkpoint_epoch is None:
        return None
    return job.checkpoint_step, job.checkpoint_epoch


def _plus(counters: JobCounters, **more: int) -> JobCounters:
    return JobCounters(**{name: value + more.get(name, 0) for name, value in counters.model_dump().items()})


def check_transition(before: Job, job: Job, doing: str) -> None:
    """Check the rules that every accepted write keeps."""
    assert job.rev == before.rev + 1
    assert job.event_seq > before.event_seq or doing in ("rules", "order", "report")
    assert job.event_seq >= before.event_seq
    assert job.rules_revision == before.rules_revision + (doing == "rules")
    assert job.commands_seq == before.commands_seq + (doing == "order")
    assert len(job.rollbacks) == len(before.rollbacks) + (doing == "rollback")
    assert job.decided >= before.decided or doing == "claim"
    assert job.epoch >= before.epoch
    assert (job.epoch > before.epoch) == (doing == "claim")
    if before.state.terminal:
        assert doing == "retry"
    # The calls that complete or fail a job run its retention themselves; after any other end the sweeper does.
    late = job.state.terminal and job.epoch > 0 and doing not in ("complete", "fail")
    assert job.retention_at == (job.updated_at + LATE_AFTER_S if late else None)
    if doing not in ("retry", "damaged", "rollback"):
        assert (job.checkpoint_step or 0) >= (before.checkpoint_step or 0)
    if doing not in ("commit", "damaged", "retry", "rollback"):
        assert place_of(job) == place_of(before)
    if not (doing == "retry" and job.counters.attempts == before.counters.attempts):
        assert all(getattr(job.counters, name) >= value for name, value in before.counters.model_dump().items())
