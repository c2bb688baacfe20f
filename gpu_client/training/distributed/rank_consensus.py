"""Exchange consensus votes, so that all ranks learn of a request to one rank after one step, without waiting.

After a step every rank starts to send a few numbers to all ranks, and reads the numbers of all ranks after the next
step, when the numbers have arrived. Ranks with long steps wait for the fresh votes instead, because the wait is
negligible beside such steps, and a machine before its preemption need not train a further step. Decisions of rules take
effect after the same step in both cases.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from gpu_client.training.distributed.process_group import PendingGather, Ranks

LONG_STEP_S = 2.5
"""Duration of a long step in seconds; a vote on one machine (0.4 to 2.5 ms) takes a thousandth at most."""
LAST_WAIT_S = 5.0
"""Timeout in seconds at the end of a training, because other ranks may have died."""

log = logging.getLogger("baton.training")


class Vote(NamedTuple):
    """Vote of a rank after a step. The maximum over all ranks counts, field by field."""

    asked: int = 0
    """1 if a checkpoint is requested."""
    stop: int = 0
    """0, or the number of a reason to stop."""
    without_checkpoint: int = 0
    """1 if no checkpoint may precede the stop."""
    has_news: int = 0
    """1 if the rank has data to share."""
    short_steps: int = 0
    """1 if the steps are too short to wait for votes."""

    def together(self, other: Sequence[int]) -> Vote:
        """Return the maximum of both votes, field by field."""
        return Vote(*map(max, self, other))


class SharedDecisions(Protocol):
    """Data that one rank shares with all ranks."""

    def contribution(self) -> Sequence[float]:
        """Return the numbers of the vote: equally many on every rank."""

    def receive_rows(self, rows: Sequence[Sequence[float]]) -> None:
        """Receive the numbers of all ranks, ordered by rank."""

    @property
    def has_news(self) -> bool:
        """Return True if this rank had data for all ranks at its contribution."""

    def share(self) -> None:
        """Broadcast the data. Collective: every rank calls this one step after the vote that announced the data."""


class RankConsensus:
    """Votes of one rank. Every rank calls `collect` and `send` once after each step."""

    def __init__(self, ranks: Ranks, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds, for the duration of steps."""
        self._ranks = ranks
        self._clock = clock
        self._pid = os.getpid()
        self._underway: PendingGather | None = None
        self._unread: Vote | None = None
        """Vote after the previous step, received but not yet returned."""
        self._answered = False
        """True if a checkpoint was written after the last sent vote."""
        self._left_at: float | None = None
        self._short_steps = True
        self.sharing: SharedDecisions | None = None
        """Data whose numbers the votes carry, because a separate message would double the cost."""

    def collect(self, mine: Callable[[], Vote]) -> Vote:
        """Return the newest vote known to all ranks. `mine`: returns this rank's present vote."""
        self._short_steps = self._left_at is None or self._clock() - self._left_at < LONG_STEP_S
        self.settle()
        votes_before, self._unread = self._unread, None
        if votes_before is not None and self._answered:
            votes_before = votes_before._replace(asked=0)
        self._answered = False
        votes = votes_before or self._agree(mine())  # No vote precedes the first step.
        if votes.has_news and self.sharing is not None:
            self.sharing.share()
            votes = votes.together(self._agree(mine()))
        if not votes.short_steps:
            self._send(mine())
            self.settle()
            now = self._unread or Vote()
            votes = votes.together(now)
            self._unread = now._replace(asked=0)  # The request takes effect at once, news after the next step.
        return votes

    def send(self, mine: Vote) -> None:
        """Start sending votes for the next `collect`, unless `collect` has read the votes of this step."""
        if self._unread is None:
            self._send(mine)
        self._left_at = self._clock()

    def settle(self, timeout_s: float | None = None) -> None:
        """Read the numbers of all ranks on the last step; keep the votes for the next `collect`.

        Any rank may call this method at any time, because all ranks have sent the numbers or are about to. Raises
        RuntimeError if a rank has ended.
        """
        if self._underway is None:
            return
        underway, self._underway = self._underway, None
        rows = underway.rows(timeout_s)
        width = len(Vote._fields)
        self._unread = Vote(*(int(max(column)) for column in zip(*(row[:width] for row in rows), strict=True)))
        if self.sharing is not None:
            self.sharing.receive_rows([row[width:] for row in rows])

    def mark_answered(self) -> None:
        """Record that all ranks write a checkpoint, which fulfills the requests of the last vote."""
        self._answered = True

    def close(self) -> None:
        """Read the numbers of the other ranks after the last step, within LAST_WAIT_S."""
        if os.getpid() != self._pid:
            return
        try:
            self.settle(LAST_WAIT_S)
        except RuntimeError as error:
            log.warning("another process ended before its last report arrived: %s", error)

    def _agree(self, mine: Vote) -> Vote:
        """Send a vote, and wait for the votes of all ranks."""
        return Vote(*self._ranks.agree(*self._complete(mine)))

    def _send(self, mine: Vote) -> None:
        numbers = self.sharing.contribution() if self.sharing is not None else ()
        self._underway = self._ranks.begin_gathering([*self._complete(mine), *numbers])

    def _complete(self, mine: Vote) -> Vote:
        has_news = self.sharing is not None and self.sharing.has_news
        return mine._replace(has_news=int(has_news), short_steps=int(self._short_steps))
