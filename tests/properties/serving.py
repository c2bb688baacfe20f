"""Serving requests as the API does it, on whatever stores: read, decide, write; and nothing in between is assumed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol, TypeVar

from hypothesis.stateful import RuleBasedStateMachine

from baton.contract.errors import ErrorCode
from baton.contract.jobs.job import Artifact, FailureClass, JobState, Progress, Reason
from baton.contract.worker.calls import FailRequest
from baton.contract.worker.control import (
    CommandKind,
    CommandRequest,
    CommandResult,
    ControlReport,
    Decision,
    EndedBy,
    LeaveByRule,
    Rollback,
    RuleStatus,
)
from functions.domain.checkpoints import commit
from functions.domain.errors import FenceBroken, Refusal, WriteConflict
from functions.domain.jobs import transitions as rules
from functions.domain.jobs.lease_fence import Fence
from functions.domain.jobs.rule_exit import end_attempt_by_rule
from functions.domain.jobs.transaction import Transaction
from functions.domain.ports import JobStore, LeaseStore, TokenStore
from functions.domain.records import Attempt, CheckpointRecord, ControlRecord, Job, RulesRecord
from functions.domain.rules import steering
from tests.kits.api.factories import NOW, make_manifest, make_record
from tests.kits.clouds.paging import all_pages
from tests.properties.ledger import Account, Worker, check_transition, place_of

T = TypeVar("T")
QUEUE = "default"
KEY_ID = "key"


class Stores(Protocol):
    """The stores under test; a fresh set for every run."""

    @property
    def jobs(self) -> JobStore: ...

    @property
    def leases(self) -> LeaseStore: ...

    @property
    def tokens(self) -> TokenStore: ...


@dataclass(frozen=True)
class Request:
    """A worker's request, which may arrive late and more than once."""

    kind: str
    worker: Worker
    step: int = 0
    detail: str = ""


FAILURES = (
    FailureClass.SCRIPT_ERROR,
    FailureClass.NODE_FAULT,
    FailureClass.OUT_OF_MEMORY,
    FailureClass.STOPPED_BY_RULE,
)
ALLOWED: dict[str, set[ErrorCode]] = {
    "commit": {ErrorCode.STEP_NOT_NEWER, ErrorCode.CHECKPOINT_CONFLICT},
    "damaged": set(),
    "complete": set(),
    "fail": set(),
    "release": set(),
    "report": set(),
    "rollback": {ErrorCode.ROLLBACK_BUDGET_SPENT, ErrorCode.ROLLBACK_NOT_KEPT},
    "leave": set(),
}
"""Refusals that a worker may receive although it holds the job."""


class Serving(RuleBasedStateMachine):
    """A control plane with nothing but rules and stores, and an account of what it accepted."""

    fresh: ClassVar[Callable[[], Stores]]

    def __init__(self) -> None:
        super().__init__()
        self.stores = type(self).fresh()
        self.now = NOW
        self.tenant = "default"
        self.drawn = 0
        self.accounts: dict[str, Account] = {}
        self.workers: list[Worker] = []
        self.sent: list[Request] = []
        self.touched: set[str] = set()

    def deliver(self, request: Request, *, keep: bool) -> None:
        worker = request.worker
        account = self.accounts[worker.job_id]
        holder = account.holder
        assert holder is not None
        before = self.snapshot(worker.job_id)
        if keep:
            self.sent.append(request)
        if request.kind == "heartbeat":
            expires_at = self.heartbeat(self.fence(worker, heartbeat=True))
            assert (expires_at is not None) == holder.may_heartbeat(worker, self.now)
            if expires_at is not None:
                assert expires_at == self.now + holder.duration_s
                holder.expires_at = expires_at
            self.touched.add(worker.job_id)
            return
        try:
            change = self._served(request)
        except (Refusal, FenceBroken) as refused:
            if isinstance(refused, Refusal) and holder.admits(worker, self.now):
                assert refused.code in ALLOWED[request.kind], refused
            assert self.snapshot(worker.job_id) == before, "a refused request left something behind"
            return
        if change is None:
            assert self.snapshot(worker.job_id) == before
            return
        assert holder.admits(worker, self.now), "a worker wrote that does not hold the job"
        assert worker.epoch == before[0].epoch
        self.account(change, self.now, before, request.kind)

    def _served(self, request: Request) -> Transaction | None:
        """Decide and write; None if there was nothing to do. Raises Refusal or FenceBroken."""
        worker, job = request.worker, self.job(request.worker.job_id)
        fence, lease = self.fence(worker), self.stores.leases.get(worker.job_id)
        if request.kind == "commit":
            existing = self.stores.jobs.read(CheckpointRecord, job.id, request.step)
            manifest = make_manifest(
                request.step, worker.epoch, job_id=job.id, metrics={"m": 1.0 if request.detail == "one" else 2.0}
            )
            digest = hashlib.sha256(manifest.canonical_bytes()).hexdigest()
            if commit.is_committed(job, existing, manifest, digest):
                return None
            record = make_record(
                request.step, worker.epoch, committed_at=self.now, manifest_blake3=digest, metrics=manifest.metrics
            )
            change = commit.commit(job, fence, record, now=self.now)
        elif request.kind == "damaged":
            found = self.stores.jobs.read(CheckpointRecord, job.id, request.step)
            if found is None or found.damaged:
                return None
            below = [r for r in commit.resumable(job, self.records(job.id)) if r.step < found.step]
            fallback = below[0] if below else None
            change = commit.mark_damaged(job, self.current(job.id), fence, found, fallback, message="bad", now=self.now)
            if place_of(job) == (found.step, found.epoch):
                expected = self.accounts[job.id].fallback(self.records(job.id), (found.step, found.epoch))
                assert place_of(change.job) == expected
        elif request.kind == "report":
            report = self.report_of(request)
            known = self.stores.jobs.commands(job.id), self.stores.jobs.read(ControlRecord, job.id)
            told = steering.apply_report(job, report, commands=known[0], control=known[1], now=self.now)
            if not (told.events or told.commands):
                return None
            fence = replace(fence, epoch=lease.epoch if lease is not None else None)
            change = steering.persist_report(told, fence, report, now=self.now)
        else:
            if lease is not None and lease.closed and fence.bears(lease):
                return None
            change = self.decide(request.kind, worker, job, request.step)
            if request.kind == "rollback":
                assert place_of(change.job) == self.accounts[job.id].below(self.records(job.id), request.step)
        self.stores.jobs.apply(change)
        return change

    def report_of(self, request: Request) -> ControlReport:
        """Return decisions and results of a request: more for later steps, and the same for a repeat."""
        some = request.step // 10 % 5 + 1
        status: Literal["applied", "rejected"] = "applied" if request.detail == "one" else "rejected"
        return ControlReport(
            rules_revision=some,
            commands_seq=some,
            results=[CommandResult(seq=seq, status=status, step=request.step) for seq in range(1, some)],
            decisions=[
                Decision(number=number, type="rule.fired", rule="r", step=request.step, at=NOW)
                for number in range(max(some - 2, 1), some + 1)
            ],
            statuses=[RuleStatus(rule="r", state="fired", fires=some)],
        )

    def decide(self, kind: str, worker: Worker, job: Job, step: int) -> Transaction:
        fence, lease = self.fence(worker), self.stores.leases.get(job.id)
        progress = lease.progress if lease else None
        if kind in ("cancel", "pause"):
            attempt = self.current(job.id) if job.state is JobState.RUNNING else None
            if kind == "cancel":
                return rules.cancel(job, attempt, message="", now=self.now)
            return rules.pause(job, message="", now=self.now)
        rules.require_running(job)
        attempt = self.current(job.id)
        match kind:
            case "complete":
                artifacts = [Artifact(path="model", bucket="b", key=f"{worker.epoch}/model")]
                return rules.complete(job, attempt, fence, artifacts=artifacts, progress=progress, now=self.now)
            case "fail":
                failure = FAILURES[step % 4]
                report = FailRequest(job_id=job.id, failure_class=failure, machine_id=worker.machine_id)
                return rules.fail(job, attempt, fence, report, progress=progress, now=self.now)
            case "release":
                reason = Reason(code="sigterm")
                return rules.release(job, attempt, fence, reason=reason, progress=progress, now=self.now)
            case "rollback" | "leave":
                by = EndedBy(rule=f"r{step % 2}", step=step)
                wish = LeaveByRule(kind=("pause", "requeue")[step // 10 % 2], ended_by=by, exclude_host=step % 3 == 0)
                if kind == "rollback":
                    wish = LeaveByRule(kind="rollback", ended_by=by, rollback=Rollback(before_step=step, budget=2))
                choices = commit.resumable(job, self.records(job.id))
                return end_attempt_by_rule(
                    job, attempt, fence, wish, resumable=choices, progress=progress, now=self.now
                )
            case "interrupt":
                assert lease is not None
                return rules.interrupt(job, attempt, lease, now=self.now)
        record = make_record(step, job.epoch, committed_at=self.now)
        return commit.commit(job, fence, record, now=self.now)

    def heartbeat(self, fence: Fence) -> int | None:
        progress = Progress(step=self.now - NOW, reported_at=self.now)
        try:
            return self.stores.leases.heartbeat(fence, progress, "training").expires_at
        except FenceBroken as broken:
            assert not fence.admits(broken.lease)
            assert fence.refusal(broken.lease).code.status in (400, 409)
            return None

    def command(self, job_id: str, command: str) -> None:
        job, before = self.job(job_id), self.snapshot(job_id)
        try:
            if command == "resume":
                change = rules.resume(job, now=self.now)
            elif command == "rules":
                newest = self.stores.jobs.read(RulesRecord, job_id, job.rules_revision) if job.rules_revision else None
                new = steering.put_rules(
                    job, newest, text=f"{self.draw()}", if_revision=job.rules_revision, key_id="k", now=self.now
                )
                assert new is not None
                change = new
            elif command == "order":
                wish = CommandRequest(kind=CommandKind.SAVE, expires_in_s=60)
                kept = self.stores.jobs.commands(job_id)
                change = steering.add_command(job, kept, wish, key_sha256=None, now=self.now)
            elif command == "pause":
                change = rules.pause(job, message="", now=self.now)
            else:
                attempt = self.current(job_id) if job.state is JobState.RUNNING else None
                change = rules.cancel(job, attempt, message="", now=self.now)
        except Refusal as refusal:
            assert refusal.code.status == 409
            assert self.snapshot(job_id) == before
            return
        self.write(change, command)

    # Plumbing

    def write(self, change: Transaction, doing: str) -> None:
        """A write that no concurrent write can precede."""
        before = self.snapshot(change.job.id)
        self.stores.jobs.apply(change)
        self.account(change, self.now, before, doing)

    def attempt_write(self, change: Transaction) -> str:
        try:
            self.stores.jobs.apply(change)
        except WriteConflict:
            return "conflict"
        except FenceBroken:
            return "fenced"
        return "written"

    def account(self, change: Transaction, now: int, before: tuple[Job, Any], doing: str) -> None:
        assert change.job.rev == before[0].rev + 1
        check_transition(before[0], change.job, doing)
        self.accounts[change.job.id].enter(change, now, lease=before[1])
        self.touched.add(change.job.id)

    def snapshot(self, job_id: str) -> tuple[Job, Any]:
        return self.job(job_id), self.stores.leases.get(job_id)

    def fence(self, worker: Worker, *, heartbeat: bool = False) -> Fence:
        return Fence(
            job_id=worker.job_id,
            tenant=self.tenant,
            now=self.now,
            # An original client's writes name the attempt by the prefix that it was handed.
            epoch=None if heartbeat or worker.token_sha256 else worker.epoch,
            token_sha256=worker.token_sha256,
            machine_id=worker.machine_id,
            key_id=KEY_ID,
            source_address=worker.source_address,
            heartbeat=heartbeat,
        )

    def job(self, job_id: str) -> Job:
        job = self.stores.jobs.get(job_id)
        assert job is not None
        return job

    def current(self, job_id: str) -> Attempt:
        attempt = self.stores.jobs.read(Attempt, job_id, self.job(job_id).epoch)
        assert attempt is not None
        return attempt

    def records(self, job_id: str) -> list[CheckpointRecord]:
        return all_pages(lambda cursor: self.stores.jobs.history(CheckpointRecord, job_id, limit=100, cursor=cursor))

    def ready(self) -> list[Job]:
        return all_pages(lambda cursor: self.stores.jobs.ready(self.tenant, QUEUE, 0, limit=50, cursor=cursor))

    def draw(self) -> int:
        self.drawn += 1
        return self.drawn


def pick(items: Sequence[T], which: int) -> T:
    """The newest for 0, older ones for more: what is simplest to hypothesis is the most usual."""
    return items[-1 - which % len(items)]
