"""A watched job whose looks are disturbed: by other looks between reading and writing, and by functions that die.

What a rule has done is counted in three places that are written together: its own counter, the events, the commands
that it gave. Whatever happens, they say the same; and nothing that the training reports undisturbed is missed.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from functions.domain.jobs.transaction import Put, Transaction
from functions.domain.records import RuleStateRecord
from functions.domain.rules.rule_evaluation import unpack_state
from tests.kits.api.harness import Api, Held, memory_api
from tests.twins.jobs import MemoryJobStore

ONE = "{name: high, when: loss > 5, on: [heartbeat, timer], do: {set: {knob: lr, factor: 0.5}}}"
TWO = "{name: long, when: count(loss) >= 3 and failures == 0, do: {alert: x}, clear: failures > 99}"
RULES = f"rules: [{ONE}, {TWO}]"
"""Rules that keep their counters when `AGAIN` gives them in another order."""
AGAIN = f"rules: [{TWO}, {ONE}]"


class Died(BaseException):
    """The function was ended."""


class DisturbedJobs(MemoryJobStore):
    """Does what it is told ahead of the next write, and may die before or behind it."""

    between: Callable[[], object] | None = None
    dies: str = ""

    def apply(self, change: Transaction) -> None:
        self._disturbed(lambda: super(DisturbedJobs, self).apply(change))

    def put(self, write: Put) -> None:
        self._disturbed(lambda: super(DisturbedJobs, self).put(write))

    def _disturbed(self, write: Callable[[], None]) -> None:
        between, self.between = self.between, None
        dies, self.dies = self.dies, ""
        if between is not None:
            between()
        if dies == "before":
            raise Died
        write()
        if dies == "behind":
            raise Died


LOSSES = st.sampled_from([1.0, 4.0, 6.0, 9.0])
DEATHS = st.sampled_from(["", "", "before", "behind"])
BETWEEN = st.sampled_from(["", "", "heartbeat", "sweep", "command", "rules"])


class WatchedJob(RuleBasedStateMachine):
    """A watched job, its worker, and the functions that evaluate its rules."""

    api: Api
    held: Held
    store: DisturbedJobs

    @initialize()
    def begin(self) -> None:
        """Submit a job with rules, and claim it."""
        self.api = memory_api()
        assert self.api.memory is not None
        self.store = DisturbedJobs(self.api.memory.state)
        self.api.context = dataclasses.replace(self.api.context, jobs=self.store)
        self.api.submit(rules=RULES, policy={"heartbeat_interval_s": 600})
        self.held = self.api.claim()
        self.step = 0
        self.turn = 0

    @rule(loss=LOSSES, between=BETWEEN, dies=DEATHS)
    def heartbeat(self, loss: float, between: str, dies: str) -> None:
        """Send a heartbeat with a report, disturbed or not."""
        self._disturb(between, dies)
        self._survive(lambda: self._beat(loss))

    @rule(between=BETWEEN, dies=DEATHS)
    def sweep(self, between: str, dies: str) -> None:
        """Let the sweeper run."""
        self.api.clock.advance(60)
        self._disturb(between, dies)
        self._survive(self.api.sweep)

    @rule(dies=DEATHS)
    def give_rules(self, dies: str) -> None:
        """Give the job the same rules in another order."""
        self._disturb("", dies)
        self._survive(self._give_rules)

    @precondition(lambda self: self.step > 0)
    @rule()
    def rising_edge(self) -> None:
        """Report a low and then a high loss, undisturbed: the rule fires once."""
        self._beat(1.0)
        before = self._fires()["high"]
        self._beat(9.0)
        self._beat(9.0)
        self.api.clock.advance(60)
        self.api.sweep()
        assert self._fires()["high"] == before + 1

    @invariant()
    def all_three_say_the_same(self) -> None:
        """Check that the counter, the events and the commands agree."""
        rule_state = self.store.read(RuleStateRecord, self.held.id)
        assert rule_state is not None
        fires = self._fires()
        events = self.api.get(f"/job/{self.held.id}/events", query={"limit": 1000}).ok()["events"]
        for name in ("high", "long"):
            of_rule = [one["type"] for one in events if one["data"].get("rule") == name]
            assert of_rule.count("rule.fired") == fires[name]
            assert of_rule.count("action.applied") + of_rule.count("action.rejected") == fires[name]
        given = [one for one in self.store.commands(self.held.id) if one.rule == "high"]
        assert len(given) == fires["high"], "fewer than are kept"
        assert fires["long"] <= 1

    def teardown(self) -> None:
        """Check that the rule state has counted each reported point at most once."""
        if hasattr(self, "api"):
            self._beat(1.0)
            rule_state = self.store.read(RuleStateRecord, self.held.id)
            assert rule_state is not None and rule_state.state is not None
            assert rule_state.step == self.step
            assert unpack_state(rule_state.state)["metrics"]["loss"]["total"] <= self.step

    def _beat(self, loss: float) -> None:
        self.api.clock.advance(1)
        self.step += 1
        self.held.heartbeat(step=self.step, metrics={"loss": loss}).ok()

    def _give_rules(self) -> None:
        self.turn += 1
        text = AGAIN if self.turn % 2 else RULES
        self.api.call("PUT", f"/job/{self.held.id}/rules", {"text": text}).ok()

    def _disturb(self, between: str, dies: str) -> None:
        acts: dict[str, Callable[[], Any]] = {
            "heartbeat": lambda: self._beat(7.0),
            "sweep": self.api.sweep,
            "command": lambda: self.api.post(f"/job/{self.held.id}/commands", {"kind": "save"}).ok(),
            "rules": self._give_rules,
        }
        self.store.between, self.store.dies = acts.get(between), dies

    def _survive(self, act: Callable[[], object]) -> None:
        with contextlib.suppress(Died):
            act()
        self.store.between, self.store.dies = None, ""

    def _fires(self) -> dict[str, int]:
        rule_state = self.store.read(RuleStateRecord, self.held.id)
        assert rule_state is not None
        rules = unpack_state(rule_state.state)["rules"] if rule_state.state is not None else {}
        return {name: rules.get(name, {}).get("fires", 0) for name in ("high", "long")}
