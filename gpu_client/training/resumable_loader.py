"""Order batches by a seed, with a position that can be stored and resumed exactly.

The order is a pure function of (size, batch size, seed, epoch, position). Therefore the state is a few numbers, a
resume takes constant time, and the order does not change the global random state. The position counts the batches that
the training loop has taken, not the batches that DataLoader workers have prefetched.

torchdata's StatefulDataLoader is no substitute. Its import replaces torch's own samplers. Its workers own the state,
therefore another number of workers cannot continue. A resume runs through the epoch to the position, and draws the
workers' seeds from the global generator, therefore random augmentations differ from the uninterrupted run. For streams
(IterableDataset) StatefulDataLoader is the better choice, and the session accepts its state_dict().
"""

from __future__ import annotations

import atexit
import hashlib
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.util import Finalize
from types import FrameType
from typing import Any, Self

import torch
from torch.utils.data import DataLoader, IterableDataset

from gpu_client.training.errors import CheckpointMismatchError, SessionError

# Seconds for which a DataLoader worker survives SIGTERM, enough for the steps before the last checkpoint.
WORKER_GRACE_S = 30.0
_CHECKED_INDICES = 4096


def derive_seed(*parts: object) -> int:
    """Derive a seed of 63 bits from the parts."""
    text = ":".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


class BatchSampler:
    """Endless iterator over batches of indices; each epoch is a new permutation of `range(size)`.

    The state is the position after the last returned batch; store the state after the step that used the batch. With
    `world_size` processes each rank gets its part of a global batch of `batch_size * world_size`; ranks share one
    state. `drop_last` drops an incomplete last batch of an epoch; otherwise the last batch is shorter (one process
    only).
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Check the numbers. Raises SessionError if no batch is possible."""
        if size < 1 or batch_size < 1 or not 0 <= rank < world_size:
            raise SessionError(
                f"no batches: size {size}, batch_size {batch_size}, rank {rank} of {world_size}",
                "size, batch_size and world_size are at least 1, rank is below world_size",
            )
        whole, rest = divmod(size, batch_size * world_size)
        if rest and not drop_last and world_size > 1:
            raise SessionError("drop_last=False would give ranks unequal batches", "Use drop_last=True")
        self.batches_per_epoch = whole if drop_last else whole + bool(rest)
        if self.batches_per_epoch == 0:
            raise SessionError(
                f"{size} samples do not fill one batch of {batch_size * world_size}",
                "Use a smaller batch_size or drop_last=False",
            )
        self.epoch = 0
        self.position = 0
        self._size, self._batch_size, self._seed = size, batch_size, seed
        self._shuffle, self._drop_last = shuffle, drop_last
        self._rank, self._world_size = rank, world_size
        self._order: tuple[int, torch.Tensor] | None = None  # Epoch, and the epoch's permutation.

    def batch(self, epoch: int, position: int) -> list[int]:
        """Return the indices of one batch for this rank. Pure."""
        start = (position * self._world_size + self._rank) * self._batch_size
        indices: list[int] = self._permutation(epoch)[start : start + self._batch_size].tolist()
        return indices

    def seed_of(self, epoch: int, position: int) -> int:
        """Return a seed of 63 bits for the random augmentation of one batch."""
        return derive_seed("augment", self._seed, epoch, position, self._rank)

    def following(self) -> Iterator[tuple[int, int]]:
        """Yield (epoch, position) of all following batches, without moving the sampler."""
        epoch, position = self.epoch, self.position
        while True:
            yield epoch, position
            epoch, position = self._after(epoch, position)

    def advance(self) -> None:
        """Count one batch as taken. `epoch` and `position` identify the next batch."""
        self.epoch, self.position = self._after(self.epoch, self.position)

    def skip(self, batches: int) -> None:
        """Skip `batches` batches."""
        passed = self.epoch * self.batches_per_epoch + self.position + batches
        self.epoch, self.position = divmod(passed, self.batches_per_epoch)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> list[int]:
        indices = self.batch(self.epoch, self.position)
        self.advance()
        return indices

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the facts that identify the order."""
        return {"epoch": self.epoch, "position": self.position, "order": self._order_facts(self.epoch)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. Raises CheckpointMismatchError if data or settings differ."""
        epoch, position, stored = int(state["epoch"]), int(state["position"]), dict(state["order"])
        here = self._order_facts(epoch)
        different = [
            f"{name} was {stored.get(name)}, is {here[name]}" for name in here if stored.get(name) != here[name]
        ]
        if different:
            raise CheckpointMismatchError(
                f"the data order is not the one of the checkpoint: {'; '.join(different)}",
                "Resume with the same data, batch size, seed and number of processes",
            )
        self.epoch, self.position = epoch, position

    def _after(self, epoch: int, position: int) -> tuple[int, int]:
        return (epoch, position + 1) if position + 1 < self.batches_per_epoch else (epoch + 1, 0)

    def _permutation(self, epoch: int) -> torch.Tensor:
        if self._order is None or self._order[0] != epoch:
            if self._shuffle:
                generator = torch.Generator().manual_seed(derive_seed("order", self._seed, epoch))
                self._order = (epoch, torch.randperm(self._size, generator=generator))
            else:
                self._order = (epoch, torch.arange(self._size))
        return self._order[1]

    def _order_facts(self, epoch: int) -> dict[str, Any]:
        # A torch with other permutations would silently repeat and skip samples; the digest detects such a torch.
        head = self._permutation(epoch)[:_CHECKED_INDICES].numpy().tobytes()
        return {
            "size": self._size,
            "batch_size": self._batch_size,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "drop_last": self._drop_last,
            "world_size": self._world_size,
            "digest": hashlib.blake2b(head, digest_size=8).hexdigest(),
        }


class ResumableLoader:
    """DataLoader over a `BatchSampler`, endless and exactly resumable, with any number of workers.

    Random augmentation repeats exactly after a resume: workers are seeded for every batch, therefore neither their
    number nor the point of interruption matters. (Without workers, augmentation uses the process's global generators,
    which the session stores.) options go to torch's DataLoader.
    """

    def __init__(self, dataset: Any, sampler: BatchSampler, **options: Any) -> None:
        """Check the options. Raises SessionError for streams, and for options that conflict with the sampler."""
        if isinstance(dataset, IterableDataset):
            raise SessionError(
                "an IterableDataset has no positions to return to",
                "Use a map-style dataset, or torchdata's StatefulDataLoader as one of the session's states",
            )
        taken = options.keys() & {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "generator"}
        if taken:
            raise SessionError(f"{', '.join(sorted(taken))} conflicts with the BatchSampler", "Set the option there")
        self.sampler = sampler
        self._workers = int(options.get("num_workers", 0))
        self._dataset = _SeededDataset(dataset) if self._workers else dataset
        if self._workers:
            options["worker_init_fn"] = _WorkerStart(options.get("worker_init_fn"))
        self._options = options
        self._batches: Iterator[Any] | None = None
        self._waited_s = 0.0
        self._at_exit: Finalize | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        began = time.perf_counter()
        if self._batches is None:
            if self._workers:
                # Workers must end before multiprocessing waits for them. In a main process only atexit runs early
                # enough (before torch's own hook); a multiprocessing child runs only finalizers. Priority 100 precedes
                # the closing (10) of the queues that end the workers.
                atexit.register(self.close)
                self._at_exit = Finalize(None, self.close, exitpriority=100)
            # By default each new iterator would draw from the global generator, therefore the generator is private.
            self._batches = iter(
                DataLoader(
                    self._dataset,
                    batch_sampler=_requests(self.sampler, bool(self._workers)),
                    generator=torch.Generator().manual_seed(0),
                    **self._options,
                )
            )
        batch = next(self._batches)
        self.sampler.advance()
        self._waited_s += time.perf_counter() - began
        return batch

    @property
    def waited_s(self) -> float:
        """Return the total seconds for which the loop has waited for batches; in rules the metric `data.wait`."""
        return self._waited_s

    def skip(self, batches: int) -> None:
        """Skip `batches` batches, and drop prefetched batches."""
        self.sampler.skip(batches)
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's state, which counts taken batches only."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`, and drop prefetched batches."""
        self.sampler.load_state_dict(state)
        self.close()

    def close(self) -> None:
        """End the workers and drop their prefetched batches; the next batch starts workers again."""
        self._batches = None
        atexit.unregister(self.close)
        if self._at_exit is not None:
            self._at_exit.cancel()
            self._at_exit = None


def _requests(sampler: BatchSampler, seeded: bool) -> Iterator[Any]:
    """Yield the DataLoader's requests.

    The generator is no method, because a method would keep the loader alive through the loader's own iterator.
    """
    for epoch, position in sampler.following():
        indices = sampler.batch(epoch, position)
        yield (sampler.seed_of(epoch, position), indices) if seeded else indices


class _SeededDataset:
    """Dataset in a worker, which seeds every generator for a batch and then reads the batch's samples in order."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]

    def __getitems__(self, request: tuple[int, list[int]]) -> list[Any]:
        seed, indices = request
        random.seed(seed)
        torch.manual_seed(seed)
        if "numpy" in sys.modules:
            import numpy as np

            np.random.seed(seed % 2**32)
        if hasattr(self._dataset, "__getitems__"):
            samples: list[Any] = self._dataset.__getitems__(indices)
            return samples
        return [self._dataset[index] for index in indices]


class _WorkerStart:
    """Initializer of a worker that survives SIGTERM for a limited time.

    A host sends SIGTERM to every process, while the loop needs the workers for its last steps. The time is limited,
    because multiprocessing, too, ends workers by SIGTERM when their parent leaves.
    """

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then

    def __call__(self, worker: int) -> None:
        signal.signal(signal.SIGTERM, _end_soon)
        if self._then is not None:
            self._then(worker)


def _end_soon(number: int, frame: FrameType | None) -> None:
    signal.setitimer(signal.ITIMER_REAL, WORKER_GRACE_S)  # SIGALRM ends this worker.
