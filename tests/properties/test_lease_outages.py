"""Leases while the API is away, slow or throttling, and while the sweeper is: no live worker loses its attempt.

Workers renew as the agent does, at its slowest: a call that takes its whole budget, then the longest pause. The API and
the sweeper come and go by chance; other workers claim whatever waits. One step is one second.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.contract.errors import ErrorCode
from baton.contract.worker.lease_grace import (
    LEASE_INTERVALS,
    RETRY_PAUSES,
    heartbeat_budget_s,
    renewal_window_s,
    revocation_grace_s,
    unseen_outage_s,
)
from functions.api.operations.sweeper import sweep
from functions.api.worker.lease_guard import renew_lease
from functions.domain.access.api_keys import token_digest
from functions.domain.errors import FenceBroken, Refusal
from functions.domain.jobs.lease_expiry import ReclaimWatermark, is_reclaimable, update_watermark
from functions.domain.jobs.lease_fence import Fence
from tests.kits.api.factories import make_lease
from tests.kits.api.harness import TENANT, Api, Held, memory_api


@dataclass
class SimulatedWorker:
    """A worker that holds one job. `dies_at`: the moment at which its machine is gone."""

    held: Held
    interval_s: int
    next_at: int
    hangs: bool
    dies_at: int | None
    refused: Refusal | None = None
    call_ends_at: int | None = None

    def step(self, now: int, *, served: bool) -> None:
        """Do what the agent does in this second."""
        if self.refused is not None or (self.dies_at is not None and now >= self.dies_at):
            return
        if self.call_ends_at is not None:
            # The call hangs until its budget is spent.
            if now >= self.call_ends_at:
                self.call_ends_at = None
                self.next_at = now + max(self.interval_s // RETRY_PAUSES, 1)
        elif now >= self.next_at:
            if served:
                self._renew()
                self.next_at = now + self.interval_s
            elif self.hangs:
                self.call_ends_at = now + int(heartbeat_budget_s(self.interval_s))
            else:
                self.next_at = now + max(self.interval_s // RETRY_PAUSES, 1)

    def _renew(self) -> None:
        api, job_id = self.held.api, self.held.id
        digest = token_digest(self.held.token or "")
        fence = Fence(job_id=job_id, tenant=TENANT, now=api.clock.now(), epoch=1, token_sha256=digest)
        try:
            renew_lease(api.context, fence, None, None)
        except FenceBroken as broken:
            self.refused = fence.refusal(broken.lease)


def phases(draw: st.DrawFn, *, up_s: int, longest_s: int, blink_s: int) -> list[bool]:
    """Draw for each second of a run if something is there: for `up_s` at least, then away, for `blink_s` or longer."""
    seconds: list[bool] = []
    away = st.integers(1, blink_s) | st.integers(1, longest_s)
    for _ in range(draw(st.integers(0, 3))):
        seconds += [True] * draw(st.integers(up_s, up_s + 90)) + [False] * draw(away)
    return seconds


@st.composite
def runs(draw: st.DrawFn, *, flapping: bool) -> dict[str, object]:
    interval_s = draw(st.sampled_from([1, 6, 30, 60]))
    sweep_interval_s = draw(st.sampled_from([1, 10, 60]))
    # An API that is never there for as long as a worker needs to come back cannot be told from a dead worker's.
    shortest_up_s = 1 if flapping else renewal_window_s(interval_s) + interval_s
    return {
        "interval_s": interval_s,
        "sweep_interval_s": sweep_interval_s,
        "api": phases(draw, up_s=shortest_up_s, longest_s=5 * interval_s + 100, blink_s=sweep_interval_s),
        "sweeper": phases(draw, up_s=100, longest_s=200, blink_s=sweep_interval_s) if draw(st.booleans()) else [],
        "claimant": draw(st.booleans()) if flapping else True,
        "first_sweep_at": draw(st.integers(0, sweep_interval_s)),
        "deaths": draw(st.lists(st.none() | st.integers(0, 400), min_size=1, max_size=3)),
        "hangs": draw(st.booleans()),
        "first_beats": draw(st.lists(st.integers(0, interval_s), min_size=3, max_size=3)),
    }


class Outages:
    """One run: workers, an API and a sweeper that come and go, and a claimant that takes whatever waits."""

    def __init__(self, run: dict[str, object]) -> None:
        self.api: Api = memory_api()
        self.began_at = self.api.clock.now()
        self.run = run
        self.interval_s = int(str(run["interval_s"]))
        self.sweep_interval_s = int(str(run["sweep_interval_s"]))
        self.workers: list[SimulatedWorker] = []
        for number, dies_at in enumerate(run["deaths"]):  # type: ignore[var-annotated, arg-type]
            self.api.submit(policy={"heartbeat_interval_s": self.interval_s})
            held = self.api.claim(machine_id=f"m-{number}")
            first = run["first_beats"][number]  # type: ignore[index]
            self.workers.append(SimulatedWorker(held, self.interval_s, first, bool(run["hangs"]), dies_at))
        self.claimed: set[str] = set()
        """Jobs that another worker has claimed."""

    def served(self, second: int) -> bool:
        """Return True if the API answers in this second."""
        up: list[bool] = self.run["api"]  # type: ignore[assignment]
        return up[second] if second < len(up) else True

    def sweeps(self, second: int) -> bool:
        """Return True if the sweeper runs in this second."""
        there: list[bool] = self.run["sweeper"]  # type: ignore[assignment]
        due = (second - int(str(self.run["first_sweep_at"]))) % self.sweep_interval_s == 0
        return due and (there[second] if second < len(there) else True)

    @property
    def quiet_at(self) -> int:
        """The second from which on nothing is away and no machine dies any more."""
        lengths = [len(self.run[name]) for name in ("api", "sweeper")]  # type: ignore[arg-type]
        return max(*lengths, *(worker.dies_at or 0 for worker in self.workers))

    def simulate(self, until: int) -> None:
        """Let the seconds pass."""
        waiting = False
        for second in range(until):
            self.api.clock.at = self.began_at + second
            for worker in self.workers:
                worker.step(second, served=self.served(second))
            if self.sweeps(second):
                swept = sweep(
                    self.api.context.jobs,
                    self.api.context.leases,
                    self.api.clock,
                    sweep_interval_s=self.sweep_interval_s,
                    api_answers=lambda second=second: self.served(second),  # type: ignore[misc]
                )
                waiting = bool(self.run["claimant"]) and (waiting or swept.reclaimed > 0)
            while waiting and self.served(second):
                work = self.api.get("/work", headers={"x-lease-aware": "1"}, query={"machine_id": "idle"}).ok()
                self.claimed |= {job["id"] for job in work}
                waiting = bool(work)


def recovery_bound_s(interval_s: int, sweep_interval_s: int) -> int:
    """Return the seconds after which a dead worker's job has another owner, once everything is there."""
    lease_s = LEASE_INTERVALS * interval_s + revocation_grace_s(interval_s, sweep_interval_s)
    return max(lease_s, sweep_interval_s + renewal_window_s(interval_s)) + sweep_interval_s + 1


@settings(max_examples=100, deadline=None)
@given(run=runs(flapping=False))
def test_no_outage_costs_a_live_worker_its_attempt_and_every_dead_ones_job_goes_on(run: dict[str, object]) -> None:
    outages = Outages(run)
    bound_s = recovery_bound_s(outages.interval_s, outages.sweep_interval_s)
    # The idle worker's own claims die with it in this test, which ends before they are revoked.
    outages.simulate(outages.quiet_at + bound_s)
    for worker in outages.workers:
        if worker.dies_at is None:
            assert worker.refused is None and worker.held.id not in outages.claimed
            assert outages.api.job(worker.held.id)["counters"]["interruptions"] == 0
        else:
            assert worker.held.id in outages.claimed, "a dead worker's job was not given to another"


@settings(max_examples=100, deadline=None)
@given(run=runs(flapping=True))
def test_whatever_the_api_does_only_another_owner_ends_an_attempt(run: dict[str, object]) -> None:
    """A heartbeat is refused only if another worker holds the job, even if the API is never up for long."""
    outages = Outages(run)
    outages.simulate(outages.quiet_at + 2 * outages.interval_s + 2)
    for worker in outages.workers:
        if worker.refused is not None:
            assert worker.held.id in outages.claimed
            assert worker.refused.code is ErrorCode.LEASE_LOST
        elif worker.dies_at is None:
            assert worker.held.id not in outages.claimed
            job = outages.api.job(worker.held.id)
            assert (job["state"], job["counters"]["interruptions"]) == ("running", 0)


def test_the_numbers_of_a_minutes_sweeper() -> None:
    """Documented in docs/architecture.md."""
    assert (unseen_outage_s(60), renewal_window_s(30), revocation_grace_s(30)) == (75, 40, 56)


@given(sweep_interval_s=st.integers(4, 600), interval_s=st.integers(1, 600))
def test_an_outage_between_two_sweeps_ends_no_lease(sweep_interval_s: int, interval_s: int) -> None:
    """The worst one: it begins as a heartbeat is due, just after a sweep, and ends just before the latest next one."""
    renewed_at = 0
    outage_from = renewed_at + interval_s
    outage_until = outage_from + unseen_outage_s(sweep_interval_s)
    lease = make_lease(
        duration_s=LEASE_INTERVALS * interval_s,
        heartbeat_interval_s=interval_s,
        expires_at=renewed_at + LEASE_INTERVALS * interval_s,
    )
    watch = update_watermark(
        ReclaimWatermark(seen_at=outage_from), outage_until, sweep_interval_s=sweep_interval_s, served=True
    )
    assert watch.since == 0, "noticed"
    before_it_renews = outage_until + renewal_window_s(interval_s)
    assert not is_reclaimable(lease, watch, before_it_renews, sweep_interval_s=sweep_interval_s)
