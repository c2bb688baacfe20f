"""Rings as torch sees them: a data set by index, and batches that come without end.

loader = RingLoader("/mnt/ring", batch_size=4, workers=2)
for images, labels in loader:
    ...
loader.state_dict()  # with it, a resumed training gets the batches that it would have got
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from gpu_client.ring.keeper import Keeper
from gpu_client.ring.manifest import Manifest, Slot
from gpu_client.ring.places import open_ring
from gpu_client.ring.plan import Policy, Shape
from gpu_client.ring.reader import RingReader
from gpu_client.ring.stream import Stream

WORKER_GRACE_S = 30.0
"""So long a worker outlives a SIGTERM: the loop needs it for its last steps."""


class RingDataset(Dataset[Any]):  # type: ignore[misc, unused-ignore]
    """The samples of one manifest, by index; `refresh` takes the newest. Takes lists of indices, too."""

    def __init__(self, place: str, *, transform: Callable[[Any], Any] | None = None) -> None:
        """`place`: as in `open_ring`. Waits until `min_size` samples can be read."""
        self._place = place
        self._transform = transform
        self._reader: RingReader | None = None
        self._manifest: Manifest | None = None
        self.refresh()

    def refresh(self) -> Manifest:
        """From now on the newest manifest's samples."""
        reader = self._opened()

        def ready() -> Manifest | None:
            newest = reader.newest()
            return newest if len(newest) >= reader.ring.settings.min_size else None

        found: Manifest = reader.wait(ready, "too few samples are readable")
        reader.keep_only([found.number])
        self._manifest = found
        return found

    @property
    def manifest(self) -> Manifest:
        """The one that is read."""
        assert self._manifest is not None
        return self._manifest

    def __len__(self) -> int:
        return len(self.manifest)

    def __getitem__(self, index: int | Sequence[int]) -> Any:
        if isinstance(index, Sequence):
            return [self[one] for one in index]
        reader = self._opened()
        sample = reader.sample(self.manifest.slots[index])
        reader.took(1)
        return self._transform(sample) if self._transform else sample

    def close(self) -> None:
        """Give up the manifest."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def __getstate__(self) -> dict[str, Any]:
        # A worker of a DataLoader has its own lease. Its parent's keeps the manifest until then.
        return {**self.__dict__, "_reader": None}

    def _opened(self) -> RingReader:
        if self._reader is None or not self._reader.is_own_process():
            self._reader = RingReader(open_ring(self._place))
            if self._manifest is not None:
                self._reader.pin(self._manifest.number)
        return self._reader


class RingBatches(IterableDataset[Any]):  # type: ignore[misc, unused-ignore]
    """Batches without end, shared out among ranks and the workers of a DataLoader (`batch_size=None` there)."""

    def __init__(
        self,
        place: str,
        shape: Shape,
        *,
        rank: int = 0,
        group: str = "train",
        transform: Callable[[Any], Any] | None = None,
        collate: Callable[[list[Any]], Any] = default_collate,
    ) -> None:
        """`transform` is given each sample, `collate` a batch of what it has made."""
        self.place, self._shape, self._rank, self.group = place, shape, rank, group
        self._transform, self._collate = transform, collate
        self.begin: dict[str, Any] | None = None
        """The state that iterating begins with."""
        self.skipped = 0
        """Batches that are passed over then."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        with RingReader(open_ring(self.place)) as reader:
            # A worker is ahead of the loader, which has to go the same way.
            stream = Stream(reader, self._shape, group=self.group, rank=self._rank, forgets=False)
            if self.begin is not None:
                stream.load_state_dict(self.begin)
            for _ in range(self.skipped):
                stream.skip()
            number = 0
            while True:
                if number % workers == worker:
                    slots, samples = stream.next_batch()
                    made = [self._transform(sample) for sample in samples] if self._transform else samples
                    yield [slot.id for slot in slots], self._collate(made)
                else:
                    stream.skip()
                number += 1


class RingLoader:
    """Batches of a ring for one rank, with a state for exact resume. `ids` names the samples of the newest batch.

    Named among the states of a session it is all that a training needs: `session.resume(batches=loader)` and
    `session.checkpoint(step, batches=loader)` take the state along, tell it which checkpoints are safe, and report
    `data.wait`, `data.reuse` and `data.age`.
    """

    def __init__(
        self,
        place: str,
        *,
        batch_size: int,
        workers: int = 0,
        seed: int = 0,
        policy: Policy = "pass",
        rank: int | None = None,
        world_size: int | None = None,
        group: str = "",
        prefetch: int = 2,
        pin_memory: bool = False,
        transform: Callable[[Any], Any] | None = None,
        collate: Callable[[list[Any]], Any] = default_collate,
        multiprocessing_context: str | None = None,
    ) -> None:
        """`rank`, `world_size`: of torch.distributed unless given. `prefetch`: batches that each worker is ahead.

        `group`: ranks of one training have the same, other readers of the ring another; a job has one of its own
        unless it is given, others `train`.
        """
        spread = torch.distributed.is_available() and torch.distributed.is_initialized()
        self._rank = rank if rank is not None else torch.distributed.get_rank() if spread else 0
        world = world_size if world_size is not None else torch.distributed.get_world_size() if spread else 1
        ring = open_ring(place)
        shape = Shape(batch_size, world, seed, policy, ring.settings.max_uses, ring.settings.max_age_s)
        group = group or group_of(os.environ)
        self._ring, self._shape = ring, shape
        self._batches = RingBatches(place, shape, rank=self._rank, group=group, transform=transform, collate=collate)
        self._loader = DataLoader(
            self._batches,
            batch_size=None,
            num_workers=workers,
            prefetch_factor=prefetch if workers else None,
            pin_memory=pin_memory,
            multiprocessing_context=multiprocessing_context if workers else None,
            worker_init_fn=_outlive_sigterm,
        )
        self._state: dict[str, Any] | None = None
        self._follower: Stream | None = None
        self._first_inserted: int | None = None
        """Number of the oldest sample that this training could have read."""
        self._metrics: dict[str, float] = {}
        self._waited_s = 0.0
        self.ids: list[str] = []

    def __iter__(self) -> Iterator[Any]:
        """Goes on where the last iteration, or the state, ended."""
        self._batches.begin = self._state
        with RingReader(open_ring(self._batches.place)) as reader, Keeper(self._ring, reader.name):
            # The keeper publishes what writers have left that are gone. The follower goes through the same plan behind
            # the workers, which are ahead by what they have prefetched.
            follower = Stream(reader, self._shape, group=self._batches.group, rank=self._rank)
            if self._state is not None:
                follower.load_state_dict(self._state)
            for _ in range(self._batches.skipped):
                follower.skip()
            self._follower = follower
            batches = iter(self._loader)
            while True:
                began = time.perf_counter()
                ids, batch = next(batches)  # they have no end
                slots = follower.skip()
                self._batches.skipped = 0
                self.ids = ids
                self._note(follower, slots, time.perf_counter() - began)
                yield batch

    @property
    def waited_s(self) -> float:
        """How long the loop has waited for batches so far."""
        return self._waited_s

    def data_metrics(self) -> dict[str, float]:
        """Of the newest batch: seconds that it was waited for, times that a sample was read so far in the mean, age of
        its samples in seconds, in the mean, by the clocks of those who made and read them."""
        return self._metrics

    def skip(self, batches: int) -> None:
        """Pass over so many; the next iteration begins behind them."""
        self._batches.skipped += batches

    def state_dict(self) -> dict[str, Any]:
        """After the newest batch. Plain JSON."""
        state = {} if self._state is None else dict(self._state)
        return {**state, "skipped": self._batches.skipped} if self._batches.skipped else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration goes on from there."""
        self._state = {name: value for name, value in state.items() if name != "skipped"} or None
        self._batches.skipped = state.get("skipped", 0)
        self._batches.group = state.get("group", self._batches.group)
        self._first_inserted = state.get("first_inserted")

    def checkpointed(self, state: Mapping[str, Any] | None = None) -> None:
        """That state (unless given, the newest) is in a checkpoint that is safe: what was read before is not kept for
        it any more; what is read from there on is, until this is called again."""
        state = self._state if state is None else state
        if self._follower is not None and state and "decided" in state:
            self._follower.checkpointed(dict(state))

    def _note(self, follower: Stream, slots: Sequence[Slot], waited_s: float) -> None:
        """A batch was taken, of these samples of this rank's."""
        manifest, now_ms = follower.manifest, self._ring.clock() * 1000
        if self._first_inserted is None:
            self._first_inserted = manifest.inserted - len(manifest)
        self._state = {**follower.state_dict(), "first_inserted": self._first_inserted}
        self._waited_s += waited_s
        read = follower.plan.batch * self._shape.global_size
        ages_s = [max(now_ms - slot.at_ms, 0) / 1000 for slot in slots]
        self._metrics = {
            "data.wait": waited_s,
            "data.reuse": read / max(manifest.inserted - self._first_inserted, 1),
            "data.age": sum(ages_s) / max(len(ages_s), 1),
        }


def group_of(environment: Mapping[str, str]) -> str:
    """The name under which the processes of one training agree on what they read.

    A job that begins anew has another one than its earlier attempts, of which nothing is to be taken up; one that goes
    on from a checkpoint has that of the attempt which began it: it is in the loader's state.
    """
    job = environment.get("BATON_JOB_ID")
    return f"{job}.{environment.get('BATON_EPOCH', '0')}" if job else "train"


def _outlive_sigterm(worker: int) -> None:
    # SIGTERM is sent to every process of the machine. It is also how multiprocessing ends workers: so not for ever.
    signal.signal(signal.SIGTERM, lambda number, frame: signal.setitimer(signal.ITIMER_REAL, WORKER_GRACE_S))
