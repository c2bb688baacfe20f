"""Start and kill the generators at planned times, and count their samples."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from demo.failure import DemoError
from demo.processes import Child, ManagedProcesses
from demo.ring.results import GeneratorEvent
from demo.ring.shapes import NICE

GRACE_S = 10.0
"""After SIGTERM a generator finishes its sample."""


@dataclass(frozen=True)
class Turn:
    """Generators to kill and to start, so many seconds after the first batch."""

    at_s: float
    kill: tuple[int, ...] = ()
    start: tuple[int, ...] = ()


def plan(
    generators: int, kills_at_s: Sequence[float], back_after_s: float, all_dead_s: tuple[float, float]
) -> list[Turn]:
    """Plan to kill one generator after the other, each started again later; at last all, for a while."""
    turns = []
    for place, at_s in enumerate(kills_at_s):
        victim = (place % generators,)
        turns += [Turn(at_s, kill=victim), Turn(at_s + back_after_s, start=victim)]
    everybody = tuple(range(generators))
    turns += [Turn(all_dead_s[0], kill=everybody), Turn(all_dead_s[1], start=everybody)]
    return sorted(turns, key=lambda turn: turn.at_s)


class Generators:
    """`generators` processes that put samples into the ring at `place`."""

    def __init__(
        self,
        processes: ManagedProcesses,
        place: str,
        begun: Path,
        generators: int,
        turns: Sequence[Turn],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`begun`: directory in which each generator counts the samples that it begins."""
        self._processes, self._place, self._begun, self._clock = processes, place, begun, clock
        self._children: dict[int, Child] = {}
        self._starts = [0] * generators
        self._turns = list(turns)
        self.events: list[GeneratorEvent] = []
        begun.mkdir()

    @property
    def alive(self) -> int:
        """Return the number of running generators."""
        return len(self._children)

    @property
    def kills(self) -> int:
        """Return the number of kills so far."""
        return sum(event.killed for event in self.events)

    @property
    def samples_begun(self) -> int:
        """Return the number of samples that generators began, unfinished ones included."""
        return sum(path.stat().st_size for path in self._begun.iterdir())

    def start(self, *numbers: int) -> None:
        """Start generators; each start has its own log and seeds."""
        for number in numbers:
            start = self._starts[number] = self._starts[number] + 1
            child = self._children[number] = self._processes.start(
                f"generator-{number}-{start}", "-m", "demo.ring.generate", self._place, number, start,
                self._begun / str(number), grace_s=GRACE_S,
            )  # fmt: skip
            for process in child.family():
                # The training shall come first also while a generator imports its modules.
                process.nice(min(os.nice(0) + NICE, 19))
        self.events.append(GeneratorEvent(self._clock(), started=len(numbers)))

    def kill(self, *numbers: int) -> None:
        """Send SIGKILL. Raises DemoError if a generator has ended by itself."""
        self.events.append(GeneratorEvent(self._clock(), killed=len(numbers)))
        for number in numbers:
            self._children.pop(number).kill_group()

    def carry_on(self, at_s: float) -> None:
        """Kill and start what is due, `at_s` seconds after the first batch."""
        while self._turns and self._turns[0].at_s <= at_s:
            turn = self._turns.pop(0)
            if turn.kill:
                self.kill(*turn.kill)
            if turn.start:
                self.start(*turn.start)

    def end(self) -> None:
        """Let the generators finish their samples and end. Raises DemoError for an exit code other than 0."""
        for child in self._children.values():
            if child.exit_code is None:
                child.end(GRACE_S)
            if child.exit_code:
                raise DemoError(f"{child.name} ended with exit code {child.exit_code}", child.log)
        self._children.clear()
