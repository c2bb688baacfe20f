"""Test an elastic job under disturbance: functions die at any write, and other calls come between two writes.

After the next sweep the job and its seats say the same, no seat of an ended job can be claimed, and no claim is counted
twice.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from functions.domain.records import Job
from functions.domain.worlds.seat_ids import seat_ids
from tests.kits.api.harness import Api, Held, memory_api
from tests.properties.scaling_machine import DIES_AT, MortalJobs
from tests.properties.watching_machine import Died

SEATS = 3
WHICH = st.integers(0, 9)
STEERING = st.sampled_from(["stop", "pause", "resume", "retry"])
BETWEEN = st.tuples(
    st.sampled_from(["", "", "", "stop", "pause", "resume", "retry", "sweep", "claim"]), st.integers(0, 4)
)
"""A call that comes between two writes, and the number of writes before the call."""
ALONE = ("", 0)


class DisturbedJobs(MortalJobs):
    """A store that lets some writes pass before the call that comes between two writes."""

    waits: int = 0

    def _write(self, write: Callable[[], None]) -> None:
        if self.between is None or self.waits == 0:
            super()._write(write)
            return
        self.waits -= 1
        later, self.between = self.between, None
        try:
            super()._write(write)
        finally:
            self.between = later


class ElasticJob(RuleBasedStateMachine):
    """An elastic job of three nodes, its workers and its user."""

    api: Api
    store: DisturbedJobs
    job: str
    held: list[Held]

    @initialize(failures=st.integers(1, 3))
    def begin(self, failures: int) -> None:
        """Submit the job."""
        self.api = memory_api()
        assert self.api.memory is not None
        self.store = DisturbedJobs(self.api.memory.state)
        self.api.context = dataclasses.replace(self.api.context, jobs=self.store)
        self.job = self.api.submit(nodes={"max": SEATS}, policy={"max_failures": failures})["id"]
        self.held = []

    @rule(dies_at=DIES_AT, behind=st.booleans(), between=BETWEEN)
    def claim(self, dies_at: int, behind: bool, between: tuple[str, int]) -> None:
        """Claim a seat."""
        self.run(self.ask, dies_at, behind, between)

    @rule(which=WHICH, end=st.sampled_from(["complete", "fail", "release"]), dies_at=DIES_AT, behind=st.booleans())
    def end(self, which: int, end: str, dies_at: int, behind: bool) -> None:
        """End an attempt; a worker whose call was lost repeats the call."""
        if self.held:
            node = self.held.pop(which % len(self.held))
            self.run(lambda: node.post(f"/{end}", {"job_id": node.id}), dies_at, behind, ALONE)
            node.post(f"/{end}", {"job_id": node.id})

    @rule(call=STEERING, dies_at=DIES_AT, behind=st.booleans(), between=BETWEEN)
    def steer(self, call: str, dies_at: int, behind: bool, between: tuple[str, int]) -> None:
        """Make a call of the user."""
        self.run(lambda: self.api.post(f"/job/{self.job}/{call}"), dies_at, behind, between)

    @rule(seconds=st.sampled_from([20, 400]), dies_at=DIES_AT, behind=st.booleans(), between=BETWEEN)
    def sweep(self, seconds: int, dies_at: int, behind: bool, between: tuple[str, int]) -> None:
        """Let time pass, and sweep; workers whose leases were revoked come back with a heartbeat, or never."""
        self.api.clock.advance(seconds)
        self.run(self.api.sweep, dies_at, behind, between)
        self.held = [node for node in self.held if node.heartbeat().status == 200]

    @invariant()
    def job_and_seats_agree_after_a_sweep(self) -> None:
        """Sweep without disturbance, and compare."""
        self.api.sweep()
        check_agreement(self.api, self.job)

    def ask(self) -> None:
        """Ask for work."""
        work = self.api.get("/work", headers={"x-lease-aware": "1"}, query={"runs_nodes": "true"}).ok()
        self.held += [Held(self.api, item) for item in work]

    def run(self, call: Callable[[], object], dies_at: int, behind: bool, between: tuple[str, int]) -> None:
        """Make a call whose function may die, and between whose writes another call may come."""
        name, self.store.waits = between
        others: dict[str, Callable[[], object]] = {"": lambda: None, "sweep": self.api.sweep, "claim": self.ask}
        self.store.between = others.get(name, lambda: self.api.post(f"/job/{self.job}/{name}"))
        self.store.dies_at, self.store.behind = dies_at, behind
        with contextlib.suppress(Died):
            call()
        self.store.dies_at, self.store.between = 0, None


def read_seats(api: Api, job: Job) -> list[Job]:
    """Read the seats of an elastic job, in order."""
    assert job.spec.nodes is not None
    return list(api.context.jobs.get_many(seat_ids(job.id, job.spec.nodes.max)))


def check_agreement(api: Api, job_id: str) -> None:
    """Check that an elastic job and its seats say the same, and that another sweep changes nothing."""
    job = api.context.jobs.get(job_id)
    assert job is not None
    seats = read_seats(api, job)
    if job.state.terminal:
        assert job.settled and all(one.state.terminal for one in seats)
    else:
        assert {one.generation for one in seats} == {job.generation}
        assert (job.state.value == "running") == any(one.state.value == "running" for one in seats)
        pauses = job.pause_requested or job.state.value == "paused"
        assert all(pauses == (one.pause_requested or one.state.value == "paused") for one in seats)
    assert job.epoch == sum(one.epoch for one in seats) == job.counters.attempts
    assert [one.epoch for one in job.seats] == [one.epoch for one in seats]
    with api.unchanged():
        api.sweep()
