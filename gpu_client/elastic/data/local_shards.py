"""Yield all shards to a training without an outer loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

from baton.contract.elastic.data import DataProgress
from baton.contract.elastic.spans import list_numbers, take_free
from gpu_client.elastic.data.shard_plan import Shard, ShardPlan
from gpu_client.elastic.errors import ElasticSetupError


class LocalShards:
    """Iterable over the shards in their order, and a state for checkpoints. The next shard finishes the one before."""

    def __init__(self, plan: ShardPlan) -> None:
        self._plan = plan
        self._trained = DataProgress()

    def __iter__(self) -> Iterator[Shard]:
        for _ in count():
            free = take_free(self._trained.finished, self._plan.positions, 1)
            if not free:
                return
            position = free[0][0]
            yield self._plan.locate(position, self._trained.offset_of(position), self._note)
            self._trained = self._trained.merge(DataProgress(finished=[[position, position + 1]]))

    @property
    def upcoming(self) -> list[Shard]:
        """Return the two shards after the present one, to be fetched ahead."""
        next_ones = take_free(self._trained.finished, self._plan.positions, 3)
        return [self._plan.locate(one, 0, self._note) for one in list_numbers(next_ones)][1:]

    def _note(self, position: int, offset: int) -> None:
        self._trained = self._trained.merge(DataProgress(offsets=[[position, offset]]))

    def state_dict(self) -> dict[str, Any]:
        """Return the trained part of the data."""
        return {"plan_sha256": self._plan.sha256, "trained": self._trained.model_dump_json()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. Raises ElasticSetupError if the data has changed."""
        require_same_plan(state["plan_sha256"], self._plan)
        self._trained = DataProgress.model_validate_json(state["trained"])


def require_same_plan(plan_sha256: str, plan: ShardPlan) -> None:
    """Compare the order of a checkpoint's shards with the present order. Raises ElasticSetupError."""
    if plan_sha256 not in ("", plan.sha256):
        problem = "the checkpoint's shards have another order, by other files, ratios, seed or passes"
        raise ElasticSetupError(problem, "Resume with the data of the checkpoint, or start a new job")
