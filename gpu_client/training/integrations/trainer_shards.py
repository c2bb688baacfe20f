"""Feed Hugging Face's Trainer with the shards that one node of an elastic training leases."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from transformers import TrainingArguments

from gpu_client.elastic.data.shard_plan import Shard, Source
from gpu_client.training.errors import SessionError
from gpu_client.training.session.session import Session


class ShardBatches:
    """Loader of a Trainer over the shards of this node: `get_train_dataloader` returns the loader.

    data, options: as for `session.shards`. read: yields the batches of a shard from `shard.offset` on.

    The Trainer draws one batch for each step, and nothing ahead. Therefore all batches before the present one are
    trained when a shard ends or a round takes the node's delta.
    """

    def __init__(
        self,
        session: Session,
        data: Source | Mapping[str, Source],
        read: Callable[[Shard], Iterable[Any]],
        **options: Any,
    ) -> None:
        self._session, self._data, self._read, self._options = session, data, read, options
        self._shards: Iterable[Shard] = ()

    def open(self, args: TrainingArguments) -> None:
        """Connect the shards to the outer loop, before the outer state is restored. Raises SessionError."""
        if args.gradient_accumulation_steps > 1 or args.world_size > 1:
            raise SessionError(
                f"a step takes {args.gradient_accumulation_steps} batches in each of {args.world_size} processes",
                "Train shards with gradient_accumulation_steps=1 and one process in each node",
            )
        if not args.ignore_data_skip:
            raise SessionError(
                "the Trainer would skip batches after a resume, although the node leases untrained shards only",
                "Use TrainingArguments(ignore_data_skip=True)",
            )
        self._shards = self._session.shards(self._data, **self._options)

    def __iter__(self) -> Iterator[Any]:
        for shard in self._shards:
            for place, batch in enumerate(self._read(shard), shard.offset):
                shard.advance(place + 1)
                yield batch
