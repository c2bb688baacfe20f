"""What the training loop has been asked to do, by the agent or by a signal, and when the loop gets to see it.

Wishes arrive at any moment, from the channel's thread or a signal handler, and are recorded by single assignments (no
locks: a handler may interrupt anything). The loop sees them at its own pace: a stop that wants a checkpoint first is
shown only when `due` has asked for that checkpoint, so that no loop leaves without saving, and with several processes
every rank sees a wish after the same call.
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
from gpu_client.training.distributed.rank_consensus import Sharing, Votes, Voting
from gpu_client.training.protocol import STOP_REASONS, Directive

SIGNAL_REASON = "signal"
# The higher of two wins where ranks were told different things.
_REASONS = (SIGNAL_REASON, "other", *STOP_REASONS)

log = logging.getLogger("baton.training")


@dataclass(frozen=True)
class _Stop:
    """A wish to stop; `reason` is one of the agent's, or "signal" for SIGTERM."""

    reason: str
    checkpoint: bool


def _stop_of(votes: Votes) -> _Stop | None:
    return _Stop(_REASONS[votes.stop - 1], not votes.refuses) if votes.stop else None


class Directives:
    """The pending wishes. `receive` and the signal handler write them, the training thread reads them."""

    def __init__(self, ranks: Ranks, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds, for the processes of one training among themselves."""
        self._ranks = ranks
        self._voting = Voting(ranks, clock=clock)
        self._pid = os.getpid()
        self._checkpoint_asked = False
        self._stop: _Stop | None = None  # what is wished, as of now
        self._agreed: _Stop | None = None  # what all ranks have seen, as of the last call of due
        self.tag = ""
        """By which the next checkpoint is to be kept."""
        self._answered = False  # a checkpoint has been written since then
        self._uses_due = False
        self.put_off = False
        """A checkpoint that was due waits until there is room for it: the next moment will do."""
        self._previous: Callable[[int, FrameType | None], Any] | int | None = None
        self._installed = False

    def share_with(self, sharing: Sharing) -> None:
        """Whoever has something for all ranks: they call it in the same call of `due`."""
        self._voting.sharing = sharing

    def settle(self) -> None:
        """Have what all ranks reported after the last step, which is otherwise heard after the next one."""
        self._voting.settle()

    def close(self) -> None:
        """The loop is over: what others reported after its last step is heard still."""
        self._voting.close()

    @property
    def should_stop(self) -> bool:
        """Whether the loop is to leave now."""
        if self._agreed is not None:
            return True
        stop = self._stop
        if stop is None or self._ranks.size > 1:
            return False
        return not (stop.checkpoint and self._uses_due)

    @property
    def stop_reason(self) -> str | None:
        """Why, once `should_stop` is true."""
        if not self.should_stop:
            return None
        stop = self._stop or self._agreed  # the own one knows more than what ranks can tell each other
        return stop.reason if stop is not None else None

    def due(
        self, step: int, on_interval: bool, busy: Callable[[], bool] = lambda: False, *, last: bool = False
    ) -> bool:
        """Whether a checkpoint is to be written after `step`. The point at which ranks agree.

        While `busy` (asked only if it matters) it is put off, unless it is the last one. last: as far as is known no
        step comes after this one.
        """
        self._uses_due = True
        alone = self._ranks.size == 1
        votes = self._votes() if alone else self._voting.hear(self._votes)
        asked, stop = bool(votes.asked), self._stop if alone else _stop_of(votes)
        wanted = on_interval or asked or self.put_off
        if stop is None and wanted:
            # Everybody knows that one is due, so they may ask each other: beside a checkpoint that is nothing.
            (self.put_off,) = map(bool, self._ranks.agree(int(not last and busy())))
        if not alone:
            # What all know by now is not wished once more: it is on its way, or put off.
            mine = self._votes()
            self._voting.send(mine._replace(asked=0) if wanted else mine)
            if last:
                self._voting.settle()
        if stop is None:
            return wanted and not self.put_off
        if self._agreed is None:
            log.warning("stopping after step %d (%s)", step, stop.reason)
        self._agreed = stop
        # Without a checkpoint: the lease is gone or the job is canceled; nothing may or need be saved.
        return stop.checkpoint and (on_interval or asked or not self._answered)

    def starting_checkpoint(self) -> None:
        """A checkpoint is about to be written, by all ranks: wishes from here on ask for another one."""
        self._checkpoint_asked = False
        self._voting.answered()
        self.put_off = False

    def checkpoint_skipped(self) -> None:
        """The one that was about to be written was not: it is due as soon as there is room for it."""
        self.put_off = True

    @property
    def stopping(self) -> bool:
        """Whether a stop has been asked for, as far as all ranks know."""
        return self._agreed is not None or (self._ranks.size == 1 and self._stop is not None)

    def checkpoint_written(self) -> None:
        """A checkpoint has been committed."""
        self.tag = ""
        self._answered = self._agreed is not None

    def receive(self, directive: Directive) -> None:
        """A directive of the agent; from any thread."""
        if directive.kind == "checkpoint":
            self._checkpoint_asked = True
            return
        earlier = self._stop
        # Once nothing may be saved any more, that stays so.
        checkpoint = directive.checkpoint and (earlier is None or earlier.checkpoint)
        self._stop = _Stop(directive.reason, checkpoint)

    def ask_to_stop(self, reason: str, *, checkpoint: bool) -> None:
        """A rule or command wants the loop to leave."""
        self.receive(Directive("stop", reason, checkpoint))

    def ask_to_save(self, tag: str = "") -> None:
        """A rule or command wants a checkpoint, and that it is kept by that tag; of two tags the newer one counts."""
        self.tag = tag or self.tag
        self.receive(Directive("checkpoint"))

    def _votes(self) -> Votes:
        """What this process is asked for."""
        asked, stop = self._checkpoint_asked, self._stop
        if stop is None:
            return Votes(int(asked))
        reason = 1 + _REASONS.index(stop.reason if stop.reason in _REASONS else "other")
        return Votes(int(asked), reason, int(not stop.checkpoint))

    # --- SIGTERM: hosts that take a machine back send it to every process ---------------------------------------------

    def install(self) -> None:
        """Treat SIGTERM as a stop with a checkpoint; a handler that is there already is called afterwards."""
        if threading.current_thread() is not threading.main_thread():
            log.info("not in the main thread: SIGTERM keeps its meaning")
            return
        previous = signal.getsignal(signal.SIGTERM)
        if previous is None or previous == signal.SIG_IGN:
            return  # somebody has decided, in C or by ignoring it
        self._previous = previous
        signal.signal(signal.SIGTERM, self._on_sigterm)
        self._installed = True

    def uninstall(self) -> None:
        """Give SIGTERM back."""
        if self._installed and threading.current_thread() is threading.main_thread():
            self._installed = False
            if signal.getsignal(signal.SIGTERM) == self._on_sigterm:
                signal.signal(signal.SIGTERM, self._previous)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        stop = self._stop
        # A forked child that inherited this handler ends as if it had not; so does a loop that was told to leave
        # without saving anything, and is told again.
        end_now = os.getpid() != self._pid or (stop is not None and not stop.checkpoint)
        if stop is None:
            self._stop = _Stop(SIGNAL_REASON, checkpoint=True)
        if callable(self._previous):
            self._previous(number, frame)
        elif end_now:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
