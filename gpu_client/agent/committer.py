"""Commits checkpoints behind the training: one at a time, the newest waiting one wins."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gpu_client.checkpoints.watch import CreatedBy
from gpu_client.transport.errors import (
    ApiError,
    BatonError,
    DiskFull,
    LeaseExpired,
    LeaseLost,
    TransferCanceled,
    TransferError,
    Unreachable,
)

logger = logging.getLogger("baton.committer")

RETRY_S = 2.0
"""Pause before a commit that failed on the way is tried again, unless a newer checkpoint took its place."""


@dataclass(frozen=True)
class Staged:
    """A complete checkpoint, taken over from the trainer."""

    step: int
    path: Path
    metrics: dict[str, float]
    created_by: CreatedBy


class Committer:
    """A thread that commits staged checkpoints until closed.

    `commit` does one; `prove` says whether the lease holds at this moment. An error that can pass (network, storage) is
    tried again until a newer checkpoint comes; nothing counts as committed before `commit` returned.
    """

    def __init__(
        self,
        commit: Callable[[Staged], object],
        prove: Callable[[], bool],
        *,
        on_lost: Callable[[BaseException], None],
        stopped: threading.Event,
    ) -> None:
        self._commit = commit
        self._prove = prove
        self._on_lost = on_lost
        self._stopped = stopped
        self._changed = threading.Condition()
        self._waiting: Staged | None = None
        self._busy = False
        self._closing = False
        self.committed_steps: list[int] = []
        self.skipped_steps: list[int] = []
        self.last_error: BatonError | OSError | None = None
        self._thread = threading.Thread(target=self._run, name="committer", daemon=True)
        self._thread.start()

    def offer(self, staged: Staged) -> None:
        """Hand over a checkpoint; one that is still waiting is passed over for it."""
        with self._changed:
            if self._waiting is not None:
                self._drop(self._waiting)
            self._waiting = staged
            self._changed.notify_all()

    def drain(self, timeout_s: float, give_up: Callable[[], bool] = lambda: False) -> bool:
        """Wait until nothing is waiting or under way; False if that takes longer or `give_up` says so."""
        waited_s = 0.0
        with self._changed:
            while self._waiting is not None or self._busy:
                if waited_s >= timeout_s or give_up() or self._stopped.is_set():
                    return False
                self._changed.wait(0.1)
                waited_s += 0.1
        return True

    def close(self) -> None:
        """End the thread; what is under way is stopped by the `stopped` event, not here."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._waiting is None and not self._closing:
                    self._changed.wait()
                if self._waiting is None or self._stopped.is_set():
                    return
                staged, self._waiting, self._busy = self._waiting, None, True
            again = self._try(staged)
            with self._changed:
                self._busy = False
                keep = again and self._waiting is None and not self._closing
                if keep:
                    self._waiting = staged
                elif again:
                    self._drop(staged)
                self._changed.notify_all()
            if not again:
                shutil.rmtree(staged.path, ignore_errors=True)
            elif self._stopped.wait(RETRY_S):
                return

    def _try(self, staged: Staged) -> bool:
        """One attempt at a commit; True if it should be tried again."""
        try:
            if not self._prove():
                return True
            self._commit(staged)
        except (LeaseLost, LeaseExpired) as error:
            if isinstance(error, LeaseExpired):
                return True
            self._on_lost(error)
            return False
        except TransferCanceled:
            return False
        except ApiError as error:
            self._note(staged, error)
            return False
        except (Unreachable, TransferError, DiskFull, OSError) as error:
            self._note(staged, error)
            return True
        self.last_error = None
        self.committed_steps.append(staged.step)
        return False

    def _note(self, staged: Staged, error: BatonError | OSError) -> None:
        self.last_error = error
        logger.warning("checkpoint of step %d is not committed: %s", staged.step, error)

    def _drop(self, staged: Staged) -> None:
        self.skipped_steps.append(staged.step)
        logger.info("checkpoint of step %d is passed over for a newer one", staged.step)
        shutil.rmtree(staged.path, ignore_errors=True)
