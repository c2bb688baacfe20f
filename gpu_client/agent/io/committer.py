"""Commits checkpoints behind the training: one at a time, the newest waiting one wins."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from gpu_client.agent.polled_event import PolledEvent
from gpu_client.agent.retry import may_pass
from gpu_client.checkpoints.local.directory_files import BadDirectory, FileState
from gpu_client.checkpoints.local.staging import CreatedBy, ReadyCheckpoint
from gpu_client.transport.errors import (
    ApiError,
    BatonError,
    FileChanged,
    LeaseExpired,
    LeaseLost,
    TransferCanceled,
    Unreachable,
)
from gpu_client.transport.net.cancellation import CancelEvent

logger = logging.getLogger("baton.committer")

RETRY_S = 2.0
"""Pause before a commit that failed on the way is tried again, unless a newer checkpoint took its place."""

MAX_TRIES = 5
"""How often a commit is tried that fails for a reason that may pass but need not: a full disk, a refused upload."""

POLL_S = 0.1
CLOSE_WAIT_S = 5.0
"""How long `close` waits for a call that hangs. Its thread is a daemon, and the lease it writes with is ending."""


@dataclass(frozen=True)
class StagedCheckpoint:
    """A complete checkpoint, taken over from the trainer."""

    step: int
    path: Path
    metrics: dict[str, float]
    created_by: CreatedBy
    files: tuple[FileState, ...] | None = None
    """Those of one that was taken over by links, as they were then."""
    release: Callable[[], None] | None = None
    """For one that was left where the trainer put it: called, instead of removing `path`, when nobody reads it."""
    tag: str = ""
    """By which a rule or command wants it kept."""
    origin: ReadyCheckpoint | None = None
    """The checkpoint of a script without our session, as it was found."""

    def discard(self) -> None:
        """It is committed, or passed over."""
        if self.release is not None:
            self.release()
        else:
            shutil.rmtree(self.path, ignore_errors=True)


class _Verdict(Enum):
    """What becomes of a checkpoint after one try."""

    COMMITTED = "committed"
    AGAIN = "again"
    """The control plane or the store cannot be reached: try until it can, or a newer one takes its place."""
    PERHAPS = "perhaps"
    """Try again, but not for ever."""
    GIVEN_UP = "given up"


class Committer:
    """A thread that commits staged checkpoints until closed. Whatever goes wrong with one, the next has its chance.

    `commit` does one, and ends early when the event it is handed is set; `prove` says whether the lease holds at this
    moment. Nothing counts as committed before `commit` returned. `over` is set when nothing may be committed any more.
    """

    def __init__(
        self,
        commit: Callable[[StagedCheckpoint, CancelEvent], object],
        prove: Callable[[], bool],
        *,
        on_lost: Callable[[LeaseLost], None],
        over: CancelEvent,
        on_skipped: Callable[[], object] = lambda: None,
        retry_s: float = RETRY_S,
    ) -> None:
        self._commit = commit
        self._prove = prove
        self._on_lost = on_lost
        self._on_skipped = on_skipped
        self._closing = False
        self._cancel = PolledEvent(lambda: self._closing or over.is_set())
        self._retry_s = retry_s
        self._changed = threading.Condition()
        self._waiting: StagedCheckpoint | None = None
        self._tries = 0
        self._busy = False
        self.committed_steps: list[int] = []
        self.skipped_steps: list[int] = []
        """Handed over but not committed: a newer one took their place, or they were given up."""
        self.last_error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="committer", daemon=True)
        self._thread.start()

    def offer(self, staged: StagedCheckpoint) -> None:
        """Hand over a checkpoint; one that is still waiting is passed over for it."""
        with self._changed:
            if self._waiting is not None:
                staged = self._replace_waiting(self._waiting, staged)
            self._waiting = staged
            self._tries = 0
            self._changed.notify_all()

    @property
    def busy(self) -> bool:
        """Whether one is waiting or under way."""
        return self._busy or self._waiting is not None

    def drain(self, give_up: Callable[[], bool] = lambda: False) -> bool:
        """Wait until nothing is waiting or under way; False if `give_up` says so, or nothing may be committed."""
        with self._changed:
            while self._waiting is not None or self._busy:
                if give_up() or self._cancel.is_set():
                    return False
                self._changed.wait(POLL_S)
        return True

    def close(self) -> None:
        """Stop what is under way and end the thread. What was not committed by now is not committed."""
        self._closing = True
        with self._changed:
            self._changed.notify_all()
        self._thread.join(CLOSE_WAIT_S)

    def _run(self) -> None:
        while (staged := self._next()) is not None:
            verdict = self._try(staged)
            with self._changed:
                self._busy = False
                if verdict is _Verdict.COMMITTED:
                    self.committed_steps.append(staged.step)
                    _discard(staged)
                elif self._waiting is not None:
                    self._waiting = self._replace_waiting(staged, self._waiting)
                elif verdict is _Verdict.GIVEN_UP or self._cancel.is_set():
                    self._drop(staged, "good")
                else:
                    self._waiting = staged
                    self._pause()
                self._changed.notify_all()

    def _next(self) -> StagedCheckpoint | None:
        """The checkpoint to commit now; None at the end."""
        with self._changed:
            while self._waiting is None and not self._cancel.is_set():
                self._changed.wait(POLL_S * 5)
            staged, self._waiting = self._waiting, None
            if staged is not None and self._cancel.is_set():
                self._drop(staged, "good")
                return None
            self._busy = staged is not None
            return staged

    def _pause(self) -> None:
        """Wait before the next try, unless something newer comes or nothing may be committed. Lock held."""
        staged, until = self._waiting, time.monotonic() + self._retry_s
        while self._waiting is staged and not self._cancel.is_set() and (left_s := until - time.monotonic()) > 0:
            self._changed.wait(min(left_s, POLL_S))

    def _try(self, staged: StagedCheckpoint) -> _Verdict:
        self._tries += 1
        try:
            if not self._prove():
                return _Verdict.AGAIN
            self._commit(staged, self._cancel)
        except LeaseLost as error:
            self._on_lost(error)
            return _Verdict.GIVEN_UP
        except (LeaseExpired, Unreachable) as error:
            return self._record_failure(staged, error, _Verdict.AGAIN)
        except TransferCanceled:
            return _Verdict.GIVEN_UP
        except (BadDirectory, FileChanged) as error:
            return self._record_failure(staged, error, _Verdict.GIVEN_UP)
        except (BatonError, OSError) as error:
            final = isinstance(error, ApiError) and not may_pass(error)
            again = self._tries < MAX_TRIES and not final
            return self._record_failure(staged, error, _Verdict.PERHAPS if again else _Verdict.GIVEN_UP)
        except Exception as error:
            # Whatever it is, it must not end the commits of all later checkpoints without a word.
            logger.exception("the commit of step %d failed in an unexpected way", staged.step)
            return self._record_failure(staged, error, _Verdict.GIVEN_UP)
        self.last_error = None
        return _Verdict.COMMITTED

    def _record_failure(self, staged: StagedCheckpoint, error: Exception, verdict: _Verdict) -> _Verdict:
        self.last_error = error
        logger.warning("checkpoint of step %d is not committed: %s", staged.step, error)
        return verdict

    def _replace_waiting(self, staged: StagedCheckpoint, newer: StagedCheckpoint) -> StagedCheckpoint:
        """The newer one is kept by the tag of the one that is passed over for it, unless it has its own."""
        self._drop(staged, "a newer one")
        return replace(newer, tag=newer.tag or staged.tag)

    def _drop(self, staged: StagedCheckpoint, instead: str) -> None:
        self.skipped_steps.append(staged.step)
        logger.info("checkpoint of step %d is passed over for %s", staged.step, instead)
        self._on_skipped()
        _discard(staged)


def _discard(staged: StagedCheckpoint) -> None:
    """Files that cannot be removed or given back must not end the commits of all later checkpoints."""
    try:
        staged.discard()
    except OSError as error:
        logger.warning("the files of step %d stay where they are: %s", staged.step, error)
