"""Commit checkpoints in the background, one at a time. The newest waiting checkpoint supersedes older ones."""

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
from gpu_client.agent.retry_pauses import may_pass
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
"""Pause in seconds before a failed commit is repeated, unless a newer checkpoint supersedes the failed one."""

MAX_TRIES = 5
"""Tries for a commit with a possibly permanent failure: a full disk, a refused upload."""

POLL_S = 0.1
CLOSE_WAIT_S = 5.0
"""Seconds for which `close` waits for a hanging call. The thread is a daemon, and its lease is ending."""


@dataclass(frozen=True)
class StagedCheckpoint:
    """A complete checkpoint that the trainer cannot change any more."""

    step: int
    path: Path
    metrics: dict[str, float]
    created_by: CreatedBy
    files: tuple[FileState, ...] | None = None
    """State of the files at staging, for checkpoints staged by links."""
    release: Callable[[], None] | None = None
    """Callback that replaces the removal of `path`, for a checkpoint in the arena."""
    tag: str = ""
    """Tag by which a rule or command keeps the checkpoint."""
    origin: ReadyCheckpoint | None = None
    """The foreign checkpoint, in the watcher's description."""

    def discard(self) -> None:
        """Remove or release the files of a committed or superseded checkpoint."""
        if self.release is not None:
            self.release()
        else:
            shutil.rmtree(self.path, ignore_errors=True)


class _Verdict(Enum):
    """Result of one try."""

    COMMITTED = "committed"
    AGAIN = "again"
    """No answer of the control plane or the store: repeat until an answer or a newer checkpoint arrives."""
    PERHAPS = "perhaps"
    """Possibly permanent failure: repeat up to MAX_TRIES."""
    GIVEN_UP = "given up"


class Committer:
    """A thread that commits staged checkpoints until closed. No error prevents the commit of later checkpoints.

    `commit` commits one checkpoint, and ends early when its event is set; `prove` returns True if the lease holds. A
    checkpoint counts as committed once `commit` has returned. `over` is set when commits are no longer permitted.
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
        """Steps whose checkpoints were superseded or failed for good."""
        self.last_error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="committer", daemon=True)
        self._thread.start()

    def offer(self, staged: StagedCheckpoint) -> None:
        """Queue a checkpoint, which supersedes a waiting checkpoint."""
        with self._changed:
            if self._waiting is not None:
                staged = self._replace_waiting(self._waiting, staged)
            self._waiting = staged
            self._tries = 0
            self._changed.notify_all()

    @property
    def busy(self) -> bool:
        """Return True while a checkpoint waits or is being committed."""
        return self._busy or self._waiting is not None

    def drain(self, give_up: Callable[[], bool] = lambda: False) -> bool:
        """Wait until no checkpoint waits or is being committed.

        Returns False if `give_up` returns True or `over` is set.
        """
        with self._changed:
            while self._waiting is not None or self._busy:
                if give_up() or self._cancel.is_set():
                    return False
                self._changed.wait(POLL_S)
        return True

    def close(self) -> None:
        """Cancel the commit in progress and end the thread. Waiting checkpoints are not committed."""
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
                    self._drop(staged, "given up")
                else:
                    self._waiting = staged
                    self._pause()
                self._changed.notify_all()

    def _next(self) -> StagedCheckpoint | None:
        """Wait for the next checkpoint to commit; returns None at the end."""
        with self._changed:
            while self._waiting is None and not self._cancel.is_set():
                self._changed.wait(POLL_S * 5)
            staged, self._waiting = self._waiting, None
            if staged is not None and self._cancel.is_set():
                self._drop(staged, "given up")
                return None
            self._busy = staged is not None
            return staged

    def _pause(self) -> None:
        """Wait before the next try, unless a newer checkpoint comes or `over` is set. Lock held."""
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
            # Catch all: an error must not silently end the commits of all later checkpoints.
            logger.exception("the commit of step %d failed in an unexpected way", staged.step)
            return self._record_failure(staged, error, _Verdict.GIVEN_UP)
        self.last_error = None
        return _Verdict.COMMITTED

    def _record_failure(self, staged: StagedCheckpoint, error: Exception, verdict: _Verdict) -> _Verdict:
        self.last_error = error
        logger.warning("checkpoint of step %d is not committed: %s", staged.step, error)
        return verdict

    def _replace_waiting(self, staged: StagedCheckpoint, newer: StagedCheckpoint) -> StagedCheckpoint:
        """Return the newer checkpoint; a checkpoint without a tag inherits the tag of the superseded one."""
        self._drop(staged, "superseded by a newer one")
        return replace(newer, tag=newer.tag or staged.tag)

    def _drop(self, staged: StagedCheckpoint, reason: str) -> None:
        self.skipped_steps.append(staged.step)
        logger.info("checkpoint of step %d is dropped: %s", staged.step, reason)
        self._on_skipped()
        _discard(staged)


def _discard(staged: StagedCheckpoint) -> None:
    """Discard a checkpoint and log an error, because an error must not end later commits."""
    try:
        staged.discard()
    except OSError as error:
        logger.warning("the files of step %d cannot be removed: %s", staged.step, error)
