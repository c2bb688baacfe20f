"""Pass requests of the agent, of rules and of SIGTERM to the training loop, each after an agreed step.

Requests arrive at any time, from the channel's thread or a signal handler. Single assignments record the requests,
without locks, because a handler may interrupt any code. The loop learns of a stop with a checkpoint only after `due`
has requested the checkpoint, so that no loop leaves without saving. Several ranks learn of a request after one call.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

from gpu_client.training.distributed.process_group import Ranks
from gpu_client.training.distributed.rank_consensus import RankConsensus, SharedDecisions, Vote
from gpu_client.training.protocol import STOP_REASONS, TrainerDirective

SIGNAL_REASON = "signal"
# The order decides between two reasons of different ranks: the later reason in the tuple wins.
_REASONS = (SIGNAL_REASON, "other", *STOP_REASONS)

log = logging.getLogger("baton.training")


@dataclass(frozen=True)
class _Stop:
    """Request to stop. `reason`: a reason of the agent, or "signal" for SIGTERM. `ends_at`: monotonic seconds."""

    reason: str
    checkpoint: bool
    ends_at: float | None = None


def _stop_of(votes: Vote) -> _Stop | None:
    return _Stop(_REASONS[votes.stop - 1], not votes.without_checkpoint) if votes.stop else None


class LoopRequests:
    """Pending requests, written by `receive` and the signal handler, read by the training thread."""

    def __init__(self, ranks: Ranks, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds, for the consensus of several ranks."""
        self._ranks = ranks
        self._consensus = RankConsensus(ranks, clock=clock)
        self._pid = os.getpid()
        self._checkpoint_requested = False
        self._stop: _Stop | None = None  # The present request of this process.
        self._agreed: _Stop | None = None  # The request of all ranks in the last call of `due`.
        self.tag = ""
        """Tag of the next checkpoint."""
        self._answered = False  # True after a checkpoint for the agreed stop.
        self._uses_due = False
        self.postponed = False
        """True if a due checkpoint waits for the upload of the previous checkpoint."""
        self._previous: Callable[[int, FrameType | None], Any] | int | None = None
        self._installed = False

    def attach(self, sharing: SharedDecisions) -> None:
        """Attach the data that ranks share within `due`."""
        self._consensus.sharing = sharing

    def settle(self) -> None:
        """Read the votes of the last step at once, and not after the next step."""
        self._consensus.settle()

    def close(self) -> None:
        """Read the votes of the other ranks after the last step."""
        self._consensus.close()

    @property
    def should_stop(self) -> bool:
        """Return True if the loop should leave after this step."""
        if self._agreed is not None:
            return True
        stop = self._stop
        if stop is None or self._ranks.size > 1:
            return False
        return not (stop.checkpoint and self._uses_due)

    @property
    def is_asked_to_stop(self) -> bool:
        """Return True once this process has a request to stop, also before the loop may learn of the request."""
        return self._stop is not None

    def grace_left_s(self) -> float | None:
        """Return the seconds until the agent kills this process; None if unknown."""
        stop = self._stop
        return None if stop is None or stop.ends_at is None else stop.ends_at - time.monotonic()

    @property
    def stop_reason(self) -> str | None:
        """Return the reason of the stop, once `should_stop` is true."""
        if not self.should_stop:
            return None
        stop = self._stop or self._agreed  # A vote cannot carry every reason.
        return stop.reason if stop is not None else None

    def due(
        self, step: int, on_interval: bool, busy: Callable[[], bool] = lambda: False, *, last: bool = False
    ) -> bool:
        """Return True if a checkpoint is due after `step`. Collective: all ranks agree.

        While `busy` (called only if needed) returns True, the method postpones a checkpoint, unless `last` (no further
        step is known).
        """
        self._uses_due = True
        alone = self._ranks.size == 1
        votes = self._votes() if alone else self._consensus.collect(self._votes)
        asked, stop = bool(votes.asked), self._stop if alone else _stop_of(votes)
        wanted = on_interval or asked or self.postponed
        if stop is None and wanted:
            # All ranks know that a checkpoint is due, therefore all ranks agree at once; the cost is negligible beside
            # a checkpoint.
            (self.postponed,) = map(bool, self._ranks.agree(int(not last and busy())))
        if not alone:
            # The loop fulfills or postpones a known request, therefore no vote repeats the request.
            mine = self._votes()
            self._consensus.send(mine._replace(asked=0) if wanted else mine)
            if last:
                self._consensus.settle()
        if stop is None:
            return wanted and not self.postponed
        if self._agreed is None:
            log.warning("stopping after step %d (%s)", step, stop.reason)
        self._agreed = stop
        # A stop without checkpoint means a lost lease or a canceled job, whose checkpoint would be useless.
        return stop.checkpoint and (on_interval or asked or not self._answered)

    def starting_checkpoint(self) -> None:
        """Begin a checkpoint on all ranks; later requests are for another checkpoint."""
        self._checkpoint_requested = False
        self._consensus.mark_answered()
        self.postponed = False

    def checkpoint_skipped(self) -> None:
        """Postpone the checkpoint until the arena is free."""
        self.postponed = True

    @property
    def stopping(self) -> bool:
        """Return True if all ranks know of a stop."""
        return self._agreed is not None or (self._ranks.size == 1 and self._stop is not None)

    def checkpoint_written(self) -> None:
        """Record a committed checkpoint."""
        self.tag = ""
        self._answered = self._agreed is not None

    def receive(self, directive: TrainerDirective) -> None:
        """Record a directive of the agent. Thread-safe."""
        if directive.kind == "checkpoint":
            self._checkpoint_requested = True
            return
        earlier = self._stop
        # A stop without checkpoint stays in force, because no checkpoint may follow.
        checkpoint = directive.checkpoint and (earlier is None or earlier.checkpoint)
        ends_at = None if directive.grace_s is None else time.monotonic() + directive.grace_s
        self._stop = _Stop(directive.reason, checkpoint, ends_at)

    def request_stop(self, reason: str, *, checkpoint: bool) -> None:
        """Request the loop to leave, for a rule or command."""
        self.receive(TrainerDirective("stop", reason, checkpoint))

    def request_save(self, tag: str = "") -> None:
        """Request a checkpoint with a tag, for a rule or command; the newer of two tags wins."""
        self.tag = tag or self.tag
        self.receive(TrainerDirective("checkpoint"))

    def _votes(self) -> Vote:
        """Return this process's requests as a vote."""
        asked, stop = self._checkpoint_requested, self._stop
        if stop is None:
            return Vote(int(asked))
        reason = 1 + _REASONS.index(stop.reason if stop.reason in _REASONS else "other")
        return Vote(int(asked), reason, int(not stop.checkpoint))

    # --- SIGTERM: a preempting host sends the signal to every process -------------------------------------------------

    def install(self) -> None:
        """Handle SIGTERM as a stop with a checkpoint; an existing handler runs afterwards."""
        if threading.current_thread() is not threading.main_thread():
            log.info("not in the main thread: SIGTERM keeps its meaning")
            return
        previous = signal.getsignal(signal.SIGTERM)
        if previous is None or previous == signal.SIG_IGN:
            return  # A handler in C, or SIGTERM is ignored on purpose.
        self._previous = previous
        signal.signal(signal.SIGTERM, self._on_sigterm)
        self._installed = True

    def uninstall(self) -> None:
        """Restore the earlier handler of SIGTERM."""
        if self._installed and threading.current_thread() is threading.main_thread():
            self._installed = False
            if signal.getsignal(signal.SIGTERM) == self._on_sigterm:
                signal.signal(signal.SIGTERM, self._previous)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        stop = self._stop
        # A forked child inherits this handler and must end as by default. A loop with a stop without checkpoint ends at
        # once, too.
        end_now = os.getpid() != self._pid or (stop is not None and not stop.checkpoint)
        if stop is None:
            self._stop = _Stop(SIGNAL_REASON, checkpoint=True)
        if callable(self._previous):
            self._previous(number, frame)
        elif end_now:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
