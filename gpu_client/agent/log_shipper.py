"""Ships the trainer's output to the job, behind the training. Losing a log line never costs training."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from contract.work import LogChunk
from gpu_client.agent.trainer_output import LogSpool
from gpu_client.transport.errors import BatonError, InvalidRequest, LeaseLost

logger = logging.getLogger("baton.logs")

SHIP_EVERY_S = 5.0
MAX_LINES = 500
MAX_LINE_CHARS = 4000
MAX_CHUNKS = 4
MAX_FAREWELL_CHUNKS = 20


class LogShipper:
    """A thread that sends what is in the spool every few seconds until closed.

    A job takes no lines after its attempt has ended: call `flush` just before reporting the end.
    """

    def __init__(self, spool: LogSpool, send: Callable[[LogChunk], object], *, every_s: float = SHIP_EVERY_S) -> None:
        self._spool = spool
        self._send = send
        self._every_s = every_s
        self._next_line = 0
        self._lost = False
        self._shipping = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log-shipper", daemon=True)
        self._thread.start()

    def flush(self) -> None:
        """Send what is left, within reason: up to 20 chunks, until one cannot be sent."""
        self._ship(max_chunks=MAX_FAREWELL_CHUNKS)

    def close(self) -> None:
        """End the thread; what was not sent is not sent any more."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(self._every_s):
            try:
                self._ship(max_chunks=MAX_CHUNKS)
            except Exception:
                # The job's log would end here without a word.
                logger.exception("log lines could not be sent")

    def _ship(self, *, max_chunks: int) -> None:
        """Send chunks until there are none, one fails, or there were enough; a failed one is sent again later."""
        with self._shipping:
            for _ in range(max_chunks):
                chunk = None if self._lost else self._spool.next_chunk(flush=True)
                if chunk is None:
                    return
                lines = chunk.data.decode("utf-8", "replace").removesuffix("\n").split("\n")
                try:
                    self._send_lines(lines, chunk.dropped_bytes)
                except LeaseLost:
                    self._lost = True
                    return
                except InvalidRequest as error:
                    # It would be refused for ever, and all later lines with it.
                    logger.warning("%d log lines are dropped: %s", len(lines), error)
                except BatonError as error:
                    logger.warning("log lines are kept for later: %s", error)
                    return
                self._next_line += len(lines)
                self._spool.ack(chunk.sequence)

    def _send_lines(self, lines: list[str], dropped_bytes: int) -> None:
        for start in range(0, len(lines), MAX_LINES):
            part = [line[:MAX_LINE_CHARS] for line in lines[start : start + MAX_LINES]]
            self._send(
                LogChunk(
                    first_line=self._next_line + start, lines=part, dropped_bytes=dropped_bytes if start == 0 else 0
                )
            )
