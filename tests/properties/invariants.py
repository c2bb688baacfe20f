"""Check the invariants of jobs, leases, histories and checkpoints after any sequence of calls."""

from __future__ import annotations

from hypothesis.stateful import invariant

from baton.contract.jobs.job import JobState
from functions.domain.checkpoints import commit
from functions.domain.records import Attempt, ControlRecord, Event, Job, RulesRecord
from tests.kits.clouds.paging import all_pages
from tests.properties.ledger import place_of
from tests.properties.serving import Serving

DAY_S = 86_400


class Checked(Serving):
    """The invariants."""

    @invariant()
    def ready_is_claimable(self) -> None:
        jobs = [account.job for account in self.accounts.values()]
        claimable = [job for job in jobs if job.state is JobState.PENDING and job.not_before is None]
        expected = [job.id for job in sorted(claimable, key=lambda job: job.ready_rank)]
        assert [job.id for job in self.ready()] == expected

    @invariant()
    def jobs_are_consistent(self) -> None:
        touched, self.touched = self.touched, set()
        for job_id in sorted(touched):
            job = self.job(job_id)
            assert job == self.accounts[job_id].job
            self._check_lease(job)
            self._check_history(job)
            self._check_checkpoints(job)
            self._check_steering(job)
            due = self.stores.jobs.due_retentions(self.now + 400 * DAY_S, limit=1000)
            assert (job.id in due) == (job.retention_at is not None)

    def _check_lease(self, job: Job) -> None:
        """At most one attempt may write, and only the job's newest, and only while the job runs."""
        lease, holder = self.stores.leases.get(job.id), self.accounts[job.id].holder
        running = job.state is JobState.RUNNING
        assert (lease is not None and not lease.closed) == running
        assert (holder is not None and holder.open) == running
        if lease is not None and running:
            assert holder is not None
            assert lease.epoch == job.epoch == holder.worker.epoch
            assert lease.expires_at == holder.expires_at
            assert (lease.directive == "pause") == job.pause_requested
            if lease.expires_at <= self.now:
                assert job.id in self._due(self.now)
        if not running:
            assert job.id not in self._due(self.now + 400 * DAY_S)
            assert not job.pause_requested

    def _due(self, now: int) -> set[str]:
        return {job_id for page in self.stores.leases.due_pages(now, size=1000) for job_id in page}

    def _check_history(self, job: Job) -> None:
        events = all_pages(lambda cursor: self.stores.jobs.history(Event, job.id, limit=100, cursor=cursor))
        assert [event.seq for event in events] == list(range(1, job.event_seq + 1))
        assert [event.epoch for event in events] == sorted(event.epoch for event in events)
        attempts = all_pages(lambda cursor: self.stores.jobs.history(Attempt, job.id, limit=100, cursor=cursor))
        assert [attempt.epoch for attempt in attempts] == list(range(1, job.epoch + 1))
        unended = [attempt.epoch for attempt in attempts if attempt.end is None]
        assert unended == ([job.epoch] if job.state is JobState.RUNNING else [])
        assert all((attempt.end is None) == (attempt.ended_at is None) for attempt in attempts)
        assert job.counters == self.accounts[job.id].counters
        assert job.counters.attempts == job.epoch
        assert job.counters.runtime_s >= 0

    def _check_steering(self, job: Job) -> None:
        """Revisions and commands are numbered without a gap, results and decisions are there once; the lease knows."""
        jobs, account = self.stores.jobs, self.accounts[job.id]
        revisions = all_pages(lambda cursor: jobs.history(RulesRecord, job.id, limit=100, cursor=cursor))
        assert [one.revision for one in revisions] == list(range(job.rules_revision, 0, -1))
        commands = jobs.commands(job.id)
        assert [one.seq for one in commands] == list(range(1, job.commands_seq + 1))
        assert {one.seq: one for one in commands if one.status != "waiting"} == account.results
        assert [one.number for one in job.rollbacks] == list(range(1, account.rollbacks + 1))
        events = all_pages(lambda cursor: jobs.history(Event, job.id, limit=100, cursor=cursor))
        decided = [(event.epoch, event.data["number"]) for event in events if event.type == "rule.fired"]
        assert decided == sorted(set(decided))
        assert job.decided == max((number for epoch, number in decided if epoch == job.epoch), default=0)
        lease = self.stores.leases.get(job.id)
        if lease is not None and not lease.closed:
            assert (lease.rules_revision, lease.commands_seq) == (job.rules_revision, job.commands_seq)
        control = jobs.read(ControlRecord, job.id)
        assert control is None or control.epoch <= job.epoch

    def _check_checkpoints(self, job: Job) -> None:
        """Check that a job's resume point exists, is sound, and is the one that its newest attempts continued."""
        records = self.records(job.id)
        assert [record.step for record in records] == sorted((record.step for record in records), reverse=True)
        sound = {(record.step, record.epoch) for record in records if not record.damaged}
        place = place_of(job)
        assert place is None or place in sound
        line = self.accounts[job.id].ancestors(place)
        resumable = [(record.step, record.epoch) for record in commit.resumable(job, records)]
        assert resumable == sorted(line & sound, reverse=True)
