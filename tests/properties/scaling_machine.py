"""Test two jobs whose rules scale one group, with functions that die at any write and concurrent calls.

A rule's decision becomes an order; the function that executes the order may die at each of its writes. The group still
reaches the decided size, each job changes once, and the group is never larger or smaller than the rules allow.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from baton.contract.jobs.job import JobState
from functions.domain.jobs.transaction import Put, Transaction
from functions.domain.records import Job, RuleStateRecord
from tests.kits.api.harness import TENANT, Api, Held, memory_api
from tests.properties.watching_machine import Died
from tests.twins.jobs import MemoryJobStore

MOST, LEAST = 6, 2
STEPS = 3
RULES = f"""
rules:
  - {{name: grow, when: more > 0, on: heartbeat, do: {{scale: {{group: g, delta: {STEPS}, most: {MOST}}}}}}}
  - {{name: shrink, when: fewer > 0, on: heartbeat, do: {{scale: {{group: g, delta: -{STEPS}, least: {LEAST}}}}}}}
"""
BY = st.sampled_from([0, 1])
WANTS = st.sampled_from([(1.0, 0.0), (0.0, 1.0)])
DIES_AT = st.sampled_from([*[0] * 7, *range(1, 8)])
"""The write that a function dies at, counted from 1; 0: at none."""
BETWEEN = st.sampled_from(["", "", "sweep", "other"])


class MortalJobs(MemoryJobStore):
    """A store that dies before or after a chosen write, and runs another call before its next write."""

    dies_at: int = 0
    behind: bool = False
    between: Callable[[], object] | None = None

    def apply(self, change: Transaction) -> None:
        self._write(lambda: super(MortalJobs, self).apply(change))

    def put(self, write: Put) -> None:
        self._write(lambda: super(MortalJobs, self).put(write))

    def _write(self, write: Callable[[], None]) -> None:
        between, self.between = self.between, None
        if between is not None:
            between()
        self.dies_at -= 1
        if self.dies_at == 0 and not self.behind:
            raise Died
        write()
        if self.dies_at == 0:
            raise Died


class ScaledGroup(RuleBasedStateMachine):
    """Two trainings, the group that both scale, and its workers."""

    api: Api
    store: MortalJobs
    trainings: list[Held]

    @initialize()
    def begin(self) -> None:
        """Make two trainings, and a group of the least number of jobs that the rules leave."""
        self.api = memory_api()
        assert self.api.memory is not None
        self.store = MortalJobs(self.api.memory.state)
        self.api.context = dataclasses.replace(self.api.context, jobs=self.store)
        self.trainings = []
        for number in range(2):
            self.api.submit(queue="t", rules=RULES, policy={"heartbeat_interval_s": 600})
            self.trainings.append(self.api.claim(queue="t", machine_id=f"t-{number}"))
        for _ in range(LEAST):
            self.api.submit(queue="g", tags={"group": "g"}, policy={"heartbeat_interval_s": 600})
            self.api.clock.advance(1)
        self.workers: list[Held] = []
        self.step = 0

    @rule(by=BY, wants=WANTS, dies_at=DIES_AT, behind=st.booleans(), between=BETWEEN, claimed=st.booleans())
    def heartbeat(
        self, by: int, wants: tuple[float, float], dies_at: int, behind: bool, between: str, claimed: bool
    ) -> None:
        """Send a training's heartbeat, at which rules may fire; the function may die, or another call come between."""
        if claimed:
            self._work()
        acts: dict[str, Callable[[], Any]] = {
            "sweep": self.api.sweep,
            "other": lambda: self._beat(1 - by, wants),
        }
        self._beat(by, (0.0, 0.0))  # both rules are ready again
        self.store.between = acts.get(between)
        self._mortal(dies_at, behind, lambda: self._beat(by, wants))

    @rule(dies_at=DIES_AT, behind=st.booleans())
    def sweep(self, dies_at: int, behind: bool) -> None:
        """Let the sweeper run; its function may die."""
        self.api.clock.advance(60)
        self._mortal(dies_at, behind, self.api.sweep)

    @rule()
    def end(self) -> None:
        """End a worker as its directive says."""
        told = [one for one in self.workers if self.store.get(one.id).leaving]  # type: ignore[union-attr]
        for worker in told[:1]:
            assert [one["kind"] for one in worker.report().ok()["commands"]] == ["stop"]
            worker.complete().ok()
            self.workers.remove(worker)

    @invariant()
    def bounds_hold(self) -> None:
        """Check the bounds of the group, for all its jobs and for those that go on."""
        live = self._group()
        assert LEAST <= len([job for job in live if not job.leaving]) <= len(live) <= MOST

    @invariant()
    def each_is_told_once(self) -> None:
        """Check that each canceled job received one order, and only while it ran."""
        for job in self._all():
            stops = self.store.commands(job.id)
            assert len(stops) == int(job.leaving)
            submitted = [one for one in self.api.events(job.id) if one == "job.submitted"]
            assert len(submitted) == 1

    def teardown(self) -> None:
        """Check that every decision was executed: the group has the size that the events tell."""
        if not hasattr(self, "trainings"):
            return
        for _ in range(3):
            self.api.clock.advance(60)
            self.api.sweep()
        copies = taken = 0
        for held in self.trainings:
            rule_state = self.store.read(RuleStateRecord, held.id)
            assert rule_state is not None and rule_state.orders == []
            for event in self.api.get(f"/job/{held.id}/events", query={"limit": 1000}).ok()["events"]:
                if event["type"] == "action.applied":
                    made, gone = _counts(event["data"]["message"])
                    copies, taken = copies + made, taken + gone
                assert event["type"] != "action.failed"
        jobs = self._all()
        assert len([job for job in jobs if job.copy_of]) == copies
        ending = [job for job in jobs if job.leaving or job.state is JobState.CANCELED]
        assert len(ending) == taken
        record = self.store.scaling(TENANT, "g")
        assert record is None or record.leaving == []

    def _beat(self, by: int, wants: tuple[float, float]) -> None:
        self.api.clock.advance(1)
        self.step += 1
        self.trainings[by].heartbeat(step=self.step, metrics={"more": wants[0], "fewer": wants[1]}).ok()

    def _work(self) -> None:
        while any(job.claimable for job in self._group()):
            self.workers.append(self.api.claim(queue="g", machine_id=f"g-{len(self.workers)}"))

    def _mortal(self, dies_at: int, behind: bool, act: Callable[[], object]) -> None:
        self.store.dies_at, self.store.behind = dies_at, behind
        with contextlib.suppress(Died):
            act()
        self.store.dies_at, self.store.between = 0, None

    def _all(self) -> list[Job]:
        jobs = self.store.list_jobs(TENANT, state=None, limit=1000).items
        return [job for job in jobs if job.spec.tags.get("group") == "g"]

    def _group(self) -> list[Job]:
        return [job for job in self._all() if not job.state.terminal]


def _counts(said: str) -> tuple[int, int]:
    """Return the numbers of copied and of canceled jobs in the message of an event."""
    made = gone = 0
    for part in said.split("; "):
        what = part.split(": ", 1)[1].split()
        if what[1].startswith("cop"):
            made += int(what[0])
        else:
            gone += int(what[0])
    return made, gone
