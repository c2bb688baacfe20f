"""How the processes of one training learn what one of them was asked for, and no step waits for it.

After a step every rank sends a few numbers to all, and reads after the next one what all have sent: behind a step it
has arrived. So all see a wish after the same step, the one after whoever was told of it. Only ranks whose steps all
are long wait for what they have just sent: beside such steps that is nothing, and on a machine that is about to be
taken away no further one need be trained first. What rules decide takes effect after the same step either way.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

LONG_STEP_S = 2.5
"""A vote of processes on one machine takes 0.4 to 2.5 ms: at most a thousandth of such a step."""
LAST_WAIT_S = 5.0
"""At the end of a training, for ranks that may have died."""

log = logging.getLogger("baton.training")


class Votes(NamedTuple):
    """What a rank says after a step. Of several ranks the highest of each counts."""

    asked: int = 0
    """For a checkpoint."""
    stop: int = 0
    """0, or which reason there is to stop."""
    refuses: int = 0
    """That anything is saved before the stop."""
    news: int = 0
    """Whether it has something to share."""
    hurries: int = 0
    """Whether its steps are too short for waiting."""

    def together(self, other: Sequence[int]) -> Votes:
        """Theirs and those."""
        return Votes(*map(max, self, other))


class Sharing(Protocol):
    """Something that one rank tells all of them."""

    def contribution(self) -> Sequence[float]:
        """What this rank adds to the vote after a step: as many numbers on every rank."""

    def heard(self, rows: Sequence[Sequence[float]]) -> None:
        """What each rank added, in their order."""

    @property
    def news(self) -> bool:
        """Whether this rank has something for all, as of its contribution."""

    def share(self) -> None:
        """Tell it; every rank calls this at the same moment, after the step behind the one whose vote said so."""


class Peers(Protocol):
    """The processes of one training, as `Ranks` knows them."""

    def agree(self, *values: int) -> list[int]: ...

    def begin_gathering(self, values: Sequence[float]) -> Rows: ...


class Rows(Protocol):
    """What all of them send, on its way."""

    def rows(self, timeout_s: float | None = None) -> list[list[float]]: ...


class Voting:
    """The votes of one rank. Every rank calls `hear` and `send` once after each step."""

    def __init__(self, ranks: Peers, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds, by which steps are short or long."""
        self._ranks = ranks
        self._clock = clock
        self._pid = os.getpid()
        self._underway: Rows | None = None
        self._said: Votes | None = None
        """Of the vote after the step before, once it was heard: not obeyed yet."""
        self._answered = False
        """Whether a checkpoint was written since the last vote was sent."""
        self._left_at: float | None = None
        self._hurries = True
        self.sharing: Sharing | None = None
        """Its numbers travel with the votes: a message of their own would cost as much again."""

    def hear(self, mine: Callable[[], Votes]) -> Votes:
        """What all ranks want, as far as all of them know. `mine`: what this one wants, as of being asked."""
        self._hurries = self._left_at is None or self._clock() - self._left_at < LONG_STEP_S
        self.settle()
        said, self._said = self._said, None
        if said is not None and self._answered:
            said = said._replace(asked=0)
        self._answered = False
        votes = said or self._ask(mine())  # at first nobody has voted yet
        if votes.news and self.sharing is not None:
            self.sharing.share()
            votes = votes.together(self._ask(mine()))
        if not votes.hurries:
            self._send(mine())
            self.settle()
            now = self._said or Votes()
            votes = votes.together(now)
            self._said = now._replace(asked=0)  # that is obeyed now; news wait for the next step, as ever
        return votes

    def send(self, mine: Votes) -> None:
        """Say after this step what is heard after the next one; nothing if it was heard already."""
        if self._said is None:
            self._send(mine)
        self._left_at = self._clock()

    def settle(self, timeout_s: float | None = None) -> None:
        """Have what all contributed after the last step, and leave what they want for the next one.

        Any rank may, when it likes: they have all sent it, or are about to. Raises RuntimeError when one is gone.
        """
        if self._underway is None:
            return
        underway, self._underway = self._underway, None
        rows = underway.rows(timeout_s)
        width = len(Votes._fields)
        self._said = Votes(*(int(max(column)) for column in zip(*(row[:width] for row in rows), strict=True)))
        if self.sharing is not None:
            self.sharing.heard([row[width:] for row in rows])

    def answered(self) -> None:
        """All ranks write a checkpoint: what they were asked for after the last step is done with it."""
        self._answered = True

    def close(self) -> None:
        """The training is over, for this rank at least: what the others sent after the last step is heard still."""
        if os.getpid() != self._pid:
            return
        try:
            self.settle(LAST_WAIT_S)
        except RuntimeError as error:
            log.warning("another process ended before this one had heard its last report: %s", error)

    def _ask(self, mine: Votes) -> Votes:
        """Of all, now."""
        return Votes(*self._ranks.agree(*self._complete(mine)))

    def _send(self, mine: Votes) -> None:
        numbers = self.sharing.contribution() if self.sharing is not None else ()
        self._underway = self._ranks.begin_gathering([*self._complete(mine), *numbers])

    def _complete(self, mine: Votes) -> Votes:
        news = self.sharing is not None and self.sharing.news
        return mine._replace(news=int(news), hurries=int(self._hurries))
