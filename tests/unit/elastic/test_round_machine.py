"""The promises of rounds hold after any sequence of deaths, hangs, false suspicions, lost answers and outages."""

from __future__ import annotations

import random

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gpu_client.elastic.codecs import CODECS
from gpu_client.elastic.rounds.round_actions import CallWorld, ExchangeStatus, FetchParts, OpenGroup, ReduceBuckets
from tests.kits.elastic.simulation import SimulatedNode, Simulation
from tests.properties.profiles import machine_settings

SEATS = 4
GAINS = (0.125, 0.25, -0.125, 0.5)
seeds = st.integers(0, 1 << 30)
phases = st.sampled_from([ReduceBuckets, ReduceBuckets, ExchangeStatus, OpenGroup, FetchParts, CallWorld])
failures = st.sampled_from(["suspect", "kill", "hang", "end", "lose"])


class RoundMachine(RuleBasedStateMachine):
    """Each rule lets nodes act in a random order, and breaks something; at the end all heals, and rounds go on."""

    @initialize(
        least=st.integers(1, 3),
        overlap=st.booleans(),
        codec=st.sampled_from([None, "int4"]),
        fragments=st.sampled_from([1, 2, 3]),
    )
    def begin(self, least: int, overlap: bool, codec: str | None, fragments: int) -> None:
        self.sim = Simulation(least, SEATS)
        self.settings = {
            "overlap": overlap,
            "feedback": CODECS[codec] if codec else None,
            "fragments": fragments,
        }
        self.revive(3)

    def live(self) -> list[SimulatedNode]:
        return [one for one in self.sim.nodes.values() if one.name not in self.sim.network.hung]

    def revive(self, least: int) -> None:
        """Start nodes at seats without a process, then resume hung nodes, until `least` nodes are live."""
        used = {int(one.split(".")[0]) for one in self.sim.nodes}
        for seat in set(range(SEATS)) - used:
            if len(self.live()) < least:
                self.sim.start(seat, value=float(seat), **self.settings)
        while self.sim.network.hung and len(self.live()) < least:
            self.sim.network.hung.remove(min(self.sim.network.hung))

    def run(self, turns: int, seed: int) -> None:
        """Let nodes act in a random order; a late answer of a lost peer may or may not arrive."""
        chance = random.Random(seed)
        for _ in range(turns):
            for node in chance.choices(self.live(), k=len(self.live())) if self.live() else ():
                node.advance(prefers_loss=chance.random() < 0.5)
                if chance.random() < 0.5:
                    node.train(GAINS[int(node.name[0])])

    @rule(nodes=st.integers(2, SEATS), phase=phases, parts=st.integers(0, 4), failure=failures, seed=seeds)
    def fail_in(self, nodes: int, phase: type, parts: int, failure: str, seed: int) -> None:
        """Run until a node is in the phase and some parts are done; then nodes fail, and the others go on."""
        chance = random.Random(seed)
        self.revive(nodes)
        for _ in range(60):
            if any(isinstance(one.action, phase) for one in self.live()):
                break
            self.run(1, chance.randrange(1 << 30))
        for _ in range(parts):
            chance.choice(self.live()).advance(prefers_loss=chance.random() < 0.5)
        for node in chance.sample(self.live(), k=chance.randint(1, 2)):
            if failure == "suspect":
                node.advance(suspects=True)
            elif failure == "lose":
                node.advance(fails=True)
            elif failure == "kill":
                self.sim.kill(node)
            else:
                self.sim.network.hung.add(node.name)
                if failure == "end":
                    self.sim.end(node)
        self.run(chance.randint(0, 30), chance.randrange(1 << 30))

    @rule(patience=st.integers(0, 60), seed=seeds)
    def let_leave(self, patience: int, seed: int) -> None:
        """Let a node leave, whose process ends after the grace in any case."""
        chance = random.Random(seed)
        self.revive(2)
        node = chance.choice(self.live())
        node.leave()
        for _ in range(patience):
            if node.is_finished:
                break
            self.run(1, chance.randrange(1 << 30))
        self.sim.kill(node)

    @rule()
    def switch_control_plane(self) -> None:
        self.sim.world.is_down = not self.sim.world.is_down

    @invariant()
    def keep_all_progress(self) -> None:
        for node in self.sim.nodes.values() if hasattr(self, "sim") else ():
            node.check()

    def teardown(self) -> None:
        if not hasattr(self, "sim"):
            return
        sim = self.sim
        sim.world.is_down = False
        for node in list(sim.nodes.values()):
            if sim.world.has_ended(node.name):
                sim.kill(node)
        sim.network.hung.clear()
        self.revive(sim.world.least)
        sim.settle(2)
        states = {(one.replica.state.round, one.replica.hash) for one in sim.nodes.values()}
        assert len({number for number, _ in states}) == len(states), "nodes of one round have two states"


TestRoundMachine = RoundMachine.TestCase
TestRoundMachine.settings = machine_settings(runs=40, steps=30)
