"""A loop, an agent, other ranks and a clock for tests of the controller."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from gpu_client.controller.steering import Steering
from gpu_client.training.distributed.rank_consensus import RankConsensus, Vote
from gpu_client.training.protocol import MAX_LINE_BYTES, encode


class Clock:
    """A clock that tests advance, in seconds."""

    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


class TrainingLoop:
    """A loop that records the requests to it."""

    def __init__(self) -> None:
        self.stops: list[tuple[str, bool]] = []
        self.saves = 0
        self.tags: list[str] = []
        self.voting: RankConsensus | None = None
        self.stopping = False

    def request_stop(self, reason: str, *, checkpoint: bool) -> None:
        self.stops.append((reason, checkpoint))

    def request_save(self, tag: str = "") -> None:
        self.saves += 1
        self.tags.append(tag)

    def settle(self) -> None:
        if self.voting is not None:
            self.voting.settle()


class Alone:
    """A single process."""

    size = 1
    first = True

    def share(self, value: Any) -> Any:
        raise AssertionError("there is nobody to share with")


class Agent:
    """An agent that records the trainer's messages, and checks their size against the channel's limit."""

    def __init__(self) -> None:
        self.heard: list[dict[str, Any]] = []

    def __call__(self, message: Mapping[str, Any]) -> None:
        line = encode(message)
        assert len(line) <= MAX_LINE_BYTES
        self.heard.append(json.loads(line))

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [one for one in self.heard if one["type"] == kind]

    def decisions(self) -> list[tuple[str, str, int]]:
        """Return type, rule (or command) and step of each decision."""
        return [
            (one["decision"], one.get("rule") or one.get("command", ""), one["step"]) for one in self.of("decision")
        ]

    def fired(self) -> list[tuple[str, int]]:
        return [(rule, step) for kind, rule, step in self.decisions() if kind == "rule.fired"]

    def results(self) -> list[tuple[int, str]]:
        return [(one["seq"], one["status"]) for one in self.of("command_result")]


class Setup:
    """A controller with its surroundings."""

    def __init__(
        self, rules: str = "", *, peers: Any = None, agent: bool = True, elastic: bool = False, **start: Any
    ) -> None:
        self.clock, self.loop, self.agent = Clock(), TrainingLoop(), Agent()
        self.steering = Steering(self.loop, peers or Alone(), clock=self.clock, elastic=elastic)
        if isinstance(peers, Rank):
            self.loop.voting = RankConsensus(peers, clock=lambda: 0.0)
            self.loop.voting.sharing = self.steering
        control = {**({"rules": {"revision": 1, "text": rules}} if rules else {}), **start}
        self.steering.begin(control, self.agent if agent else None)

    def report(self, step: int, after_s: float = 1.0, **metrics: object) -> None:
        """Report a step as a session does."""
        self.clock.now += after_s
        if self.steering.live:
            self.steering.report_step(step, metrics)

    def close(self) -> None:
        """Close the controller as a session does."""
        if self.loop.voting is not None:
            self.loop.voting.close()
        self.steering.close()


def command(seq: int, kind: str, *, expires_in_s: float | None = 600, **arguments: Any) -> dict[str, Any]:
    """Make a command message as the agent sends it."""
    life = {} if expires_in_s is None else {"expires_in_s": expires_in_s}
    return {"type": "command", "seq": seq, "kind": kind, "arguments": arguments, **life}


def rule(name: str, when: str, do: str = "save", **more: object) -> str:
    """Write one rule as a document."""
    return json.dumps({"rules": [{"name": name, "when": when, "do": json.loads(do) if do[0] in "[{" else do, **more}]})


class Together:
    """Ranks in threads that meet at barriers; a missing rank fails all."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=60)
        self._lock = threading.Lock()
        self._boards: dict[tuple[str, int], dict[int, Any]] = {}

    def rank(self, number: int) -> Rank:
        return Rank(self, number)

    def board(self, kind: str, turn: int) -> dict[int, Any]:
        with self._lock:
            return self._boards.setdefault((kind, turn), {})

    def wait(self) -> None:
        self._barrier.wait()

    def missing(self, board: dict[int, Any]) -> bool:
        return len(board) < self.size


class Sent:
    """Numbers in transit."""

    def __init__(self, together: Together, board: dict[int, Any]) -> None:
        self._together, self._board = together, board

    def rows(self, timeout_s: float | None = None) -> list[list[float]]:
        until = time.monotonic() + (60 if timeout_s is None else timeout_s)
        while self._together.missing(self._board):
            if time.monotonic() > until:
                raise RuntimeError("a process is gone")
            time.sleep(0.001)
        return [self._board[number] for number in range(self._together.size)]


class Rank:
    """A rank of `Together`."""

    def __init__(self, together: Together, number: int) -> None:
        self._together = together
        self.number, self.size, self.first = number, together.size, number == 0
        self._turns: dict[str, int] = {}

    def _next(self, kind: str) -> dict[int, Any]:
        turn = self._turns[kind] = self._turns.get(kind, 0) + 1
        return self._together.board(kind, turn)

    def share(self, value: Any) -> Any:
        board = self._next("share")
        board[self.number] = value
        self._together.wait()
        return json.loads(json.dumps(board[0]))

    def agree(self, *values: int) -> list[int]:
        board = self._next("agree")
        board[self.number] = values
        self._together.wait()
        return [max(column) for column in zip(*board.values(), strict=True)]

    def begin_gathering(self, values: Sequence[float]) -> Sent:
        board = self._next("gather")
        board[self.number] = list(values)
        assert len({len(row) for row in list(board.values())}) == 1, "ranks contribute different metrics"
        return Sent(self._together, board)


class Rate:
    """A learning rate as a knob."""

    def __init__(self, value: float = 1.0) -> None:
        self.value = value

    def read(self) -> float:
        return self.value

    def write(self, value: float) -> None:
        self.value = value

    def scale(self, factor: float) -> None:
        self.value *= factor


def ranks(size: int, text: str = "", *, agent: bool = True, votes_take: float = 0, **start: Any) -> list[Setup]:
    """Make the ranks of a job, of which only the first has an agent. votes_take: seconds between votes."""
    together = Together(size)
    setups = [Setup(text, peers=together.rank(number), agent=agent and number == 0, **start) for number in range(size)]
    for setup in setups:
        if setup.loop.voting is not None:
            ticks = itertools.count()
            setup.loop.voting._clock = lambda ticks=ticks: next(ticks) * votes_take  # type: ignore[misc]
    return setups


def run_together(size: int, text: str, losses: dict[int, list[float]], **more: Any) -> list[Setup]:
    """Run ranks that report and agree in turn, as session.report and checkpoint_due do, and close at the end."""
    setups = ranks(size, text, **more)
    for step in range(1, len(losses[0]) + 1):
        for number, setup in enumerate(setups):
            value = losses.get(number, losses[0])[step - 1]
            setup.clock.now += 1
            if setup.steering.live:
                setup.steering.report_step(step, {"loss": value}, last=step == len(losses[0]))
        agree(setups)
    for setup in setups:
        setup.close()
    return setups


def agree(setups: list[Setup]) -> None:
    """Agree on all ranks after a step."""

    def one(voting: RankConsensus | None) -> None:
        assert voting is not None
        voting.collect(Vote)
        voting.send(Vote())

    together([partial(one, setup.loop.voting) for setup in setups])


def together(doings: Sequence[Callable[[], object]]) -> None:
    """Run functions at the same time; raise the first error."""
    with ThreadPoolExecutor(len(doings)) as pool:
        for done in [pool.submit(doing) for doing in doings]:
            done.result(30)
