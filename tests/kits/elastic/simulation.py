"""Nodes of an elastic training in virtual time: each action of each node happens when the test says so.

A node has its own protocol and a main thread that trains a toy model of a few numbers. The ledger knows the true
content of each average, and checks at each commit that a round has one outer state and counts each delta once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import torch

from baton.contract.elastic.data import DataProgress
from baton.contract.elastic.world import JoinRequest, NodeProgram, WorldView
from gpu_client.elastic.codecs import Codec
from gpu_client.elastic.engines.engine import EpochGroup
from gpu_client.elastic.errors import ElasticError, PeerLostError
from gpu_client.elastic.outer_optimizer import OuterOptimizer, OuterState
from gpu_client.elastic.parameters import TrainedParameters, split_buckets
from gpu_client.elastic.recovery.part_reader import READ_S
from gpu_client.elastic.rounds.epoch_protocol import ElasticEvent, RoundTiming
from gpu_client.elastic.rounds.local_progress import Contribution, LocalProgress
from gpu_client.elastic.rounds.outer_replica import OuterReplica
from gpu_client.elastic.rounds.round_actions import (
    Action,
    CallWorld,
    DescribePeers,
    ExchangeStatus,
    FetchParts,
    OpenGroup,
    ReadWorld,
    ReduceBuckets,
    Sleep,
    StartWorldCall,
    TakeWorldAnswer,
)
from gpu_client.elastic.rounds.round_protocol import RoundProtocol
from tests.kits.elastic.memory_engine import (
    ExchangeCall,
    MemoryNetwork,
    MemoryTransfer,
    OpenCall,
    PendingCall,
    ReduceCall,
)
from tests.kits.elastic.memory_world import MemoryWorld

VALUES, BUCKET_VALUES = 6, 2
PATIENCE = 100
"""Turns after which a call times out."""
PROGRAM = NodeProgram(torch="2", engine="memory", codec="fp32", parameters=VALUES, model_sha256="0" * 64)


class Ledger:
    """True content of all averages and committed states."""

    def __init__(self) -> None:
        self.entered: dict[tuple[int, int, str], tuple[int, Contribution | None]] = {}
        """Round and delta of each member's part in a reduce, by epoch, count of the call and node."""
        self.averages: dict[tuple[int, int, int], frozenset[Contribution]] = {}
        """Deltas in an average, by epoch, round and bucket."""
        self.states: dict[tuple[int, int], tuple[int, ...]] = {}
        """Hashes of the committed state, by generation and round."""
        self.included: dict[tuple[Contribution, int], tuple[tuple[int, int], int]] = {}
        """Generation and round in which a bucket of a delta is committed."""
        self.data: dict[tuple[tuple[int, int], int], DataProgress] = {}
        """Shards that the committed states have trained, by generation and round."""
        self.shards = self.commits = 0


@dataclass
class SimulatedNode:
    """One training process: protocol, toy model, and the call that it waits for."""

    name: str
    sim: Simulation
    inner_steps: int = 2
    overlap: bool = False
    value: float = 0.0
    feedback: Codec | None = None
    fragments: int = 1
    part_s: float = 0.0
    """Time of the node's line for one part of a state."""
    events: list[ElasticEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.local = torch.nn.Parameter(torch.full((VALUES,), self.value))
        self.parameters = TrainedParameters([("local", self.local)])
        params = torch.empty(VALUES)
        self.parameters.read(params)
        buckets = split_buckets(VALUES, BUCKET_VALUES)
        self.progress = LocalProgress(params, self.feedback, fragments=self.parameters.stripe(buckets, self.fragments))
        optimizer = OuterOptimizer(0.5, 0.5)
        self.replica = OuterReplica(self.name, OuterState.begin(params), optimizer, buckets, self.progress)
        self.uncounted = torch.zeros(VALUES, dtype=torch.float64)
        """Progress that no committed round contains."""
        self.handed = torch.zeros(VALUES, dtype=torch.float64)
        self.contribution: Contribution | None = None
        self.steps = self.moves = 0
        self.is_waiting = True
        self.is_finished = False
        self.group: EpochGroup | None = None
        self.call: PendingCall | None = None
        self.started_call: Any = None
        self.ready_at = self.received_s = 0.0
        self.progress.hold(self.parameters)
        self.sim.network.sources[self.name] = self.replica
        protocol = RoundProtocol(
            JoinRequest(node=self.name, program=PROGRAM),
            self.replica,
            clock=lambda: self.sim.now,
            timing=RoundTiming(),
            tell=self.events.append,
        )
        self.protocol = protocol
        self.steps_of_protocol: Generator[Action, Any, None] = protocol.run()
        self.action: Action = next(self.steps_of_protocol)
        self.watch()

    # --- the round thread --------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Check each commit and each adopted state at the moment in which they become the node's state."""
        commit = self.replica.commit
        finish_round = self.progress.finish_round

        def checked_commit() -> None:
            unfinished = self.replica.unfinished
            assert unfinished is not None
            deltas = self.sim.note_commit(self, unfinished.round, unfinished.tags)
            trained = self.replica.data
            commit()
            if deltas is not None:
                self.sim.note_data(self, trained, deltas)

        def settled(**result: Any) -> None:
            was = self.progress.contribution
            finish_round(**result)
            if was is not None and was is self.contribution:
                counted = (self.progress.delta == 0) & (self.handed != 0)
                self.uncounted[counted] -= self.handed[counted]
                self.contribution = None

        self.replica.commit = checked_commit  # type: ignore[method-assign]
        self.progress.finish_round = settled  # type: ignore[method-assign]

    def advance(self, *, prefers_loss: bool = False, suspects: bool = False, fails: bool = False) -> bool:
        """Perform the present action, or a part of it; return False if the node has to wait for others.

        suspects: the call ends by a timeout. fails: a read of peers or a call of the world gets no answer.
        """
        if self.is_finished:
            return False
        try:
            is_done, result = self.perform(prefers_loss=prefers_loss, suspects=suspects, fails=fails)
        except ElasticError as failure:
            self.call, error = None, failure
            self.proceed(lambda: self.steps_of_protocol.throw(error))
            return True
        if is_done:
            self.call = None
            self.proceed(lambda: self.steps_of_protocol.send(result))
        return is_done

    def proceed(self, resume: Callable[[], Action]) -> None:
        try:
            self.action = resume()
        except StopIteration:
            self.is_finished = True
            self.sim.network.leave(self.name, [])
            self.progress.notify(is_apart=True, is_ended=True)
            return
        if isinstance(self.action, Sleep):
            self.ready_at = self.sim.now + self.action.seconds

    def perform(self, *, prefers_loss: bool, suspects: bool, fails: bool) -> tuple[bool, Any]:
        action, network = self.action, self.sim.network
        if isinstance(action, OpenGroup | ExchangeStatus | ReduceBuckets):
            call = self.call = self.call or self.begin(action)
            if suspects and call.missing():
                call.fail(call.missing(), "silent")
            is_done = call.poll(prefers_loss=prefers_loss)
            return is_done, call.result if is_done and isinstance(call, ExchangeCall) else None
        if isinstance(action, CallWorld):
            return True, self.call_world(action.request, fails=fails)
        if isinstance(action, StartWorldCall):
            self.started_call = action.request
            return True, None
        if isinstance(action, TakeWorldAnswer):
            if fails:
                return True, None
            return True, self.catch(lambda: self.call_world(self.started_call, fails=False))
        if isinstance(action, DescribePeers | FetchParts):
            transfer = MemoryTransfer(network, self.name)
            failed = PeerLostError(["?"], "silent")
            if isinstance(action, DescribePeers):
                return True, [failed if fails else self.catch(lambda p=p: transfer.describe(p)) for p in action.peers]
            return True, self.receive(
                [failed if fails else self.catch(lambda p=p, r=r: transfer.read(p, r)) for p, r in action.requests]
            )
        self.sim.now = max(self.sim.now, self.ready_at)
        return True, None

    def receive(self, parts: list[Any]) -> list[Any]:
        """Return the parts that arrive within one call; None for those that are on the way."""
        if not self.part_s:
            return parts
        took_s = min(READ_S, self.part_s * len(parts) - self.received_s)
        self.sim.now += took_s
        count, self.received_s = divmod(self.received_s + took_s, self.part_s)
        return [*parts[: int(count)], *[None] * (len(parts) - int(count))]

    def begin(self, action: OpenGroup | ExchangeStatus | ReduceBuckets) -> PendingCall:
        network = self.sim.network
        if isinstance(action, OpenGroup):
            self.group = action.group
            return OpenCall(network, self.name, action.group)
        assert self.group is not None
        if isinstance(action, ExchangeStatus):
            return ExchangeCall(network, self.name, self.group, action.payload)
        call = ReduceCall(network, self.name, self.group, action.buckets, action.weights, action.completed)
        unfinished = self.replica.unfinished
        assert unfinished is not None
        self.sim.ledger.entered[call.epoch, call.count, self.name] = action.round, unfinished.contribution
        return call

    def call_world(self, request: Any, *, fails: bool) -> WorldView:
        if fails:
            self.sim.world.lost_answers = 1
        body = None if isinstance(request, ReadWorld) else request
        try:
            return self.sim.world.answer(self.name, body)
        finally:
            self.sim.world.lost_answers = 0

    @staticmethod
    def catch(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except ElasticError as error:
            return error

    # --- the main thread ---------------------------------------------------------------------------------------------

    def train(self, gain: float = 0.125) -> None:
        """Do what the main thread can do now: go on after a round, one inner step, or hand over a delta."""
        progress = self.progress
        if progress.is_leaving:
            return
        if self.is_waiting:
            if progress.is_adopting and progress._is_still:
                return
            is_free = progress.is_apart or progress.is_ended or progress.contribution is None
            if not (progress.is_started and (self.contribution is None or is_free)):
                return
            progress.proceed(self.parameters)
            self.is_waiting = False
            self.check()
        progress.follow(self.parameters)
        if progress.moves != self.moves:
            self.moves, self.steps = progress.moves, 0
        with torch.no_grad():
            self.local += gain
        self.uncounted += gain
        progress.tokens += 1
        self.steps += 1
        self.check()
        if (self.steps >= self.inner_steps or progress.is_hurried) and self.contribution is None:
            self.hand_over()

    def leave(self) -> None:
        """Hand over what no round contains, and leave."""
        if self.progress.contribution is None and self.progress.is_started and not self.progress.is_adopting:
            self.progress.proceed(self.parameters)
            self.hand_over()
        self.progress.notify(is_leaving=True)

    def hand_over(self) -> None:
        before, self.handed = self.uncounted.clone(), torch.zeros(VALUES, dtype=torch.float64)
        shards = self.sim.ledger.shards = self.sim.ledger.shards + 1
        self.progress.data = self.progress.data.merge(DataProgress(finished=[[shards - 1, shards]]))
        contribution = self.progress.hand_over(self.parameters, self.sim.now)
        if contribution is None:
            return
        for part in self.progress._cut(self.progress._held):
            self.handed[part] = before[part]
        self.contribution, self.steps = contribution, 0
        if self.overlap:
            self.progress.proceed(self.parameters)
        else:
            self.is_waiting = True

    def check(self) -> None:
        """The local parameters are the outer parameters plus all progress that no round contains."""
        progress = self.progress
        if progress.is_adopting or progress._is_still:
            return
        pending = progress.pending_shift()
        local = self.local.detach().double() + (pending.double() if pending.numel() else 0)
        expected = progress.outer.double() + self.uncounted
        # Lost work would be a step's gain or more.
        assert torch.allclose(local, expected, atol=0.02, rtol=1e-4), (self.name, local - expected)


class Simulation:
    """World, network and nodes of one job."""

    def __init__(self, least: int = 1, most: int = 8) -> None:
        self.now = 1000.0
        self.network = MemoryNetwork()
        self.world = MemoryWorld(least, most, lambda: self.now)
        self.nodes: dict[str, SimulatedNode] = {}
        self.ledger = Ledger()
        self.lost_generations = 0
        self.network.averaged = self.note_average

    def start(self, seat: int, **settings: Any) -> SimulatedNode:
        """Begin a training process at a seat; a process that the seat had is dead."""
        for node in list(self.nodes.values()):
            if node.name.startswith(f"{seat}."):
                self.kill(node)
        node = SimulatedNode(self.world.claim(seat), self, **settings)
        self.nodes[node.name] = node
        return node

    def kill(self, node: SimulatedNode) -> None:
        """End a process and its attempt."""
        if self.nodes.pop(node.name, None) is None:
            return
        self.network.kill(node.name)
        self.end(node)

    def end(self, node: SimulatedNode) -> None:
        """End the attempt of a node, whose process may live on."""
        if self.world.has_ended(node.name):
            return
        self.world.end(node.name)
        live = [one for one in self.nodes.values() if not self.world.has_ended(one.name)]
        holders = [one.replica for one in live if one.protocol.epochs.synced_epoch]
        rounds = [one.candidate[0] if one.candidate else one.state.round for one in holders]
        if node.replica.state.round > max(rounds, default=0):
            self.lost_generations += 1

    def generation(self, epoch: int) -> tuple[int, int]:
        """Return the number of the lineage of states: it ends when all holders of the newest state are gone."""
        return sum(1 for one in self.world.formed_epochs if one <= epoch), self.lost_generations

    def note_average(self, epoch: int, count: int, bucket: int, weights: dict[str, float]) -> None:
        entered = self.ledger.entered
        parts = {name: entered[epoch, count, name] for name, weight in weights.items() if weight}
        assert all(delta is not None for _, delta in parts.values()), "a delta counts that was never handed over"
        (number,) = {number for number, _ in parts.values()}
        deltas = frozenset(delta for _, delta in parts.values() if delta is not None)
        assert self.ledger.averages.setdefault((epoch, number, bucket), deltas) == deltas

    def note_commit(self, node: SimulatedNode, number: int, tags: list[int]) -> set[Contribution] | None:
        """Check a commit, and return the deltas in its averages."""
        self.ledger.commits += 1
        if self.world.has_ended(node.name):
            # The control plane and the members have given the node up; its rounds bind no other node.
            return None
        deltas: set[Contribution] = set()
        key = (self.generation(node.protocol.epochs.epoch), number)
        assert node.replica.unfinished is not None
        state = tuple(node.replica.unfinished.candidates)
        assert self.ledger.states.setdefault(key, state) == state, f"two outer states of round {number}"
        for bucket, tag in enumerate(tags):
            if not tag:
                continue  # Of another fragment.
            alone = (tag, number, bucket) not in self.ledger.averages
            own = frozenset([node.contribution]) if node.contribution else frozenset()
            for delta in own if alone else self.ledger.averages[tag, number, bucket]:
                before, self.ledger.included[delta, bucket] = self.ledger.included.get((delta, bucket), key), key
                assert before == key or before[0] != key[0], "a delta counts twice"
                deltas.add(delta)
        return deltas

    def note_data(self, node: SimulatedNode, trained: DataProgress, deltas: set[Contribution]) -> None:
        """Check that the counted shards are those of the deltas, at all nodes."""
        for delta in deltas:
            trained = trained.merge(delta.data)
        key = (self.generation(node.protocol.epochs.epoch), node.replica.state.round)
        assert node.replica.data == self.ledger.data.setdefault(key, trained) == trained
        assert node.progress.data.without(node.replica.data) == node.progress.data

    def settle(self, rounds: int = 1, limit: int = 20_000) -> None:
        """Let all live nodes run fairly until `rounds` more rounds are committed everywhere."""
        live = [one for one in self.nodes.values() if one.name not in self.network.hung]
        goal = max(one.replica.state.round for one in live) + rounds
        waits: Counter[str] = Counter()
        for turn in range(limit):
            live = [one for one in self.nodes.values() if one.name not in self.network.hung and not one.is_finished]
            if all(one.replica.state.round >= goal and not one.progress.is_adopting for one in live):
                return
            node = live[turn % len(live)]
            waits[node.name] = 0 if node.advance(suspects=waits[node.name] > PATIENCE) else waits[node.name] + 1
            node.train()
        raise AssertionError(f"no {rounds} rounds within {limit} turns: {[one.action for one in live]}")
