"""The claim loop and the sweep, on every store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from baton.contract.jobs.job import JobState
from baton.contract.jobs.policy import Policy, Requirements
from baton.contract.worker.calls import WorkQuery
from baton.contract.worker.lease_grace import renewal_window_s, revocation_grace_s
from functions.api.operations.sweeper import RESERVED_S, TIMERS_S, end_overdue_job, record_watermark, run_timer, sweep
from functions.api.worker import job_claim
from functions.api.worker.job_claim import ClaimedJob, claim_next, peek_next
from functions.domain.errors import FenceBroken
from functions.domain.jobs import transitions as rules
from functions.domain.jobs.job_selection import LARGEST_WINDOW, SMALLEST_WINDOW, ClaimWindow
from functions.domain.jobs.lease_expiry import ReclaimWatermark
from functions.domain.jobs.transaction import Transaction
from functions.domain.ports import JobStore, ResultPage
from functions.domain.records import Attempt, Job, Spec
from tests.conformance.store_kit import NOW, TENANT, Held, claim, failed, submit
from tests.kits.api.fakes import FakeClock, SeededRandomness
from tests.kits.clouds.store_sets import Cloud, memory_cloud

NOTICED_S = 181
"""Longer than a sweeper that runs each minute leaves out by chance."""


def revoked_at(held: Held) -> int:
    """Return the time from which the sweeper revokes the lease of `held`."""
    return held.lease.expires_at + revocation_grace_s(held.lease.heartbeat_interval_s)


def ask(cloud: Cloud, *, now: int = NOW, seed: int = 1, **more: Any) -> ClaimedJob | None:
    query = {name: more.pop(name) for name in list(more) if name in WorkQuery.model_fields}
    arguments: dict[str, Any] = {
        "tenant": TENANT,
        "key_id": "k",
        "token_sha256": "a" * 64,
        "tags": {},
        "shards": 1,
        "now": now,
        "random": SeededRandomness(seed),
        "window": ClaimWindow(),
    }
    return claim_next(
        more.pop("jobs", cloud.jobs), WorkQuery(**{"machine_id": "m-1", **query}), **{**arguments, **more}
    )


def state_of(cloud: Cloud, job: Job) -> JobState:
    stored = cloud.jobs.get(job.id)
    assert stored is not None
    return stored.state


def needing(gib: float) -> Spec:
    return Spec(command=["train"], requirements=Requirements(min_vram_gib=gib))


def test_a_claim_gives_job_attempt_and_lease(cloud: Cloud) -> None:
    job = submit(cloud)
    claimed = ask(cloud)
    assert claimed is not None
    assert claimed.job.id == job.id
    assert claimed.job == cloud.jobs.get(job.id)
    assert claimed.attempt == cloud.jobs.read(Attempt, job.id, 1)
    assert claimed.lease == cloud.leases.get(job.id)
    assert (claimed.lease.token_sha256, claimed.attempt.key_id) == ("a" * 64, "k")
    assert ask(cloud) is None


def test_a_better_rank_is_given_first(cloud: Cloud) -> None:
    low = [submit(cloud, priority=10) for _ in range(3)]
    high = [submit(cloud, priority=90) for _ in range(3)]
    got = [ask(cloud, seed=n) for n in range(6)]
    ids = [one.job.id for one in got if one]
    assert set(ids[:3]) == {job.id for job in high}
    assert set(ids[3:]) == {job.id for job in low}


def test_among_equals_the_choice_is_by_chance() -> None:
    first_choices = set()
    for seed in range(30):
        cloud = memory_cloud()
        jobs = [submit(cloud, now=NOW + n) for n in range(20)]
        claimed = ask(cloud, seed=seed)
        assert claimed is not None
        first_choices.add([job.id for job in jobs].index(claimed.job.id))
    assert len(first_choices) > 5
    assert max(first_choices) < SMALLEST_WINDOW


def test_jobs_that_do_not_suit_are_passed_over(cloud: Cloud) -> None:
    for n in range(30):
        submit(cloud, spec=needing(80), now=NOW - 100 + n)
    small = submit(cloud, spec=needing(8))
    claimed = ask(cloud, vram_gib=24)
    assert claimed is not None
    assert claimed.job.id == small.id
    assert ask(cloud, vram_gib=24) is None
    assert ask(cloud, vram_gib=80) is not None


def test_the_search_is_bounded(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_claim, "MAX_CANDIDATES", 25)
    for n in range(25):
        submit(cloud, spec=needing(80), now=NOW - 100 + n)
    submit(cloud)
    pages: list[int] = []
    jobs = Spied(cloud.jobs, before_ready=pages.append)
    assert ask(cloud, jobs=jobs) is None
    assert pages == [10, 15]


def test_every_shard_is_asked(cloud: Cloud) -> None:
    jobs = {submit(cloud, shard=shard).id for shard in range(4)}
    got = {claimed.job.id for seed in range(4) if (claimed := ask(cloud, shards=4, seed=seed))}
    assert got == jobs
    assert ask(cloud, shards=4) is None


def test_queues_and_tenants_are_apart(cloud: Cloud) -> None:
    submit(cloud, queue="other")
    submit(cloud, tenant="other")
    assert ask(cloud) is None
    assert ask(cloud, queue="other") is not None
    assert ask(cloud, tenant="other") is not None


def test_an_original_worker_gets_original_jobs_only(cloud: Cloud) -> None:
    submit(cloud, now=NOW - 5)
    original = submit(cloud, spec=Spec(command=["train"], dreambooth={"instance_prompt": "dog"}))
    claimed = ask(cloud, token_sha256=None)
    assert claimed is not None
    assert claimed.job.id == original.id
    assert claimed.lease.token_sha256 is None
    assert ask(cloud, token_sha256=None) is None


def test_a_job_past_its_deadline_is_ended_not_given(cloud: Cloud) -> None:
    job = submit(cloud, policy=Policy(deadline_at=NOW + 10))
    assert ask(cloud, now=NOW + 10) is None
    stored = cloud.jobs.get(job.id)
    assert stored is not None
    assert stored.state is JobState.FAILED
    assert stored.reason is not None
    assert stored.reason.code == "deadline"


def test_a_lost_machines_job_is_given_on_behind_the_sweep(cloud: Cloud) -> None:
    held = claim(cloud, submit(cloud))
    for now in (NOW + 60, NOW + 120, revoked_at(held) - 1):
        sweep(cloud.jobs, cloud.leases, FakeClock(now))
        assert ask(cloud, now=now) is None
    sweep(cloud.jobs, cloud.leases, FakeClock(revoked_at(held)))
    claimed = ask(cloud, now=revoked_at(held))
    assert claimed is not None
    assert (claimed.job.id, claimed.job.epoch) == (held.job.id, 2)
    assert claimed.job.counters.interruptions == 1
    with pytest.raises(FenceBroken):
        cloud.leases.heartbeat(held.fence(revoked_at(held)), None, None)


def test_a_claim_ends_no_lease_and_leaves_other_queues_alone(cloud: Cloud) -> None:
    lost = claim(cloud, submit(cloud))
    others = [submit(cloud, policy=Policy(deadline_at=NOW + 10), **more) for more in ({"queue": "x"}, {"tenant": "x"})]
    assert ask(cloud, now=revoked_at(lost)) is None
    assert state_of(cloud, lost.job) is JobState.RUNNING
    assert [state_of(cloud, one) for one in others] == [JobState.PENDING] * 2
    swept = sweep(cloud.jobs, cloud.leases, FakeClock(revoked_at(lost)))
    assert (swept.reclaimed, swept.timers) == (1, 2)


def test_a_job_whose_backoff_is_over_is_given_without_any_sweep(cloud: Cloud) -> None:
    held = claim(cloud, submit(cloud))
    change = failed(held, held.fence(), NOW)
    cloud.jobs.apply(change)
    assert change.job.not_before is not None
    assert ask(cloud, now=change.job.not_before - 1, machine_id="m-2") is None
    claimed = ask(cloud, now=change.job.not_before, machine_id="m-2")
    assert claimed is not None
    assert claimed.job.id == held.job.id


def test_peeking_changes_nothing(cloud: Cloud) -> None:
    submit(cloud, shard=0, now=NOW)
    best = submit(cloud, shard=1, priority=60)
    for _ in range(2):
        found = peek_next(cloud.jobs, WorkQuery(), tenant=TENANT, tags={}, shards=2, now=NOW, original=False)
        assert found == best
    assert peek_next(cloud.jobs, WorkQuery(), tenant=TENANT, tags={}, shards=2, now=NOW, original=True) is None
    assert (
        peek_next(cloud.jobs, WorkQuery(queue="x"), tenant=TENANT, tags={}, shards=2, now=NOW, original=False) is None
    )
    assert len(cloud.members("ready")) == 2


class Spied:
    """A store with something happening just before a call."""

    def __init__(
        self,
        jobs: JobStore,
        *,
        before_apply: Callable[[Transaction], object] = lambda change: None,
        before_ready: Callable[[int], object] = lambda limit: None,
    ) -> None:
        self._jobs, self._before_apply, self._before_ready = jobs, before_apply, before_ready

    def apply(self, change: Transaction) -> None:
        self._before_apply(change)
        self._jobs.apply(change)

    def ready(self, *place: Any, limit: int, cursor: str | None = None) -> ResultPage[Job]:
        self._before_ready(limit)
        return self._jobs.ready(*place, limit=limit, cursor=cursor)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._jobs, name)


def test_a_lost_race_widens_the_window_and_goes_on(cloud: Cloud) -> None:
    for n in range(50):
        submit(cloud, now=NOW + n)
    taken: list[str] = []
    limits: list[int] = []

    def be_faster(change: Transaction) -> None:
        if len(taken) < 2:
            taken.append(change.job.id)
            job = cloud.jobs.get(change.job.id)
            assert job is not None
            claim(cloud, job, token="faster")

    jobs = Spied(cloud.jobs, before_apply=be_faster, before_ready=limits.append)
    window = ClaimWindow()
    claimed = ask(cloud, jobs=jobs, window=window)
    assert claimed is not None
    assert claimed.job.id not in taken
    assert limits == [10, 40, 160]
    assert window.size == 155


def test_a_worker_that_always_loses_is_told_that_there_is_nothing(cloud: Cloud) -> None:
    for n in range(25):
        submit(cloud, now=NOW + n)

    def be_faster(change: Transaction) -> None:
        job = cloud.jobs.get(change.job.id)
        assert job is not None
        claim(cloud, job, token="faster")

    window = ClaimWindow()
    assert ask(cloud, jobs=Spied(cloud.jobs, before_apply=be_faster), window=window) is None
    assert len(cloud.members("ready")) == 25 - job_claim.MAX_CONFLICTS
    assert window.size == LARGEST_WINDOW


def test_the_window_shrinks_slowly() -> None:
    window = ClaimWindow()
    window.narrow()
    assert window.size == SMALLEST_WINDOW
    for _ in range(5):
        window.widen()
    assert window.size == LARGEST_WINDOW
    claims = 0
    while window.size > SMALLEST_WINDOW:
        window.narrow()
        claims += 1
    assert 50 < claims < 200


def test_a_sweep_ends_what_ran_out_and_nothing_else(cloud: Cloud) -> None:
    lost = claim(cloud, submit(cloud))
    alive = claim(cloud, submit(cloud), now=NOW + 60)
    waiting = claim(cloud, submit(cloud), now=NOW + 60)
    change = failed(waiting, waiting.fence(NOW + 61), NOW + 61)
    cloud.jobs.apply(change)
    late = submit(cloud, policy=Policy(deadline_at=NOW + 80))
    swept = sweep(cloud.jobs, cloud.leases, FakeClock(revoked_at(lost)))
    assert swept.as_dict() == {
        "reclaimed": 1,
        "timers": 2,
        "left": 0,
        "more": False,
        "watched": 0,
        "decided": 0,
        "heartbeat_lag_s": revoked_at(lost) - lost.lease.expires_at,
        "queue_age_s": revoked_at(lost) - NOW,
    }
    states = [state_of(cloud, job) for job in (lost.job, alive.job, waiting.job, late)]
    assert states == [JobState.PENDING, JobState.RUNNING, JobState.PENDING, JobState.FAILED]
    assert cloud.members("ready") == {lost.job.id, waiting.job.id}
    again = sweep(cloud.jobs, cloud.leases, FakeClock(revoked_at(lost) + 1))
    assert (again.reclaimed, again.timers, again.left) == (0, 0, 0)


def test_a_sweep_goes_on_while_it_has_time(cloud: Cloud) -> None:
    held = [claim(cloud, submit(cloud)) for _ in range(5)]
    late = [submit(cloud, policy=Policy(deadline_at=NOW + 80)) for _ in range(5)]
    swept = sweep(cloud.jobs, cloud.leases, FakeClock(NOW + 1000), page=2)
    assert (swept.reclaimed, swept.timers, swept.left, swept.more) == (5, 5, 0, False)
    assert all(state_of(cloud, one.job) is JobState.PENDING for one in held)
    assert all(state_of(cloud, job) is JobState.FAILED for job in late)


def test_a_sweep_stops_before_its_time_is_over_and_says_so(cloud: Cloud) -> None:
    held = [claim(cloud, submit(cloud)) for _ in range(5)]
    outcomes = []
    for _ in range(4):
        # Each lease takes a second.
        left_s = iter(range(int(RESERVED_S + TIMERS_S) + 1, 0, -1))
        outcomes.append(
            sweep(cloud.jobs, cloud.leases, FakeClock(NOW + 1000), time_left_s=lambda left=left_s: next(left))
        )
    assert [one.reclaimed for one in outcomes] == [2, 2, 1, 0]
    assert [one.more for one in outcomes] == [True, True, False, False]
    assert all(state_of(cloud, one.job) is JobState.PENDING for one in held)


def test_leases_leave_time_for_timers(cloud: Cloud) -> None:
    lost = [claim(cloud, submit(cloud)) for _ in range(3)]
    late = submit(cloud, policy=Policy(deadline_at=NOW + 80))
    swept = sweep(cloud.jobs, cloud.leases, FakeClock(NOW + 1000), time_left_s=lambda: RESERVED_S + TIMERS_S - 1)
    assert (swept.reclaimed, swept.timers, swept.more) == (0, 1, True)
    assert all(state_of(cloud, one.job) is JobState.RUNNING for one in lost)
    assert state_of(cloud, late) is JobState.FAILED


def test_leases_within_their_grace_take_no_time_from_those_behind_them(cloud: Cloud) -> None:
    """A long lease needs no grace, a short one does."""
    within_grace = [claim(cloud, submit(cloud), now=NOW + 300) for _ in range(3)]
    lost = claim(cloud, submit(cloud, policy=Policy(heartbeat_interval_s=120)), now=NOW + 31)
    assert lost.lease.expires_at == within_grace[0].lease.expires_at + 1
    # Time for one lease.
    left_s = iter([RESERVED_S + TIMERS_S, RESERVED_S])
    swept = sweep(
        cloud.jobs, cloud.leases, FakeClock(lost.lease.expires_at), time_left_s=lambda: next(left_s, RESERVED_S)
    )
    assert (swept.reclaimed, swept.left) == (1, 3)
    assert swept.heartbeat_lag_s == 1
    assert state_of(cloud, lost.job) is JobState.PENDING
    assert all(state_of(cloud, one.job) is JobState.RUNNING for one in within_grace)


def test_metrics_are_reported_before_a_sweep_that_is_ended(cloud: Cloud) -> None:
    lost = claim(cloud, submit(cloud))
    waiting = submit(cloud, queue="elsewhere")
    told: dict[str, int] = {}

    def ended() -> float:
        raise TimeoutError("Lambda ends the function")

    with pytest.raises(TimeoutError):
        sweep(cloud.jobs, cloud.leases, FakeClock(NOW + 1000), time_left_s=ended, report=told.update)
    assert told == {"QueueAge": NOW + 1000 - waiting.updated_at, "HeartbeatLag": NOW + 1000 - lost.lease.expires_at}


def test_after_an_outage_workers_may_prove_their_leases_first(cloud: Cloud) -> None:
    lost, alive = claim(cloud, submit(cloud)), claim(cloud, submit(cloud))
    sweep(cloud.jobs, cloud.leases, FakeClock(NOW))
    back = NOW + NOTICED_S
    swept = sweep(cloud.jobs, cloud.leases, FakeClock(back))
    assert (swept.reclaimed, swept.left) == (0, 2)
    prolonged = cloud.leases.heartbeat(alive.fence(back + 20), None, None)
    window_s = renewal_window_s(lost.lease.heartbeat_interval_s)
    assert sweep(cloud.jobs, cloud.leases, FakeClock(back + window_s - 1)).reclaimed == 0
    swept = sweep(cloud.jobs, cloud.leases, FakeClock(back + window_s))
    assert (swept.reclaimed, swept.left) == (1, 0)
    assert (state_of(cloud, lost.job), state_of(cloud, alive.job)) == (JobState.PENDING, JobState.RUNNING)
    assert cloud.leases.get(alive.job.id) == prolonged


def test_while_the_watch_is_kept_lost_machines_are_noticed_after_the_grace_of_their_leases(cloud: Cloud) -> None:
    held = claim(cloud, submit(cloud), now=NOW + 5)
    for minute in range(3):
        assert sweep(cloud.jobs, cloud.leases, FakeClock(NOW + 60 * minute)).reclaimed == 0
    assert sweep(cloud.jobs, cloud.leases, FakeClock(revoked_at(held))).reclaimed == 1
    assert cloud.leases.reclaim_watermark() == ReclaimWatermark(seen_at=revoked_at(held), since=0)


def test_an_api_that_does_not_answer_is_an_outage(cloud: Cloud) -> None:
    claim(cloud, submit(cloud))
    assert sweep(cloud.jobs, cloud.leases, FakeClock(NOW + 200), api_answers=lambda: False).reclaimed == 0
    assert cloud.leases.reclaim_watermark() == ReclaimWatermark(seen_at=0, since=NOW + 200)
    assert sweep(cloud.jobs, cloud.leases, FakeClock(NOW + 260)).reclaimed == 0
    assert sweep(cloud.jobs, cloud.leases, FakeClock(NOW + 320)).reclaimed == 1


def test_an_outage_lasts_until_the_api_has_not_answered_in_time(cloud: Cloud) -> None:
    claim(cloud, submit(cloud))
    clock = FakeClock(NOW + 200)

    def waited_for() -> bool:
        clock.advance(20)
        return False

    sweep(cloud.jobs, cloud.leases, clock, api_answers=waited_for)
    assert cloud.leases.reclaim_watermark() == ReclaimWatermark(seen_at=0, since=NOW + 220)


def test_an_idle_deployment_asks_the_api_nothing(cloud: Cloud) -> None:
    def asked() -> bool:
        raise AssertionError("asked")

    sweep(cloud.jobs, cloud.leases, FakeClock(NOW), api_answers=asked)
    assert cloud.leases.reclaim_watermark() == ReclaimWatermark(seen_at=NOW)


def test_the_watch_is_kept_by_every_sweep(cloud: Cloud) -> None:
    for now in (NOW, NOW + 60):
        assert record_watermark(cloud.leases, FakeClock(now), sweep_interval_s=60) == ReclaimWatermark(seen_at=now)
    after = NOW + 60 + NOTICED_S
    assert record_watermark(cloud.leases, FakeClock(after), sweep_interval_s=60) == ReclaimWatermark(
        seen_at=after, since=after
    )
    assert cloud.leases.reclaim_watermark() == ReclaimWatermark(seen_at=after, since=after)


def test_two_that_look_at_once_after_an_outage_see_the_same_gap(cloud: Cloud) -> None:
    record_watermark(cloud.leases, FakeClock(NOW), sweep_interval_s=60)
    back = NOW + NOTICED_S

    class Slow:
        """Reads the watch, and is overtaken before it writes."""

        def due_pages(self, now: int, *, size: int) -> Iterator[list[str]]:
            return cloud.leases.due_pages(now, size=size)

        def reclaim_watermark(self) -> ReclaimWatermark | None:
            return cloud.leases.reclaim_watermark()

        def save_reclaim_watermark(self, watch: ReclaimWatermark, *, seen: ReclaimWatermark | None) -> bool:
            record_watermark(cloud.leases, FakeClock(back), sweep_interval_s=60)
            return cloud.leases.save_reclaim_watermark(watch, seen=seen)

    watch = record_watermark(Slow(), FakeClock(back + 1), sweep_interval_s=60)  # type: ignore[arg-type]
    assert watch.since == back
    assert cloud.leases.reclaim_watermark() == ReclaimWatermark(seen_at=back, since=back)


def test_a_timer_that_is_not_due_does_nothing(cloud: Cloud) -> None:
    job = submit(cloud, policy=Policy(deadline_at=NOW + 10))
    assert not run_timer(cloud.jobs, job.id, NOW + 9)
    assert not run_timer(cloud.jobs, "unknown", NOW)
    assert cloud.jobs.get(job.id) == job
    assert run_timer(cloud.jobs, job.id, NOW + 10)
    assert not run_timer(cloud.jobs, job.id, NOW + 10)


def test_a_deadline_ends_a_running_attempt(cloud: Cloud) -> None:
    held = claim(cloud, submit(cloud, policy=Policy(deadline_at=NOW + 10)))
    assert run_timer(cloud.jobs, held.job.id, NOW + 10)
    lease = cloud.leases.get(held.job.id)
    assert lease is not None
    assert lease.closed == "failed"
    assert state_of(cloud, held.job) is JobState.FAILED


def test_a_job_whose_time_is_used_up_is_ended_by_its_heartbeat(cloud: Cloud) -> None:
    held = claim(cloud, submit(cloud, policy=Policy(max_runtime_s=50)))
    assert end_overdue_job(cloud.jobs, held.job.id, 7, NOW + 50) == "max_runtime"
    assert cloud.jobs.get(held.job.id) == held.job
    assert end_overdue_job(cloud.jobs, held.job.id, 1, NOW + 50) == "max_runtime"
    ended = cloud.jobs.get(held.job.id)
    assert ended is not None
    assert ended.state is JobState.FAILED
    assert end_overdue_job(cloud.jobs, held.job.id, 1, NOW + 51) == "max_runtime"
    assert cloud.jobs.get(held.job.id) == ended


def test_a_cancel_that_is_faster_than_the_clock_stays_a_cancel(cloud: Cloud) -> None:
    held = claim(cloud, submit(cloud, policy=Policy(max_runtime_s=50)))
    done: list[str] = []

    def cancel_first(change: Transaction) -> None:
        if not done:
            done.append("canceled")
            cloud.jobs.apply(rules.cancel(held.job, held.attempt, message="", now=NOW))

    jobs: Any = Spied(cloud.jobs, before_apply=cancel_first)
    assert end_overdue_job(jobs, held.job.id, 1, NOW + 50) == "canceled_by_user"
    assert state_of(cloud, held.job) is JobState.CANCELED
