"""Rings as torch sees them: a data set by index, and batches that come without end.

loader = RingLoader("/mnt/ring", batch_size=4, workers=2)
for images, labels in loader:
    ...
loader.state_dict()  # with it, a resumed training gets the batches that it would have got
"""

from __future__ import annotations

import inspect
import queue
import signal
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from gpu_client.ring.core.liveness import require_name
from gpu_client.ring.core.maintenance import Keeper
from gpu_client.ring.core.ring import Ring, open_ring
from gpu_client.ring.errors import RingMismatch
from gpu_client.ring.format.manifest import Manifest, Slot
from gpu_client.ring.reading.batch_plan import Policy, Shape
from gpu_client.ring.reading.batch_stream import Stream, forget, group_of
from gpu_client.ring.reading.reader import RingReader

POLL_S = 0.25
"""The workers' DataLoader is to give up (`timeout`) so often: else nothing ends who waits for them."""
_TIMED_OUT = "DataLoader timed out"


class Ahead(Iterator[Any]):
    """One batch ahead, in a thread: to receive one takes milliseconds, which a step on a GPU can hide.

    What a batch raises is raised where it is asked for. To be closed before the workers are.
    """

    def __init__(self, batches: Iterator[Any]) -> None:
        """`batches`: of a DataLoader with workers and with the timeout `POLL_S`; nobody else asks for them any more."""
        self._batches = batches
        self._taken: queue.Queue[_Taken] = queue.Queue(maxsize=1)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._take, name="ring-ahead", daemon=True)
        self._thread.start()

    def __next__(self) -> Any:
        taken = self._taken.get()
        if taken.failure is not None:
            self._taken.put(taken)  # for whoever asks again: the thread has ended
            raise taken.failure
        return taken.batch

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        self._thread.join()

    def _take(self) -> None:
        while not self._closing.is_set():
            try:
                taken = _Taken(next(self._batches), None)
            except BaseException as error:  # noqa: BLE001 - raised where the batch is asked for
                if isinstance(error, RuntimeError) and str(error).startswith(_TIMED_OUT):
                    continue
                taken = _Taken(None, error)
            while not self._closing.is_set():
                try:
                    self._taken.put(taken, timeout=POLL_S)
                    break
                except queue.Full:
                    continue
            if taken.failure is not None:
                return


class _Taken(NamedTuple):
    batch: Any
    failure: BaseException | None


WORKER_GRACE_S = 30.0
"""So long a worker outlives a SIGTERM: the loop needs it for its last steps."""
_PATIENCE_S = 600.0


class RingDataset(Dataset[Any]):  # type: ignore[misc, unused-ignore]
    """The samples of one manifest, by index; `refresh` takes the newest. Takes lists of indices, too."""

    def __init__(
        self, place: str, *, transform: Callable[[Any], Any] | None = None, patience_s: float = _PATIENCE_S
    ) -> None:
        """`place`: as in `open_ring`. Waits until `min_size` samples can be read, or for so long.

        Raises RingMismatch for a ring with `max_uses` or `max_age_s`: whoever asks for an index decides what is read.
        """
        _require_by_index(open_ring(place), place)
        self._place, self._patience_s = place, patience_s
        self._transform = transform
        self._reader: RingReader | None = None
        self._at_end: Finalize | None = None  # type: ignore[type-arg, unused-ignore]
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
        reader = self._opened()
        indices = index if isinstance(index, Sequence) else [index]
        reader.wanted = max(reader.wanted, len(indices))
        slots = [self.manifest.slots[one] for one in indices]
        reader.wait_for_flow(len(slots))
        reader.soon(slots)
        found = [self._read(reader, slot) for slot in slots]
        return found if isinstance(index, Sequence) else found[0]

    def _read(self, reader: RingReader, slot: Slot) -> Any:
        sample, _ = reader.sample_or_another(slot, self.manifest)
        reader.took(1)
        return self._transform(sample) if self._transform else sample

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """A batch, as a DataLoader asks for it."""
        found: list[Any] = self[indices]
        return found

    get = __getitems__
    """The third of the verbs that a ring has: put, swap, get."""

    def close(self) -> None:
        """Give up the manifest."""
        if self._at_end is not None:
            self._at_end.cancel()
            self._at_end = None
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def __getstate__(self) -> dict[str, Any]:
        # A worker of a DataLoader has its own lease. Its parent's keeps the manifest until then.
        return {**self.__dict__, "_reader": None, "_at_end": None}

    def _opened(self) -> RingReader:
        if self._reader is None or not self._reader.is_own_process():
            if get_worker_info() is not None:
                require_shared(self._place)
            self._reader = RingReader(open_ring(self._place), patience_s=self._patience_s)
            # Nobody closes it in a worker, which ends without atexit: what it has read would not be counted.
            self._at_end = Finalize(None, self._reader.close, exitpriority=0)
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
        patience_s: float = _PATIENCE_S,
    ) -> None:
        """`transform` is given each sample, `collate` a batch of what it has made."""
        self.place, self.shape, self.rank, self.group = place, shape, rank, group
        self.patience_s = patience_s
        self._transform, self._collate = transform, collate
        self.begin: dict[str, Any] | None = None
        """The state that iterating begins with."""
        self.skipped = 0
        """Batches that are passed over then."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        if info is not None:
            require_shared(self.place)
        with RingReader(open_ring(self.place), patience_s=self.patience_s) as reader:
            # A worker is ahead of the loader, which has to go the same way.
            stream = Stream(reader, self.shape, group=self.group, rank=self.rank, forgets=False)
            if self.begin is not None:
                stream.load_state_dict(self.begin)
            for _ in range(self.skipped):
                stream.skip()
            number = told = 0
            while True:
                if number % workers == worker:
                    slots, samples = stream.next_batch()
                    made = [self._transform(sample) for sample in samples] if self._transform else samples
                    damaged = list(reader.quarantined)[told:]
                    told += len(damaged)
                    yield [slot.id for slot in slots], self._collate(made), damaged
                else:
                    stream.skip()
                number += 1


def _as_it_is(batch: Any) -> Any:
    """`collate` has made what the training wants. Unless told, torch would make tensors of arrays once more."""
    return batch


class RingLoader:
    """Batches of a ring for one rank, with a state for exact resume. `ids` names the samples of the newest batch."""

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
        group: str | None = None,
        prefetch: int = 2,
        pin_memory: bool = False,
        transform: Callable[[Any], Any] | None = None,
        collate: Callable[[list[Any]], Any] = default_collate,
        multiprocessing_context: str | None = None,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        """`rank`, `world_size`: of torch.distributed unless given. `prefetch`: batches that each worker is ahead.

        `group`: a name that all processes of this training share, and no other training that reads from the ring;
        unless given, a new one for a single process, and by the job's id for several. `patience_s`: for how long
        samples are waited for. Raises RingMismatch, and RingError for what can never be read.
        """
        spread = torch.distributed.is_available() and torch.distributed.is_initialized()
        self._rank = rank if rank is not None else torch.distributed.get_rank() if spread else 0
        world = world_size if world_size is not None else torch.distributed.get_world_size() if spread else 1
        if workers:
            require_shared(place)
        ring = open_ring(place)
        shape = Shape(batch_size, world, seed, policy, ring.settings.max_uses, ring.settings.max_age_s)
        shape.require_fits(ring.settings.cap)
        self._ring, self._shape, self._given = ring, shape, group
        self._batches = RingBatches(
            place,
            shape,
            rank=self._rank,
            group=require_name(group, "group") if group is not None else group_of(world),
            transform=transform,
            collate=collate,
            patience_s=patience_s,
        )
        self._loader = DataLoader(
            self._batches,
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=workers,
            prefetch_factor=prefetch if workers else None,
            timeout=POLL_S if workers else 0,
            pin_memory=pin_memory,
            multiprocessing_context=multiprocessing_context if workers else None,
            worker_init_fn=_outlive_sigterm,
        )
        self._state: dict[str, Any] | None = None
        self._follower: Stream | None = None
        self._skipped = 0
        """Batches to be passed over when iterating begins."""
        self._first_inserted: int | None = None
        """Number of the oldest sample that this training could have read."""
        self._metrics: dict[str, float] = {}
        self._waited_s = 0.0
        self._damaged: set[str] = set()
        """Objects that this process and its workers have quarantined."""
        self._under_way: weakref.ref[_Iteration] | None = None
        self.ids: list[str] = []

    def __iter__(self) -> Iterator[Any]:
        """Goes on where the last iteration, or the state, ended. It ends an iteration that is under way."""
        self._end_iteration()
        found = _Iteration(self._iterate())
        self._under_way = weakref.ref(found)
        return found

    def _end_iteration(self) -> None:
        before = self._under_way() if self._under_way is not None else None
        if before is not None:
            before.close()

    def _iterate(self) -> Generator[Any, None, None]:
        self._batches.begin, self._batches.skipped = self._state, self._skipped
        # Workers are forked before there are threads.
        workers = iter(self._loader)
        batches = Ahead(workers) if self._loader.num_workers else workers
        place, patience_s = self._batches.place, self._batches.patience_s
        with ExitStack() as stack:
            if isinstance(batches, Ahead):
                stack.callback(batches.close)
            reader = stack.enter_context(RingReader(open_ring(place), patience_s=patience_s))
            stack.enter_context(Keeper(self._ring, reader.name))
            # The keeper publishes what writers have left that are gone. The follower goes through the same plan behind
            # the workers, which are ahead by what they have prefetched.
            follower = Stream(reader, self._shape, group=self._batches.group, rank=self._rank)
            if self._state is not None:
                follower.load_state_dict(self._state)
            self._follower = follower
            try:
                for _ in range(self._skipped):
                    follower.skip()
                self._skipped = 0
                while True:
                    began = time.perf_counter()
                    ids, batch, damaged = next(batches)  # they have no end
                    slots = follower.skip()
                    self.ids = ids
                    self._damaged.update(damaged)
                    self._note(follower, slots, time.perf_counter() - began)
                    yield batch
            finally:
                if follower.plan.batch:
                    self._state = follower.state_dict()
                self._follower = None

    @property
    def waited_s(self) -> float:
        """How long the loop has waited for batches so far."""
        return self._waited_s

    def data_metrics(self) -> dict[str, float]:
        """Of the newest batch: seconds that it was waited for, times that a sample was read so far in the mean, age of
        its samples in seconds, in the mean, by the clocks of those who made and read them; damaged objects so far."""
        return self._metrics

    def skip(self, batches: int) -> None:
        """Pass over so many; the next iteration begins behind them."""
        self._skipped += batches

    def state_dict(self) -> dict[str, Any]:
        """After the newest batch. Plain JSON."""
        state = {} if self._state is None else self._state
        if self._follower is not None and self._follower.plan.batch:
            state = self._follower.state_dict()
        first = {"first_inserted": self._first_inserted} if state else {}
        return {**state, **first, **({"skipped": self._skipped} if self._skipped else {})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration goes on from there, as does one that has not begun; one that is under way ends.

        Raises RingMismatch for a state that was made with another seed, or with larger or smaller global batches.
        """
        self._shape.require_same(state)
        before = self._under_way() if self._under_way is not None else None
        if before is not None and before.begun:
            self._end_iteration()
        self._state = {name: value for name, value in state.items() if name != "skipped"} or None
        self._skipped = int(state.get("skipped", 0))
        self._first_inserted = state.get("first_inserted")
        if self._state is not None and self._given is None and "group" in self._state:
            self._batches.group = require_name(self._state["group"], "group")

    def checkpointed(self, state: Mapping[str, Any] | None = None) -> None:
        """A checkpoint with that state is safe, or with the newest one: what was read before is not kept any more; what
        is read from there on is, until this is called again."""
        state = state if state is not None else self.state_dict()
        if not state.get("decided"):
            return
        if self._follower is not None:
            self._follower.checkpointed(dict(state))
        else:
            forget(self._ring, str(state["group"]), int(state["run"]), int(state["decided"]))

    def _note(self, follower: Stream, slots: Sequence[Slot], waited_s: float) -> None:
        """A batch was taken, of these samples of this rank's."""
        manifest, now_ms = follower.manifest, self._ring.clock() * 1000
        if self._first_inserted is None:
            self._first_inserted = manifest.inserted - len(manifest)
        self._waited_s += waited_s
        read = follower.plan.batch * self._shape.global_size
        ages_s = [max(now_ms - slot.at_ms, 0) / 1000 for slot in slots]
        self._metrics = {
            "data.wait": waited_s,
            "data.reuse": read / max(manifest.inserted - self._first_inserted, 1),
            "data.age": sum(ages_s) / max(len(ages_s), 1),
            "ring.quarantined": float(len(self._damaged)),
        }


class _Iteration(Iterator[Any]):
    """Of a `RingLoader`, which has one position, and so one iteration."""

    def __init__(self, batches: Generator[Any, None, None]) -> None:
        self._batches = batches
        self._ended = False

    @property
    def begun(self) -> bool:
        """Whether it has looked at where it is to begin."""
        return inspect.getgeneratorstate(self._batches) != inspect.GEN_CREATED

    def __next__(self) -> Any:
        if self._ended:
            raise RingMismatch("this loader is iterated over by somebody else by now", "Make a loader for each")
        return next(self._batches)

    def close(self) -> None:
        """Another one goes on from here, whoever still holds this one: it may be an old traceback."""
        self._ended = True
        self._batches.close()


def _require_by_index(ring: Ring, place: str) -> None:
    for name in ("max_uses", "max_age_s"):
        if getattr(ring.settings, name) is not None:
            raise RingMismatch(
                f"{place} has {name}, and samples that are asked for by index are read however often, and however old",
                "Use RingLoader, or a ring without it",
            )


def require_shared(place: str) -> None:
    """Raises RingMismatch for a place that other processes do not see."""
    if place.startswith("memory:"):
        raise RingMismatch(f"{place} is in this process alone, and workers are others", "Use workers=0, or a directory")


def _outlive_sigterm(worker: int) -> None:
    # SIGTERM is sent to every process of the machine. It is also how multiprocessing ends workers: so not for ever.
    signal.signal(signal.SIGTERM, lambda number, frame: signal.setitimer(signal.ITIMER_REAL, WORKER_GRACE_S))
