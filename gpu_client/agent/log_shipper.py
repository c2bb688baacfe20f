"""Ships the trainer's output to the job, behind the training. Losing a log line never costs training."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from contract.work import LogChunk, log_wait_s
from gpu_client.agent.trainer_output import CHUNK_LINES, LogSpool
from gpu_client.transport.errors import BatonError, InvalidRequest, LeaseLost

logger = logging.getLogger("baton.logs")

SHIP_EVERY_S = 5.0
"""How often full chunks are sent, and during the first minutes whatever there is; later on that waits (`log_wait_s`).
Each is a call of the API and a PUT; one every 5 s would cost twenty times as much as all heartbeats (docs/costs.md)."""
MAX_LINES = CHUNK_LINES
MAX_LINE_CHARS = 4000
MAX_CALLS = 4
"""In one round. A script that prints faster than this loses its oldest lines: the spool counts them."""

MAX_FAREWELL_CALLS = 20
MAX_SHIP_S = 20.0
"""After this long no further call is begun, so that a slow control plane does not hold up the report of the end."""


class LogShipper:
    """A thread that sends what is in the spool, every few seconds and later on less often, until closed.

    One chunk of the spool is one call.

    A job takes no lines after its attempt has ended: call `flush` just before reporting the end.
    """

    def __init__(
        self,
        spool: LogSpool,
        send: Callable[[LogChunk], object],
        *,
        every_s: float = SHIP_EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spool = spool
        self._send = send
        self._every_s = every_s
        self._clock = clock
        self._next_line = 0
        self._lost = False
        self._shipping = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log-shipper", daemon=True)
        self._thread.start()

    def flush(self) -> None:
        """Send what is left, within reason: up to 20 chunks or 20 s, until one cannot be sent."""
        self._ship(max_calls=MAX_FAREWELL_CALLS, unfull=True)

    def close(self) -> None:
        """End the thread; what was not sent is sent by a last `flush`, if at all."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        began_at = swept_at = self._clock()
        while not self._closing.wait(self._every_s):
            now = self._clock()
            unfull = now - swept_at >= log_wait_s(now - began_at)
            swept_at = now if unfull else swept_at
            try:
                self._ship(max_calls=MAX_CALLS, unfull=unfull)
            except Exception:
                # The top of this thread. Everything expected is dealt with in `_ship`; were a bug to end the thread,
                # the job's log would end here without a word. The chunk stays in the spool and is tried again.
                logger.exception("log lines could not be sent")

    def _ship(self, *, max_calls: int, unfull: bool) -> None:
        """Send full chunks, with `unfull` also the one that is being filled.

        Until there are none, one fails, or there were enough; a failed one is sent again later.
        """
        with self._shipping:
            until = self._clock() + MAX_SHIP_S
            for _ in range(max_calls):
                chunk = None if self._lost else self._spool.next_chunk(flush=unfull)
                if chunk is None or self._clock() >= until:
                    return
                lines = chunk.data.decode("utf-8", "replace").removesuffix("\n").split("\n")
                short = [line[:MAX_LINE_CHARS] for line in lines]
                try:
                    self._send(LogChunk(first_line=self._next_line, lines=short, dropped_bytes=chunk.dropped_bytes))
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
