"""Compare the traces of all nodes of a world: one state for each round, and each delta counted at most once. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Line = Mapping[str, Any]


@dataclass(frozen=True)
class Delta:
    """Delta that a process has handed over."""

    node: str
    number: int


class TraceLedger:
    """Content of the committed rounds. traces: lines of each process, by the name of its folder."""

    def __init__(self, traces: Mapping[str, Sequence[Line]]) -> None:
        self._traces = traces
        self._names = {name: one["node"] for name, lines in traces.items() for one in lines if one["kind"] == "born"}
        entered = {
            (self._names[name], one["epoch"], one["round"]): one["delta"]
            for name, lines in traces.items()
            for one in lines
            if one["kind"] == "reduce"
        }
        self.states: defaultdict[int, set[str]] = defaultdict(set)
        """Hashes of the outer state, by round."""
        self.committed_at: dict[int, float] = {}
        """Instant of the first commit, by round."""
        self.tokens: dict[int, int] = {}
        """Weight of the deltas that count first in a round, by round."""
        self.repeated: list[tuple[Delta, int, list[int]]] = []
        """Deltas that count more than once: delta, bucket, rounds."""
        self.unknown: list[tuple[str, int]] = []
        """Nodes that count in a round without a delta."""
        self.counted: dict[Delta, int] = {}
        """Tokens of each delta that counts."""
        rounds_of: defaultdict[tuple[Delta, int], set[int]] = defaultdict(set)
        for lines in traces.values():
            for one in lines:
                if one["kind"] in ("commit", "adopted"):
                    self.states[one["round"]].add(f"{one['hash']} {one['sha256']}")
                if one["kind"] == "commit":
                    self._count(one, entered, rounds_of)
        for (delta, bucket), rounds in sorted(rounds_of.items(), key=str):
            if len(rounds) > 1:
                self.repeated.append((delta, bucket, sorted(rounds)))

    def _count(
        self,
        commit: Line,
        entered: Mapping[tuple[str, int, int], int | None],
        rounds_of: defaultdict[tuple[Delta, int], set[int]],
    ) -> None:
        number = commit["round"]
        self.committed_at[number] = min(commit["at"], self.committed_at.get(number, commit["at"]))
        self.tokens.setdefault(number, 0)
        for epoch in set(commit["tags"]):
            for node, tokens in commit["tries"][str(epoch)].items():
                if not tokens:
                    continue
                known = entered.get((node, epoch, number))
                if known is None:
                    self.unknown.append((node, number))
                    continue
                delta = Delta(node, known)
                if delta not in self.counted:
                    self.counted[delta] = tokens
                    self.tokens[number] += tokens
                for bucket, tag in enumerate(commit["tags"]):
                    if tag == epoch:
                        rounds_of[delta, bucket].add(number)

    @property
    def divergent(self) -> dict[int, set[str]]:
        """Return the rounds of which two nodes hold different states."""
        return {number: found for number, found in self.states.items() if len(found) > 1}

    @property
    def lost_steps(self) -> dict[str, int]:
        """Return, by process that has reached the end, the steps that neither a round nor a pending delta contains."""
        lost = {}
        for name, lines in self._traces.items():
            end = next((one for one in lines if one["kind"] == "end"), None)
            if end is not None:
                steps = sum(one["kind"] == "step" for one in lines)
                counted = sum(tokens for delta, tokens in self.counted.items() if delta.node == self._names[name])
                lost[name] = steps - counted - end["pending"]
        return lost

    def seconds_per_token(self, since: float, until: float) -> float:
        """Return the time from the first to the last commit in a span, for each token that counts after the first.

        Whole rounds alone count: in a short span, a part of a round at either end would be a large error.
        """
        first, *others = sorted((at, number) for number, at in self.committed_at.items() if since <= at < until)
        return (others[-1][0] - first[0]) / sum(self.tokens[number] for _, number in others)

    def faults(self) -> list[str]:
        """Return the points at which processes have sent themselves signals, in order."""
        lines = [one for lines in self._traces.values() for one in lines if one["kind"] == "fault"]
        return [f"{one['point']}:{one['signal']}" for one in sorted(lines, key=lambda one: one["at"])]

    def problems(self) -> list[str]:
        """Return each violation in words; none is right."""
        return [
            *(f"round {number} has the states {found}" for number, found in self.divergent.items()),
            *(f"{delta} counts in bucket {bucket} of the rounds {rounds}" for delta, bucket, rounds in self.repeated),
            *(f"node {node} counts in round {number} without a delta" for node, number in self.unknown),
            *(f"process {name} lost {steps} steps" for name, steps in self.lost_steps.items() if steps),
        ]
