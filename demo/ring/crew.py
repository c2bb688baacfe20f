"""The generators: started, killed, started again, and counted."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from demo.failure import DemoError
from demo.processes import Child, Household
from demo.ring.shapes import NICE
from demo.ring.summary import Event

GRACE_S = 10.0
"""A generator that is told to end finishes its sample first."""


@dataclass(frozen=True)
class Turn:
    """What is to be done, and when: seconds after the first batch."""

    at_s: float
    kill: tuple[int, ...] = ()
    start: tuple[int, ...] = ()


def plan(
    generators: int, kills_at_s: Sequence[float], back_after_s: float, nobody_s: tuple[float, float]
) -> list[Turn]:
    """One after the other is killed, and is back a moment later; then all are, for a while."""
    turns = []
    for place, at_s in enumerate(kills_at_s):
        victim = (place % generators,)
        turns += [Turn(at_s, kill=victim), Turn(at_s + back_after_s, start=victim)]
    everybody = tuple(range(generators))
    turns += [Turn(nobody_s[0], kill=everybody), Turn(nobody_s[1], start=everybody)]
    return sorted(turns, key=lambda turn: turn.at_s)


class Crew:
    """`generators` processes that put samples into the ring at `place`."""

    def __init__(
        self,
        household: Household,
        place: str,
        begun: Path,
        generators: int,
        turns: Sequence[Turn],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`begun`: where they note what they begin."""
        self._household, self._place, self._begun, self._clock = household, place, begun, clock
        self._children: dict[int, Child] = {}
        self._starts = [0] * generators
        self._turns = list(turns)
        self.events: list[Event] = []
        begun.mkdir()

    @property
    def alive(self) -> int:
        """How many run."""
        return len(self._children)

    @property
    def kills(self) -> int:
        """So far."""
        return sum(event.killed for event in self.events)

    @property
    def samples_begun(self) -> int:
        """By all of them, those that were cut off among them."""
        return sum(path.stat().st_size for path in self._begun.iterdir())

    def start(self, *numbers: int) -> None:
        """Each start has its own log, and its own seeds."""
        for number in numbers:
            start = self._starts[number] = self._starts[number] + 1
            child = self._children[number] = self._household.start_program(
                f"generator-{number}-{start}", "demo.ring.generate", self._place, number, start,
                self._begun / str(number), grace_s=GRACE_S,
            )  # fmt: skip
            for process in child.family():
                # While it starts, too: its own doing comes after all that it imports.
                process.nice(min(os.nice(0) + NICE, 19))
        self.events.append(Event(self._clock(), started=len(numbers)))

    def kill(self, *numbers: int) -> None:
        """SIGKILL. Raises DemoError if one has ended by itself."""
        self.events.append(Event(self._clock(), killed=len(numbers)))
        for number in numbers:
            self._children.pop(number).kill_group()

    def carry_on(self, at_s: float) -> None:
        """Do what is due, so many seconds after the first batch."""
        while self._turns and self._turns[0].at_s <= at_s:
            turn = self._turns.pop(0)
            if turn.kill:
                self.kill(*turn.kill)
            if turn.start:
                self.start(*turn.start)

    def dismiss(self) -> None:
        """Let them finish what they are making. Raises DemoError if one ended in another way than it should."""
        for child in self._children.values():
            if child.exit_code is None:
                child.end(GRACE_S)
            if child.exit_code:
                raise DemoError(f"{child.name} ended with exit code {child.exit_code}", child.log)
        self._children.clear()
