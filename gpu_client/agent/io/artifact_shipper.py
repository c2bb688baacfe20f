"""Upload files that the training shows before its end.

No output depends on these uploads: the end of the job uploads missing files with all outputs and skips stored files,
and only `complete` turns stored files into outputs. If a file lies in the parts directory of a shared file, the next
attempt may receive the file.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from baton.contract.base import MAX_PATH_BYTES, path_problem
from gpu_client.agent.polled_event import PolledEvent
from gpu_client.agent.retry_pauses import backoff_s, may_pass
from gpu_client.transport.errors import (
    ApiError,
    BatonError,
    LeaseExpired,
    LeaseLost,
    TransferCanceled,
    Unreachable,
)
from gpu_client.transport.net.cancellation import CancelEvent

logger = logging.getLogger("baton.artifacts")

MAX_FILE_BYTES = 64 * 1024**2
"""Size limit of a file. Larger files are no pictures and would delay checkpoints on a slow network."""
MAX_FILES = 1000
"""Limit of files in one attempt. A job has at most 500 outputs."""
BATCH_FILES = 50
GATHER_S = 1.0
"""Pause in seconds for the other pictures of a step, so that all pictures of a step share an API call."""
RETRY_S = 2.0
MAX_TRIES = 3
"""Tries for a file whose upload fails although the control plane and the store answer."""
POLL_S = 0.5
IDLE_POLL_S = 0.05
CLOSE_WAIT_S = 5.0
"""Seconds for which `close` waits for a hanging call; its thread is a daemon."""


class ArtifactShipper:
    """A thread that uploads offered files until closed, or until `over` is set.

    `upload` stores files, by path below the output directory, and ends early when its event is set; `prove` returns
    True if the lease holds.
    """

    def __init__(
        self,
        output_dir: Path,
        upload: Callable[[Mapping[str, Path], CancelEvent], object],
        prove: Callable[[], bool],
        *,
        over: CancelEvent,
        gather_s: float | None = None,
        retry_s: float = RETRY_S,
    ) -> None:
        self._root = output_dir.resolve()
        self._upload = upload
        self._prove = prove
        self._gather_s = GATHER_S if gather_s is None else gather_s
        self._retry_s = retry_s
        self._lock = threading.Lock()
        self._waiting: dict[str, Path] = {}
        self._busy = False
        self._tries: Counter[str] = Counter()
        self._offered = 0
        self._closing = False
        self._lost = False
        self._over = PolledEvent(lambda: self._closing or self._lost or over.is_set())
        self._news = threading.Event()
        self._thread = threading.Thread(target=self._run, name="artifacts", daemon=True)
        self._thread.start()

    def offer(self, path: Path) -> str | None:
        """Queue a finished file below the output directory. Returns the reason if the file is refused, or None.

        Never waits. A repeated path means that the training has rewritten the file.
        """
        with self._lock:
            self._offered += 1
            if self._offered > MAX_FILES:
                return f"more than {MAX_FILES} files to show" if self._offered == MAX_FILES + 1 else None
        problem = self._find_problem(path)
        if problem is not None:
            return problem
        with self._lock:
            self._waiting[path.relative_to(self._root).as_posix()] = path
        self._news.set()
        return None

    def drain(self, give_up: Callable[[], bool]) -> bool:
        """Wait until each offered file is stored or has failed for good.

        Returns False if `give_up` returns True or no upload is permitted.
        """
        while not self._over.is_set():
            with self._lock:
                if not self._waiting and not self._busy:
                    return True
            if give_up():
                return False
            self._over.wait(IDLE_POLL_S)
        return False

    def close(self) -> None:
        """Cancel the upload in progress and end the thread. May be called twice."""
        self._closing = True
        self._news.set()
        self._thread.join(CLOSE_WAIT_S)

    def _find_problem(self, path: Path) -> str | None:
        if not path.is_relative_to(self._root):
            return "is not inside the output directory"
        problem = path_problem(path.relative_to(self._root).as_posix(), max_bytes=MAX_PATH_BYTES)
        if problem is not None:
            return problem
        try:
            if not path.is_file():
                return "is not a file" if path.exists() else "does not exist"
            with path.open("rb"):
                size_bytes = path.stat().st_size
        except OSError as error:
            return f"cannot be read: {error.strerror}"
        if size_bytes > MAX_FILE_BYTES:
            return f"has {size_bytes} bytes; at most {MAX_FILE_BYTES} are sent before the end"
        return None

    def _run(self) -> None:
        fruitless = 0
        while not self._over.is_set():
            if not self._waiting:
                self._news.wait(POLL_S)
                self._news.clear()
                continue
            if self._over.wait(backoff_s(self._retry_s, fruitless - 1) if fruitless else self._gather_s):
                return
            fruitless = 0 if self._ship() else fruitless + 1

    def _ship(self) -> bool:
        """Upload a batch; returns False if the batch has to wait."""
        batch = self._next_batch()
        again = True
        try:
            if not self._prove():
                return False
            self._upload(batch, self._over)
            again = False
        except LeaseLost:
            self._lost = True
        except (Unreachable, LeaseExpired) as error:
            logger.warning("%d artifacts are kept for later: %s", len(batch), error)
            return False
        except TransferCanceled:
            return False
        except ApiError as error:
            again = may_pass(error) or len(batch) > 1
            return self._record_failure(batch, error)
        except (BatonError, OSError) as error:
            return self._record_failure(batch, error)
        except Exception:
            # Catch all: an error must not stop the uploads of later files.
            again = False
            logger.exception("%s: not uploaded before the end", ", ".join(batch))
        else:
            logger.info("%d artifacts uploaded: %s", len(batch), ", ".join(batch))
        finally:
            if again:
                self._put_back(batch)
            self._busy = False
        return True

    def _record_failure(self, batch: Mapping[str, Path], error: Exception) -> bool:
        """Count a failed try for each file of the batch. Later tries upload the files one by one."""
        self._tries.update(list(batch))
        logger.warning("%s: not uploaded before the end: %s", ", ".join(batch), error)
        return False

    def _next_batch(self) -> dict[str, Path]:
        """Take the next files. A failed file forms a batch alone, because the file may have failed its former batch."""
        with self._lock:
            tried = next((path for path in self._waiting if self._tries[path]), None)
            paths = [tried] if tried is not None else list(self._waiting)[:BATCH_FILES]
            self._busy = True
            return {path: self._waiting.pop(path) for path in paths}

    def _put_back(self, batch: Mapping[str, Path]) -> None:
        """Queue the files again, except files with a newer version in the queue."""
        with self._lock:
            retried = {path: file for path, file in batch.items() if self._tries[path] < MAX_TRIES}
            self._waiting = {**retried, **self._waiting}
