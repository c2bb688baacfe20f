"""Yield a node's shards in all processes of its machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gpu_client.elastic.data.leased_shards import LeasedShards
from gpu_client.elastic.data.shard_plan import Shard, ShardPlan


class MachineShards:
    """Iterable over the node's shards, the same in all processes, each of which trains its part of every batch.

    leased: the shards of the node, in the first process. take: returns position and offset of the next shard, the same
    in all processes; None at the end.
    """

    def __init__(
        self,
        plan: ShardPlan,
        leased: LeasedShards | None,
        take: Callable[[Iterator[Shard]], tuple[int, int] | None],
    ) -> None:
        self._plan, self._leased, self._take = plan, leased, take

    def __iter__(self) -> Iterator[Shard]:
        leased = iter(self._leased or ())
        while (found := self._take(leased)) is not None:
            yield self._plan.locate(*found, self._note)

    @property
    def upcoming(self) -> list[Shard]:
        """Return the next shards of the node in the first process, to be fetched ahead; [] in the others."""
        return [] if self._leased is None else self._leased.upcoming

    def _note(self, position: int, offset: int) -> None:
        if self._leased is not None:
            self._leased.note(position, offset)
