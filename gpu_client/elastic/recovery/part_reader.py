"""Read several parts of peers' outer states at once; the round thread never waits long for a slow line."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import torch

from gpu_client.elastic.engines.engine import Peer
from gpu_client.elastic.errors import ElasticError, GroupAbortedError
from gpu_client.elastic.recovery.state_transfer import PartRequest, StateTransfer

PARALLEL_READS = 8
READ_S = 2.0
"""Longest time of one call: in a group the other members wait for the caller, and before a group the caller must see
an admission early enough to open the group."""
STOP_POLL_S = 0.2


class PartNotAskedError(ElasticError):
    """Report that no read of a part has begun yet, because the reads of other parts take their time."""


class PartReader:
    """Reads that go on between two calls of `read`."""

    def __init__(self, transfer: StateTransfer) -> None:
        self._transfer = transfer
        # Reads that nobody waits for any more end late, if their peer is frozen.
        self._pool = ThreadPoolExecutor(4 * PARALLEL_READS, thread_name_prefix="baton-parts")
        self._reads: dict[tuple[Peer, PartRequest], Future[torch.Tensor]] = {}

    def read(
        self, requests: Sequence[tuple[Peer, PartRequest]], is_stopping: Callable[[], bool]
    ) -> list[torch.Tensor | ElasticError | None]:
        """Return within READ_S, for each request, the part or the error; None for a part that is on the way.

        The next call with the same request continues the read. A request that no free thread has begun gets
        PartNotAskedError. Each peer has its share of the threads, so a slow peer does not hold up the parts of the
        others; the call returns early once a thread is free that the caller's plan does not use.
        Raises GroupAbortedError if `is_stopping`.
        """
        self._reads = {one: self._reads[one] for one in requests if one in self._reads}
        share = -(-PARALLEL_READS // max(1, len({peer for peer, _ in requests})))
        deadline = time.monotonic() + READ_S
        done_before = sum(one.done() for one in self._reads.values())
        while True:
            busy = self._begin(requests, share)
            running = [one for one in self._reads.values() if not one.done()]
            is_idle = busy < PARALLEL_READS and len(self._reads) < len(requests)
            has_ended = len(self._reads) - len(running) > done_before
            left_s = deadline - time.monotonic()
            if not running or left_s <= 0 or (is_idle and has_ended):
                return [self._take(one) for one in requests]
            wait(running, min(STOP_POLL_S, left_s), FIRST_COMPLETED)
            if is_stopping():
                raise GroupAbortedError("the node has been stopped")

    def close(self) -> None:
        """Begin no further read; the transfer ends the running ones."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _begin(self, requests: Sequence[tuple[Peer, PartRequest]], share: int) -> int:
        """Begin the reads that have a thread, and return the number of running reads."""
        busy = Counter(peer for (peer, _), one in self._reads.items() if not one.done())
        for peer, part in requests:
            if (peer, part) not in self._reads and busy.total() < PARALLEL_READS and busy[peer] < share:
                self._reads[peer, part] = self._pool.submit(self._transfer.read, peer, part)
                busy[peer] += 1
        return busy.total()

    def _take(self, request: tuple[Peer, PartRequest]) -> torch.Tensor | ElasticError | None:
        if request not in self._reads:
            return PartNotAskedError("other parts come first")
        if not self._reads[request].done():
            return None
        try:
            return self._reads.pop(request).result()
        except ElasticError as error:
            return error
