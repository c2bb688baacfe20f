"""Yield the shards that one node of an elastic training holds, and lease further shards ahead in a thread."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator

from baton.contract.elastic.data import MAX_LEASES, DataGrant, DataProgress, DataRequest
from baton.contract.elastic.spans import has_number
from gpu_client.elastic.data.shard_plan import Shard, ShardPlan
from gpu_client.elastic.errors import WorldCallError, WorldUnavailableError
from gpu_client.elastic.membership.world_calls import WorldCalls
from gpu_client.elastic.rounds.outer_replica import OuterReplica

LEAD_S = 300.0
"""Training time of the shards leased ahead, in which the control plane may be away."""
MIN_AHEAD, MAX_AHEAD = 2, MAX_LEASES // 2
RETRY_S, EXHAUSTED_RETRY_S = 1.0, 10.0
POLL_S = 0.2
PATIENCE_S = 1.0
"""Longest wait for a shard with progress that the other members may wait for."""


class LeasedShards:
    """Iterable over the shards of one node. The next shard finishes the one before.

    The loop ends once the committed rounds contain all shards of all nodes, or at a stop. contribute: takes part in a
    round with the progress so far, if there is any. epoch: newest epoch with the group's state.
    """

    def __init__(
        self,
        plan: ShardPlan,
        replica: OuterReplica,
        world: WorldCalls,
        *,
        epoch: Callable[[], int],
        contribute: Callable[[], None],
        is_stopping: Callable[[], bool],
    ) -> None:
        self.plan = plan
        self._replica, self._world = replica, world
        self._progress = replica.progress
        self._epoch, self._contribute, self._is_stopping = epoch, contribute, is_stopping
        self._queue: dict[int, int] = {}
        """Offsets of the leased shards that the loop has not received, by position."""
        self._position: int | None = None
        """Shard in the loop."""
        self._is_exhausted = self._is_closed = False
        self._error: WorldCallError | None = None
        self._pace_s: float | None = None
        """Duration of a shard."""
        self._thread: threading.Thread | None = None

    def __iter__(self) -> Iterator[Shard]:
        self._position = None
        while (shard := self._next()) is not None:
            began_at = time.monotonic()
            yield shard
            self._finish(shard, time.monotonic() - began_at)

    @property
    def upcoming(self) -> list[Shard]:
        """Return the next shards of this node, to be fetched ahead."""
        with self._progress.changed:
            return [self.plan.locate(one, offset, self.note) for one, offset in sorted(self._queue.items())]

    def close(self) -> None:
        """End the thread, after its present call."""
        with self._progress.changed:
            self._is_closed = True
            self._progress.changed.notify_all()

    # --- main thread -------------------------------------------------------------------------------------------------

    def _next(self) -> Shard | None:
        """Wait for the next shard; None at the end."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._lease_ahead, name="shards", daemon=True)
            self._thread.start()
        progress, waits_until = self._progress, time.monotonic() + PATIENCE_S
        while not (self._is_finished() or self._is_stopping() or progress.is_ended):
            with progress.changed:
                progress.changed.wait_for(self._is_awaited, POLL_S)
                if self._error is not None:
                    raise self._error
                if self._queue:
                    progress.is_idle = False
                    self._position = min(self._queue)
                    shard = self.plan.locate(self._position, self._queue.pop(self._position), self.note)
                    progress.changed.notify_all()
                    return shard
            if not self._is_exhausted and time.monotonic() < waits_until:
                continue
            # The shards of lost nodes may still return to this node.
            progress.notify(is_idle=True)
            self._contribute()
        return None

    def _is_finished(self) -> bool:
        return self._replica.data.covers(self.plan.positions)

    def _is_awaited(self) -> bool:
        return bool(self._queue or self._error) or self._is_finished() or self._progress.is_ended

    def _finish(self, shard: Shard, duration_s: float) -> None:
        self._pace_s = duration_s if self._pace_s is None else (self._pace_s + duration_s) / 2
        self._add(DataProgress(finished=[[shard.position, shard.position + 1]]))
        self._position = None

    def note(self, position: int, offset: int) -> None:
        """Note that a shard is trained up to `offset`."""
        self._add(DataProgress(offsets=[[position, offset]]))

    def _add(self, trained: DataProgress) -> None:
        with self._progress.changed:
            self._progress.data = self._progress.data.merge(trained)

    # --- thread ------------------------------------------------------------------------------------------------------

    @property
    def _ahead(self) -> int:
        needed = 0 if self._pace_s is None else math.ceil(LEAD_S / max(self._pace_s, 1e-3))
        return min(MAX_AHEAD, max(MIN_AHEAD, needed))

    def _lease_ahead(self) -> None:
        changed = self._progress.changed
        while not self._is_closed:
            with changed:
                changed.wait_for(lambda: self._is_closed or len(self._queue) <= self._ahead // 2)
            try:
                grant = self._world.lease(self._describe())
            except WorldUnavailableError:
                grant = None
            except WorldCallError as error:
                with changed:
                    self._error = error
                    changed.notify_all()
                return
            with changed:
                known = len(self._queue)
                if grant is not None:
                    self._take(grant)
                if len(self._queue) <= known:
                    pause_s = EXHAUSTED_RETRY_S if self._is_exhausted else RETRY_S
                    changed.wait_for(lambda: self._is_closed, pause_s)

    def _describe(self) -> DataRequest:
        with self._progress.changed:
            epoch, state = self._epoch(), self._replica.state
            return DataRequest(
                node=self._replica.node,
                plan_sha256=self.plan.sha256,
                positions=self.plan.positions,
                epoch=epoch,
                round=state.round,
                concluded=0 < self._replica.concluded_epoch == epoch,
                trained=self._replica.data,
                pending=self._progress.data,
                want=self._ahead + (self._position is not None),
            )

    def _take(self, grant: DataGrant) -> None:
        """Replace the queue; while the call ran, the loop may have received or finished some of the shards."""
        done = self._replica.data.finished, self._progress.data.finished
        self._queue = {
            position: offset
            for position, offset in grant.leases
            if position != self._position and not any(has_number(one, position) for one in done)
        }
        self._is_exhausted = grant.exhausted
        self._progress.changed.notify_all()
