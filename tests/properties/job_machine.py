"""The life of a few jobs under everything that can happen to them, on any store.

Each rule is a request or an event; the invariants hold after every one of them. Requests that workers ever sent may
arrive again at any time, from machines that have long lost the job: that is the point.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from baton.contract.errors import ErrorCode
from baton.contract.jobs.job import JobState
from baton.contract.jobs.policy import Policy, Requirements, Retention
from baton.contract.worker.calls import WorkQuery
from functions.domain.checkpoints import packs
from functions.domain.checkpoints.retention import schedule_retention, surplus
from functions.domain.errors import Refusal
from functions.domain.jobs import transitions as rules
from functions.domain.jobs.job_selection import leading_equals, mismatch, with_claimant
from functions.domain.jobs.lease_expiry import ReclaimWatermark, is_reclaimable
from functions.domain.jobs.transaction import CheckLease, CloseLease, Transaction, delete_checkpoint
from functions.domain.records import CheckpointRecord, Claimant, Job
from tests.kits.api.factories import make_spec
from tests.properties.invariants import DAY_S, Checked
from tests.properties.ledger import Account, Worker
from tests.properties.serving import KEY_ID, QUEUE, Request, pick

MACHINES = ("m-0", "m-1", "m-2")


@dataclass(frozen=True)
class Decided:
    """A change that was decided on, and not written yet: another request may come in between."""

    change: Transaction
    kind: str


policies = st.builds(
    Policy,
    max_failures=st.integers(1, 3),
    max_interruptions=st.integers(1, 6),
    max_fruitless_interruptions=st.integers(1, 5),
    max_node_faults=st.integers(1, 3),
    backoff_s=st.sampled_from([0, 15]),
    avoid_machine_s=st.sampled_from([0, 600]),
    max_runtime_s=st.sampled_from([None, None, 400]),
    heartbeat_interval_s=st.sampled_from([10, 30]),
    retention=st.builds(
        Retention,
        keep_last=st.integers(1, 3),
        keep_every_steps=st.sampled_from([None, 40]),
        keep_best_metric=st.just("m"),
    ),
)
deadlines = st.sampled_from([None, None, None, 300, 3 * DAY_S])
newest_first = st.integers(0, 20)
clients = st.sampled_from(["leased", "leased", "original", "anonymous"])
steps_ahead = st.sampled_from([10, 20, 25, 45, 0, -10, -40])
requests_of_holders = st.sampled_from(
    ["commit"] * 5 + ["heartbeat", "report"] * 2 + ["damaged", "fail", "release", "complete", "rollback", "leave"]
)
requests_of_anybody = st.sampled_from(
    ["again", "again", "heartbeat", "commit", "complete", "fail", "release", "damaged", "report", "rollback", "leave"]
)
commands = st.sampled_from(["pause", "resume", "retry", "retry", "cancel", "rules", "order", "order"])


class JobMachine(Checked):
    """Subclasses say on which stores: `fresh`.

    Rules do several things at once, so that a run that leaves some of them out still gets somewhere.
    """

    MAX_JOBS: ClassVar[int] = 3

    def __init__(self) -> None:
        super().__init__()
        self.decided: list[Decided] = []

    # Calls of users

    @precondition(lambda self: len(self.accounts) < self.MAX_JOBS)
    @rule(
        policy=policies,
        deadline_s=deadlines,
        priority=st.sampled_from([50, 50, 10]),
        vram=st.sampled_from([None, 24.0]),
    )
    def submit(self, policy: Policy, deadline_s: int | None, priority: int, vram: float | None) -> None:
        change = rules.submit(
            job_id=f"{len(self.accounts):08d}-0000-4000-8000-{self.draw():012d}",
            tenant=self.tenant,
            spec=make_spec(
                policy=policy.model_copy(update={"deadline_at": deadline_s and self.now + deadline_s}),
                requirements=Requirements(min_vram_gib=vram),
            ),
            queue=QUEUE,
            shard=0,
            priority=priority,
            now=self.now,
        )
        self.stores.jobs.apply(change)
        self.accounts[change.job.id] = Account(change.job)
        self.touched.add(change.job.id)
        assert self.attempt_write(change) == "conflict", "the same job was created twice"

    @precondition(lambda self: self.accounts)
    @rule(
        which=newest_first,
        given_commands=st.lists(commands, min_size=1, max_size=3),
        how=st.sampled_from(["newest", "chosen", "chosen", "nothing"]),
        choice=newest_first,
        reset=st.sampled_from([True, True, False]),
    )
    def steer(self, which: int, given_commands: list[str], how: str, choice: int, reset: bool) -> None:
        job_id = pick(list(self.accounts), which)
        for command in given_commands:
            if command == "retry":
                self._retry(job_id, how, choice, reset=reset)
            else:
                self.command(job_id, command)

    def _retry(self, job_id: str, how: str, choice: int, *, reset: bool) -> None:
        sound = [record for record in self.records(job_id) if not record.damaged]
        chosen = pick(sound, choice) if how == "chosen" and sound else None
        try:
            change = rules.retry(
                self.job(job_id),
                chosen=chosen,
                keep_checkpoint=how != "nothing" and chosen is None,
                reset_counters=reset,
                now=self.now,
            )
        except Refusal as refusal:
            assert refusal.code is ErrorCode.ILLEGAL_TRANSITION
            return
        self.write(change, "retry")
        if reset:
            self.accounts[job_id].forget_mishaps()

    # Calls of workers

    @rule(client=clients, machine=st.sampled_from(MACHINES), vram=st.sampled_from([48.0, None]), choice=newest_first)
    def claim(self, client: str, machine: str, vram: float | None, choice: int) -> None:
        worker = WorkQuery(machine_id=None if client == "anonymous" else machine, vram_gib=vram)
        found = [job for job in self.ready() if mismatch(job, worker, self.now) is None]
        if not found:
            return
        job = pick(leading_equals(found), choice)
        token = hashlib.sha256(f"token {self.draw()}".encode()).hexdigest() if client == "leased" else None
        change = rules.claim(job, worker, token_sha256=token, key_id=KEY_ID, now=self.now)
        # Two of the machines are behind one address.
        address = "192.0.2.2" if machine == "m-2" else "192.0.2.1"
        if client != "leased":
            claimant = Claimant(key_id=KEY_ID, source_address=address, progress_by=self.now + 10**9)
            change = with_claimant(change, claimant)
        rival = rules.claim(job, WorkQuery(machine_id="rival"), token_sha256="f" * 64, key_id=KEY_ID, now=self.now)
        self.write(change, "claim")
        # With a token the machine need not be named again, and often is not.
        named = None if token else worker.machine_id
        self.workers.append(Worker(job.id, change.job.epoch, token, named, address))
        # Another worker that saw the same row of the index comes second.
        assert self.attempt_write(rival) == "conflict"

    @rule(
        which=newest_first,
        requests=st.lists(st.tuples(requests_of_holders, steps_ahead), min_size=1, max_size=5),
        seconds=st.sampled_from([0, 1, 10]),
        client=clients,
        machine=st.sampled_from(MACHINES),
    )
    def work(self, which: int, requests: list[tuple[str, int]], seconds: int, client: str, machine: str) -> None:
        """Send some requests of a worker that holds a job; without such a worker, a worker claims a job first."""
        account = self._held(which, client, machine)
        if account is None or account.holder is None:
            return
        worker = next(worker for worker in self.workers if account.holder.claimed_by(worker))
        for kind, ahead in requests:
            newest = account.job.checkpoint_step or 0
            step = newest if kind == "damaged" else max(newest + ahead, 0)
            self.deliver(Request(kind, worker, step, "one"), keep=True)
            self.now += seconds

    @precondition(lambda self: self.workers)
    @rule(
        requests=st.lists(st.tuples(newest_first, requests_of_anybody, steps_ahead), min_size=1, max_size=4),
        detail=st.sampled_from(["one", "two"]),
    )
    def work_by_anybody(self, requests: list[tuple[int, str, int]], detail: str) -> None:
        """Requests of workers that ever held a job, and earlier requests again: duplicates, machines that wake up."""
        for which, kind, ahead in requests:
            if kind == "again":
                if self.sent:
                    self.deliver(pick(self.sent, which), keep=False)
                continue
            worker = pick(self.workers, which)
            newest = self.job(worker.job_id).checkpoint_step or 0
            self.deliver(Request(kind, worker, max(newest + ahead, 0), detail), keep=True)
            foreign = replace(self.fence(worker), tenant="other")
            assert self.heartbeat(foreign) is None, "another tenant's key opened the job"

    def _held(self, which: int, client: str, machine: str) -> Account | None:
        def held() -> list[Account]:
            holders = [(account, account.holder) for account in self.accounts.values()]
            return [account for account, holder in holders if holder and holder.open and self.now < holder.expires_at]

        if not held():
            self.sweep()
            if not self.ready():
                self._more_work(which)
            self.claim(client, machine, 48.0, which)
        return pick(held(), which) if held() else None

    def _more_work(self, which: int) -> None:
        if len(self.accounts) < self.MAX_JOBS:
            self.submit(Policy(), None, 50, None)
        else:
            how = ("newest", "chosen", "nothing", "chosen")[which % 4]
            self._retry(pick(list(self.accounts), which), how, which, reset=True)

    @precondition(lambda self: self.workers)
    @rule(
        which=newest_first,
        kinds=st.lists(
            st.sampled_from(
                ["commit", "complete", "fail", "release", "interrupt", "cancel", "pause", "rollback"] + ["write"] * 2
            ),
            min_size=1,
            max_size=3,
        ),
    )
    def slow_server(self, which: int, kinds: list[str]) -> None:
        """Act as a slow server: decide a write now, write it in a later step, when the records may have changed."""
        for kind in kinds:
            if kind == "write":
                self._write_late(which)
                continue
            worker = pick(self.workers, which)
            job = self.job(worker.job_id)
            try:
                change = self.decide(kind, worker, job, (job.checkpoint_step or 0) + 10)
            except Refusal:
                continue
            self.decided.append(Decided(change, kind))

    def _write_late(self, which: int) -> None:
        if not self.decided:
            return
        late = self.decided.pop(-1 - which % len(self.decided))
        change = late.change
        before = self.snapshot(change.job.id)
        outcome = self.attempt_write(change)
        if outcome == "written":
            assert change.job.rev == before[0].rev + 1
            if isinstance(change.lease, CheckLease | CloseLease) and change.lease.fence is not None:
                assert change.lease.fence.admits(before[1])
            self.account(change, change.job.updated_at, before, late.kind)
        else:
            assert change.job.rev != before[0].rev + 1 or outcome == "fenced"
            assert self.snapshot(change.job.id) == before, "a refused write left something behind"

    # Time and the sweeper

    @rule(seconds=st.sampled_from([1, 5, 10, 10, 30, 60, 91, 91, 300, 3600, DAY_S, 4 * DAY_S]), swept=st.booleans())
    def time_passes(self, seconds: int, swept: bool) -> None:
        self.now += seconds
        if swept:
            self.sweep()

    def sweep(self) -> None:
        """End what ran out: leases, backoffs, deadlines."""
        jobs, leases = self.stores.jobs, self.stores.leases
        # Outages, and what the sweeper does about them, are the subject of test_lease_outages.py.
        watch = ReclaimWatermark(seen_at=self.now)
        for job_id in [job_id for page in leases.due_pages(self.now, size=1000) for job_id in page]:
            lease = leases.get(job_id)
            if lease is not None and is_reclaimable(lease, watch, self.now, sweep_interval_s=1):
                self.write(rules.interrupt(self.job(job_id), self.current(job_id), lease, now=self.now), "interrupt")
        for job_id in jobs.due_timers(self.now, limit=1000):
            job = self.job(job_id)
            attempt = self.current(job_id) if job.state is JobState.RUNNING else None
            change = rules.timer(job, attempt, now=self.now)
            assert change is not None, "a timer that is due does nothing"
            self.write(change, "timer")
        for job_id in jobs.due_retentions(self.now, limit=1000):
            job = self.job(job_id)
            assert job.state.terminal and job.epoch > 0 and job.retention_at is not None
            assert job.retention_at <= self.now
            assert self.attempt_write(schedule_retention(job, None)) == "written"
            assert self.attempt_write(schedule_retention(job, None)) == "conflict", "the job has changed"
            self.accounts[job_id].job = self.job(job_id)
            self.touched.add(job_id)

    @precondition(lambda self: self.accounts)
    @rule(which=newest_first, choice=newest_first, reader=st.sampled_from([False, False, True]))
    def checkpoints_are_read_and_let_go(self, which: int, choice: int, reader: bool) -> None:
        jobs, job = self.stores.jobs, self.job(pick(list(self.accounts), which))
        records = self.records(job.id)
        if reader and records:
            chosen = pick(records, choice)
            kept = jobs.protect_checkpoint(job.id, chosen.step, self.now + 600)
            assert kept is not None
            assert kept.protected_until >= self.now + 600
            assert self.forget(job, [kept]) == "conflict", "somebody is reading it"
            records = self.records(job.id)
        policy = job.spec.policy.retention
        over = surplus(records, policy, current_step=job.checkpoint_step, in_history=job.in_history)
        going = [record for record in over if record.protected_until <= self.now]
        assert self.forget(job, going) == "written"
        assert self.forget(job, going) == "conflict", "the job has changed"
        assert self.forget(self.job(job.id), going) == "written", "a repeat must go on"
        assert self.records(job.id) == [record for record in records if record not in going]
        self.accounts[job.id].job = self.job(job.id)
        self.touched.add(job.id)

    def forget(self, job: Job, going: list[CheckpointRecord]) -> str:
        """Retention's decision on the job as it was read."""
        return self.attempt_write(
            packs.delete_records(job, [delete_checkpoint(job.id, record, self.now) for record in going])
        )

    def teardown(self) -> None:
        """Check that no job is stuck: each job has ended, or a person or a worker can continue the job."""
        for _ in range(4):
            self.now += 2 * 3600
            self.sweep()
            self.now += 95
            self.sweep()
        for account in self.accounts.values():
            job = self.job(account.job.id)
            assert job.state is not JobState.RUNNING
            assert job.state is not JobState.PENDING or job.claimable
            assert job.reason is not None or job.state in (JobState.COMPLETE, JobState.PENDING)
        self.ready_is_claimable()
        self.jobs_are_consistent()
