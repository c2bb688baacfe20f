"""Hold one member's copy of the outer state: averages of the unfinished round, commit, adoption, reads by peers."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from baton.contract.elastic.data import DataProgress
from gpu_client.elastic.outer_optimizer import OuterOptimizer, OuterState, combine_hashes, hash_values
from gpu_client.elastic.recovery.state_transfer import (
    Inclusion,
    PartRequest,
    PartUnavailableError,
    StateDescription,
)
from gpu_client.elastic.rounds.local_progress import Contribution, LocalProgress
from gpu_client.elastic.rounds.member_status import AttemptStatus
from gpu_client.elastic.rounds.round_decisions import Reduce

KEPT_AVERAGES = 2
"""Rounds whose averages a member keeps while a node joins; 4 bytes for each parameter and round."""
KEPT_INCLUSIONS = 64
"""Rounds, each the newest one of some node, of which a member knows the buckets that contain the nodes' deltas."""


@dataclass
class UnfinishedRound:
    """Averages of a round that this member has not committed.

    places: buckets of the round's fragment. tries: tokens of the contributors, by the epoch of the reduce. tags: by
    bucket, the epoch of its final average; 0 without an average. candidates: by bucket, hash of the values that a
    commit would produce. repairs: such values of another member. redone: buckets that were reduced again, or repaired.
    reduce_s, sent_bytes: of all tries.
    """

    round: int
    places: Sequence[int]
    epoch: int
    members: tuple[str, ...]
    tries: dict[int, Mapping[str, int]]
    tags: list[int]
    candidates: list[int]
    contribution: Contribution | None
    """This member's delta in the round."""
    repairs: dict[int, torch.Tensor] = field(default_factory=dict)
    redone: set[int] = field(default_factory=set)
    reduce_s: float = 0.0
    sent_bytes: int = 0
    data: Mapping[str, DataProgress] = field(default_factory=dict)
    """Shards that each delta has trained."""

    @property
    def inclusions(self) -> tuple[Inclusion, ...]:
        """Return the contributors of each group of buckets."""
        found: dict[tuple[str, ...], int] = {}
        for bucket in self.places:
            nodes = tuple(self.tries[self.tags[bucket]])
            found[nodes] = found.get(nodes, 0) | 1 << bucket
        return tuple(Inclusion(nodes, buckets) for nodes, buckets in found.items())

    @property
    def tokens(self) -> dict[str, int]:
        """Return the tokens of each contributor: of all trained tokens, the share of the fragment."""
        share = len(self.places) / len(self.tags)
        return {node: round(weight * share) for node, weight in self.tries[self.epoch].items()}

    def status(self) -> AttemptStatus:
        """Return the part of the member's status."""
        tags = tuple(self.tags[bucket] for bucket in self.places)
        return AttemptStatus(self.round, self.epoch, self.members, self.tries[self.epoch], tags)


class OuterReplica:
    """Copy of the outer state at node `node`.

    The round thread alone changes the state; other threads read under the lock of `progress`.
    """

    def __init__(
        self,
        node: str,
        state: OuterState,
        optimizer: OuterOptimizer,
        buckets: Sequence[slice],
        progress: LocalProgress,
    ) -> None:
        self.node = node
        self.state = state
        self.buckets = tuple(buckets)
        self.progress = progress
        self.average = torch.zeros_like(state.params)
        self.unfinished: UnfinishedRound | None = None
        self.data = DataProgress()
        """Shards that the committed rounds have trained."""
        self.concluded_epoch = 0
        """Newest epoch whose members, and no others, contribute to the next round."""
        self.keeps_averages = False
        """Some node is fetching the outer state."""
        self._optimizer = optimizer
        self.fragments = len(progress.counted)
        """Rounds in which each bucket takes part once."""
        self._averages: deque[tuple[int, dict[int, torch.Tensor]]] = deque(maxlen=KEPT_AVERAGES * self.fragments)
        self._inclusions: dict[int, tuple[Inclusion, ...]] = {}
        self._forgotten = 0
        """Newest round without known inclusions."""
        self.rounds = [state.round] * len(self.buckets)
        """By bucket, the round of its values; they differ only during an adoption."""
        self._hashes = self._hash_buckets()

    @property
    def hash(self) -> int:
        """Return the hash of the committed state."""
        return combine_hashes(self._hashes)

    def fragment_of(self, number: int) -> int:
        """Return the fragment whose buckets take part in a round."""
        return (number - 1) % self.fragments

    def places_of(self, number: int) -> range:
        """Return the buckets that take part in a round: every fragment has parts of all layers."""
        return range(self.fragment_of(number), len(self.buckets), self.fragments)

    def size_of(self, bucket: int) -> int:
        """Return the number of parameters in a bucket."""
        return len(self.average[self.buckets[bucket]])

    @property
    def candidate(self) -> tuple[int, int] | None:
        """Return round and hash of the state that a commit would produce; None while an average is missing."""
        unfinished = self.unfinished
        if unfinished is None or not all(unfinished.tags[bucket] for bucket in unfinished.places):
            return None
        return unfinished.round, combine_hashes(unfinished.candidates)

    def load(self, params: torch.Tensor, momentum: torch.Tensor, number: int) -> None:
        """Replace the whole state before the first round."""
        with self.progress.changed:
            self.state.params.copy_(params)
            self.state.momentum.copy_(momentum)
            self.state.round, self.rounds = number, [number] * len(self.buckets)
            self._forgotten = number
            self.progress.next_fragment = self.fragment_of(number + 1)
            self._hashes = self._hash_buckets()

    def _hash_buckets(self) -> list[int]:
        return [hash_values(self.state.params[part], self.state.momentum[part]) for part in self.buckets]

    # --- one round ---------------------------------------------------------------------------------------------------

    def begin_reduce(
        self, decided: Reduce, epoch: int, contribution: Contribution | None, data: Mapping[str, DataProgress]
    ) -> UnfinishedRound:
        """Prepare the reduce of all buckets that are not kept. data: shards that each delta has trained."""
        unfinished = self.unfinished
        if unfinished is None:
            places, tags = self.places_of(decided.round), [0] * len(self.buckets)
            own = contribution if decided.weights.get(self.node) else None
            unfinished = UnfinishedRound(
                decided.round, places, epoch, decided.members, {}, tags, list(self._hashes), own
            )
            unfinished.data = data
            self.unfinished = unfinished
        unfinished.epoch, unfinished.members = epoch, decided.members
        unfinished.tries[epoch] = decided.weights
        for place, bucket in enumerate(unfinished.places):
            if place not in decided.kept:
                unfinished.tags[bucket] = 0
                unfinished.repairs.pop(bucket, None)
                if len(unfinished.tries) > 1:
                    unfinished.redone.add(bucket)
        return unfinished

    def complete(self, bucket: int) -> None:
        """Note that the average of a bucket is final, and hash the values that a commit would produce."""
        assert self.unfinished is not None
        self.unfinished.candidates[bucket] = hash_values(*self._compute(bucket))
        self.unfinished.tags[bucket] = self.unfinished.epoch

    def repair(self, bucket: int, values: torch.Tensor) -> None:
        """Take the values that another member's commit will produce."""
        assert self.unfinished is not None
        self.unfinished.repairs[bucket] = values
        self.unfinished.candidates[bucket] = hash_values(*values.chunk(2))

    def _compute(self, bucket: int) -> tuple[torch.Tensor, torch.Tensor]:
        part = self.buckets[bucket]
        repaired = self.unfinished.repairs.get(bucket) if self.unfinished else None
        if repaired is not None:
            params, momentum = repaired.chunk(2)
            return params, momentum
        params, momentum = self.state.params[part].clone(), self.state.momentum[part].clone()
        self._optimizer.step(params, momentum, self.average[part], first=self._is_first(self.state.round + 1))
        return params, momentum

    def _is_first(self, number: int) -> bool:
        """Return True for the first round of a fragment."""
        return number <= self.fragments

    def commit(self) -> None:
        """Make the averages of the unfinished round part of the outer state."""
        unfinished = self.unfinished
        assert unfinished is not None
        with self.progress.changed:
            for bucket in unfinished.places:
                self._set(bucket, unfinished.repairs.get(bucket), mixes=True)
            self._hashes = unfinished.candidates
            if self.keeps_averages:
                kept = {bucket: self.average[self.buckets[bucket]].clone() for bucket in unfinished.places}
                self._averages.append((unfinished.round, kept))
            else:
                self._averages.clear()
            self._note_inclusions(unfinished.round, unfinished.inclusions)
            for node in {node for one in unfinished.inclusions for node in one.nodes}:
                self.data = self.data.merge(unfinished.data.get(node, DataProgress()))
            self._finish(unfinished.round, mixes=True)

    def _note_inclusions(self, number: int, found: tuple[Inclusion, ...]) -> None:
        """Remember the contributors of a round. A node that returns asks about the newest round of its own only."""
        newest = {node for one in found for node in one.nodes}
        for done, parts in list(self._inclusions.items()):
            others = [(tuple(node for node in one.nodes if node not in newest), one.buckets) for one in parts]
            self._inclusions[done] = tuple(Inclusion(nodes, buckets) for nodes, buckets in others if nodes)
            if not self._inclusions[done]:
                del self._inclusions[done]
        self._inclusions[number] = found
        while len(self._inclusions) > KEPT_INCLUSIONS:
            self._forgotten = next(iter(self._inclusions))
            del self._inclusions[self._forgotten]

    def count(self, data: DataProgress) -> None:
        """Count data that no delta awaits: shards that ended without a further batch, or what peers have counted."""
        with self.progress.changed:
            counted = self.data.merge(data)
            if counted != self.data:
                self.data = counted
                self.progress.data = self.progress.data.without(counted)
                self.progress.changed.notify_all()

    def abandon(self) -> None:
        """Drop the averages of the unfinished round; the delta stays."""
        self.unfinished = None

    def _set(self, bucket: int, values: torch.Tensor | None, *, mixes: bool = False) -> None:
        """Replace a bucket by parameters and momentum, or by the result of the outer step."""
        part, state = self.buckets[bucket], self.state

        def change() -> None:
            if values is None:
                step = self._optimizer.step
                first = self._is_first(state.round + 1)
                step(state.params[part], state.momentum[part], self.average[part], first=first)
            else:
                state.params[part], state.momentum[part] = values.chunk(2)

        self.progress.move(part, change, mixes=mixes)

    def _finish(self, number: int, *, mixes: bool = False) -> None:
        """Set the round, and end the contribution to a round that has become part of the state."""
        self.state.round = number
        self.rounds = [number] * len(self.buckets)
        unfinished, self.unfinished = self.unfinished, None
        included = self._find_included(unfinished)
        for bucket, part in enumerate(self.buckets):
            if included >> bucket & 1:
                self.progress.include(part, mixes=mixes)
        self.progress.data = self.progress.data.without(self.data)
        places = unfinished.places if unfinished else self.buckets
        fragment = self.fragment_of(unfinished.round) if unfinished else 0
        self.progress.next_fragment = self.fragment_of(number + 1)
        self.progress.finish_round(included=included.bit_count() / len(places), fragment=fragment)

    def _find_included(self, unfinished: UnfinishedRound | None) -> int:
        """Return the bitmap of the buckets that contain this node's delta, or may contain the delta."""
        if unfinished is None or unfinished.contribution is None:
            return 0
        if self._is_forgotten(unfinished.round):
            return sum(1 << bucket for bucket in unfinished.places)
        parts = self._inclusions.get(unfinished.round, ())
        return sum(one.buckets for one in parts if self.node in one.nodes)

    def _is_forgotten(self, number: int) -> bool:
        return number <= self._forgotten and number not in self._inclusions

    # --- the state of other members ----------------------------------------------------------------------------------

    def find_differences(self, description: StateDescription) -> list[int]:
        """Return the buckets in which the described state differs."""
        pairs = zip(self._hashes, description.hashes, strict=True)
        return [bucket for bucket, (mine, other) in enumerate(pairs) if mine != other]

    def adopt(self, bucket: int, values: torch.Tensor, number: int) -> None:
        """Replace a bucket by a peer's parameters and momentum of round `number`."""
        self.progress.begin_adoption()
        with self.progress.changed:
            self._set(bucket, values)
            self._hashes[bucket] = hash_values(*values.chunk(2))
            self.rounds[bucket] = number

    def replay(self, bucket: int, average: torch.Tensor, number: int) -> None:
        """Apply the average of the next missed round, `number`, to a bucket."""
        part = self.buckets[bucket]
        values = torch.cat([self.state.params[part], self.state.momentum[part]])
        params, momentum = values.chunk(2)
        self._optimizer.step(params, momentum, average, first=self._is_first(number))
        self.adopt(bucket, values, number)

    def finish_adoption(self, description: StateDescription) -> bool:
        """Make the described state, to which all buckets are equal now, the committed state.

        Returns True if the node has dropped its delta, because the group may have counted the delta already.
        """
        unfinished = self.unfinished
        with self.progress.changed:
            self._inclusions, self._forgotten = dict(description.inclusions), description.forgotten
            self._averages.clear()
            self.data = description.data
            self._finish(description.round)
            self.progress.notify(is_adopting=False)
        has_delta = unfinished is not None and unfinished.contribution is not None
        return unfinished is not None and has_delta and self._is_forgotten(unfinished.round)

    def describe(self) -> StateDescription:
        """Return the committed state. Raises PartUnavailableError while buckets of two rounds are mixed."""
        with self.progress.changed:
            if self.progress.is_adopting:
                raise PartUnavailableError(f"node {self.node} is fetching its outer state")
            averages = tuple(number for number, _ in self._averages)
            inclusions = tuple(self._inclusions.items())
            hashes = tuple(self._hashes)
            return StateDescription(self.state.round, hashes, averages, inclusions, self._forgotten, self.data)

    def read(self, request: PartRequest) -> torch.Tensor:
        """Return a copy of a part. Raises PartUnavailableError."""
        with self.progress.changed:
            found = self._read(request) if 0 <= request.bucket < len(self.buckets) else None
        if found is not None:
            return found
        place = f"bucket {request.bucket}, round {request.round}"
        raise PartUnavailableError(f"node {self.node} has no {request.kind} of {place}")

    def _read(self, request: PartRequest) -> torch.Tensor | None:
        part, unfinished = self.buckets[request.bucket], self.unfinished
        if request.kind == "average":
            kept = next((kept for number, kept in self._averages if number == request.round), {})
            return kept.get(request.bucket)  # No thread changes a kept average.
        if request.kind == "state" and request.round == self.state.round and not self.progress.is_adopting:
            return torch.cat([self.state.params[part], self.state.momentum[part]])
        is_held = unfinished is not None and unfinished.round == request.round and unfinished.tags[request.bucket] != 0
        return torch.cat(self._compute(request.bucket)) if request.kind == "candidate" and is_held else None
