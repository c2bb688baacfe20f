"""Provide datasets and loaders of rings for torch.

loader = RingLoader("/mnt/ring", batch_size=4, workers=2)
for images, labels in loader:
    ...
loader.state_dict()  # a training that resumes with this state gets equal batches
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
from gpu_client.ring.core.maintenance import Maintainer
from gpu_client.ring.core.ring import Ring, open_ring
from gpu_client.ring.errors import RingMismatch
from gpu_client.ring.format.manifest import RingManifest, Slot
from gpu_client.ring.reading.batch_plan import BatchShape, Policy
from gpu_client.ring.reading.batch_stream import BatchStream, choose_group_name, prune_decisions
from gpu_client.ring.reading.reader import RingReader

POLL_S = 0.25
"""Timeout of a DataLoader with workers in seconds; without a timeout, a waiting thread could not be ended."""
_TIMED_OUT = "DataLoader timed out"


class BatchPrefetcher(Iterator[Any]):
    """Thread that prefetches one batch from DataLoader workers.

    Receiving a batch takes milliseconds, which a GPU step can hide. A request for a batch raises the thread's failure.
    Close the prefetcher before the workers.
    """

    def __init__(self, batches: Iterator[Any]) -> None:
        """`batches`: iterator of a DataLoader with workers and the timeout `POLL_S`, used by the prefetcher alone."""
        self._batches = batches
        self._queue: queue.Queue[_QueueItem] = queue.Queue(maxsize=1)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._fetch, name="ring-ahead", daemon=True)
        self._thread.start()

    def __next__(self) -> Any:
        item = self._queue.get()
        if item.failure is not None:
            self._queue.put(item)  # The thread has ended; the next call takes the item again.
            raise item.failure
        return item.batch

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        self._thread.join()

    def _fetch(self) -> None:
        while not self._closing.is_set():
            try:
                item = _QueueItem(next(self._batches), None)
            except BaseException as error:  # noqa: BLE001 - raised where the batch is requested
                if isinstance(error, RuntimeError) and str(error).startswith(_TIMED_OUT):
                    continue
                item = _QueueItem(None, error)
            while not self._closing.is_set():
                try:
                    self._queue.put(item, timeout=POLL_S)
                    break
                except queue.Full:
                    continue
            if item.failure is not None:
                return


class _QueueItem(NamedTuple):
    batch: Any
    failure: BaseException | None


WORKER_GRACE_S = 30.0
"""Seconds for which a worker survives SIGTERM, because the loop needs the worker's last batches."""
_PATIENCE_S = 600.0


class RingDataset(Dataset[Any]):  # type: ignore[misc, unused-ignore]
    """Map-style dataset of one manifest's samples; `refresh` takes the newest manifest. Accepts lists of indices."""

    def __init__(
        self, place: str, *, transform: Callable[[Any], Any] | None = None, patience_s: float = _PATIENCE_S
    ) -> None:
        """`place`: as in `open_ring`. Waits up to `patience_s` for `min_size` samples.

        Raises RingMismatch for a ring with `max_uses` or `max_age_s`, because the caller chooses the index.
        """
        _require_index_access(open_ring(place), place)
        self._place, self._patience_s = place, patience_s
        self._transform = transform
        self._reader: RingReader | None = None
        self._at_end: Finalize | None = None  # type: ignore[type-arg, unused-ignore]
        self._manifest: RingManifest | None = None
        self.refresh()

    def refresh(self) -> RingManifest:
        """Switch to the newest manifest."""
        reader = self._open_reader()

        def ready() -> RingManifest | None:
            newest = reader.newest()
            return newest if len(newest) >= reader.ring.settings.min_size else None

        found: RingManifest = reader.wait(ready, "too few samples are readable")
        reader.keep_only([found.number])
        self._manifest = found
        return found

    @property
    def manifest(self) -> RingManifest:
        """Return the current manifest."""
        assert self._manifest is not None
        return self._manifest

    def __len__(self) -> int:
        return len(self.manifest)

    def __getitem__(self, index: int | Sequence[int]) -> Any:
        reader = self._open_reader()
        indices = index if isinstance(index, Sequence) else [index]
        reader.wanted = max(reader.wanted, len(indices))
        slots = [self.manifest.slots[one] for one in indices]
        reader.wait_for_flow(len(slots))
        reader.prefetch(slots)
        found = [self._read(reader, slot) for slot in slots]
        return found if isinstance(index, Sequence) else found[0]

    def _read(self, reader: RingReader, slot: Slot) -> Any:
        sample, _ = reader.sample_or_another(slot, self.manifest)
        reader.record_consumed(1)
        return self._transform(sample) if self._transform else sample

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return a batch for a DataLoader."""
        found: list[Any] = self[indices]
        return found

    get = __getitems__
    """Alias, because `put`, `swap` and `get` are the verbs of a ring."""

    def close(self) -> None:
        """Release the manifest."""
        if self._at_end is not None:
            self._at_end.cancel()
            self._at_end = None
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def __getstate__(self) -> dict[str, Any]:
        # A DataLoader worker acquires its own lease; until then, the parent's lease keeps the manifest.
        return {**self.__dict__, "_reader": None, "_at_end": None}

    def _open_reader(self) -> RingReader:
        if self._reader is None or not self._reader.is_own_process():
            if get_worker_info() is not None:
                require_shared(self._place)
            self._reader = RingReader(open_ring(self._place), patience_s=self._patience_s)
            # A worker ends without atexit, and the reads of an unclosed reader would not count, therefore a finalizer
            # closes the reader.
            self._at_end = Finalize(None, self._reader.close, exitpriority=0)
            if self._manifest is not None:
                self._reader.pin(self._manifest.number)
        return self._reader


class RingBatches(IterableDataset[Any]):  # type: ignore[misc, unused-ignore]
    """Iterable dataset of endless batches, shared among ranks and DataLoader workers (with `batch_size=None`)."""

    def __init__(
        self,
        place: str,
        shape: BatchShape,
        *,
        rank: int = 0,
        group: str = "train",
        transform: Callable[[Any], Any] | None = None,
        collate: Callable[[list[Any]], Any] = default_collate,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        """`transform` maps each sample, `collate` joins the mapped samples of a batch."""
        self.place, self.shape, self.rank, self.group = place, shape, rank, group
        self.patience_s = patience_s
        self._transform, self._collate = transform, collate
        self.initial_state: dict[str, Any] | None = None
        """Initial state of an iteration."""
        self.skipped = 0
        """Number of batches to skip at the beginning."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        if info is not None:
            require_shared(self.place)
        with RingReader(open_ring(self.place), patience_s=self.patience_s) as reader:
            # A worker runs ahead of the loader, which still needs the decisions, therefore the worker keeps them.
            stream = BatchStream(reader, self.shape, group=self.group, rank=self.rank, forgets=False)
            if self.initial_state is not None:
                stream.load_state_dict(self.initial_state)
            for _ in range(self.skipped):
                stream.skip()
            number = reported = 0
            while True:
                if number % workers == worker:
                    slots, samples = stream.next_batch()
                    made = [self._transform(sample) for sample in samples] if self._transform else samples
                    damaged = list(reader.quarantined)[reported:]
                    reported += len(damaged)
                    yield [slot.id for slot in slots], self._collate(made), damaged
                else:
                    stream.skip()
                number += 1


def _pass_through(batch: Any) -> Any:
    """Return the collated batch; torch's default would convert arrays to tensors again."""
    return batch


class RingLoader:
    """Loader of one rank's batches, with a state for exact resume. `ids`: names of the newest batch's samples."""

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
        """`rank`, `world_size`: default from torch.distributed. `prefetch`: batches that each worker prefetches.

        `group`: a name that only the processes of this training use; default: a new name for a single process, the id
        of the job for several. `patience_s`: limit of the wait for samples. Raises RingMismatch, and RingError for
        batches that can never be filled.
        """
        spread = torch.distributed.is_available() and torch.distributed.is_initialized()
        self._rank = rank if rank is not None else torch.distributed.get_rank() if spread else 0
        world = world_size if world_size is not None else torch.distributed.get_world_size() if spread else 1
        if workers:
            require_shared(place)
        ring = open_ring(place)
        shape = BatchShape(batch_size, world, seed, policy, ring.settings.max_uses, ring.settings.max_age_s)
        shape.require_fits(ring.settings.cap)
        self._ring, self._shape, self._given = ring, shape, group
        self._batches = RingBatches(
            place,
            shape,
            rank=self._rank,
            group=require_name(group, "group") if group is not None else choose_group_name(world),
            transform=transform,
            collate=collate,
            patience_s=patience_s,
        )
        self._loader = DataLoader(
            self._batches,
            batch_size=None,
            collate_fn=_pass_through,
            num_workers=workers,
            prefetch_factor=prefetch if workers else None,
            timeout=POLL_S if workers else 0,
            pin_memory=pin_memory,
            multiprocessing_context=multiprocessing_context if workers else None,
            worker_init_fn=_survive_sigterm,
        )
        self._state: dict[str, Any] | None = None
        self._follower: BatchStream | None = None
        self._skipped = 0
        """Number of batches to skip at the beginning of an iteration."""
        self._first_inserted: int | None = None
        """Insertion number of the oldest sample in reach of this training."""
        self._metrics: dict[str, float] = {}
        self._waited_s = 0.0
        self._damaged: set[str] = set()
        """Objects quarantined by this process and its workers."""
        self._iteration: weakref.ref[_Iteration] | None = None
        self.ids: list[str] = []

    def __iter__(self) -> Iterator[Any]:
        """Continue after the last iteration or the loaded state. Ends a running iteration."""
        self._end_iteration()
        found = _Iteration(self._iterate())
        self._iteration = weakref.ref(found)
        return found

    def _end_iteration(self) -> None:
        before = self._iteration() if self._iteration is not None else None
        if before is not None:
            before.close()

    def _iterate(self) -> Generator[Any, None, None]:
        self._batches.initial_state, self._batches.skipped = self._state, self._skipped
        # A fork after the start of a thread is unsafe, therefore the workers come first.
        workers = iter(self._loader)
        batches = BatchPrefetcher(workers) if self._loader.num_workers else workers
        place, patience_s = self._batches.place, self._batches.patience_s
        with ExitStack() as stack:
            if isinstance(batches, BatchPrefetcher):
                # A worker's error refers to the iterator of the workers. Without this call, the workers would live as
                # long as the error, and the end of the process would wait WORKER_GRACE_S for them.
                stack.callback(workers._shutdown_workers)
                stack.callback(batches.close)
            reader = stack.enter_context(RingReader(open_ring(place), patience_s=patience_s))
            stack.enter_context(Maintainer(self._ring, reader.name))
            # The maintainer publishes the samples of departed writers. The follower advances through the plan behind
            # the workers, which are ahead by their prefetched batches.
            follower = BatchStream(reader, self._shape, group=self._batches.group, rank=self._rank)
            if self._state is not None:
                follower.load_state_dict(self._state)
            self._follower = follower
            try:
                for _ in range(self._skipped):
                    follower.skip()
                self._skipped = 0
                while True:
                    began = time.perf_counter()
                    ids, batch, damaged = next(batches)  # The batches never end.
                    slots = follower.skip()
                    self.ids = ids
                    self._damaged.update(damaged)
                    self._update_metrics(follower, slots, time.perf_counter() - began)
                    yield batch
            finally:
                if follower.plan.batch:
                    self._state = follower.state_dict()
                self._follower = None

    @property
    def waited_s(self) -> float:
        """Return the total seconds for which the loop has waited for batches."""
        return self._waited_s

    def data_metrics(self) -> dict[str, float]:
        """Return metrics of the newest batch.

        The metrics are the wait (s), the mean number of reads per sample, the mean age of the batch's samples (s, by
        the clocks of writers and readers), and the number of damaged objects.
        """
        return self._metrics

    def skip(self, batches: int) -> None:
        """Skip batches at the beginning of the next iteration."""
        self._skipped += batches

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the newest batch as JSON."""
        state = {} if self._state is None else self._state
        if self._follower is not None and self._follower.plan.batch:
            state = self._follower.state_dict()
        first = {"first_inserted": self._first_inserted} if state else {}
        return {**state, **first, **({"skipped": self._skipped} if self._skipped else {})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state at the next iteration; ends a running iteration.

        Raises RingMismatch for a state with another seed or another size of global batches.
        """
        self._shape.require_same(state)
        before = self._iteration() if self._iteration is not None else None
        if before is not None and before.started:
            self._end_iteration()
        self._state = {name: value for name, value in state.items() if name != "skipped"} or None
        self._skipped = int(state.get("skipped", 0))
        self._first_inserted = state.get("first_inserted")
        if self._state is not None and self._given is None and "group" in self._state:
            self._batches.group = require_name(self._state["group"], "group")

    def checkpointed(self, state: Mapping[str, Any] | None = None) -> None:
        """Record that a checkpoint with this state (default: the newest state) is stored.

        The method releases earlier samples, and keeps later samples until the next call.
        """
        state = state if state is not None else self.state_dict()
        if not state.get("decided"):
            return
        if self._follower is not None:
            self._follower.checkpointed(dict(state))
        else:
            prune_decisions(self._ring, str(state["group"]), int(state["run"]), int(state["decided"]))

    def _update_metrics(self, follower: BatchStream, slots: Sequence[Slot], waited_s: float) -> None:
        """Update the metrics after a batch of `slots`."""
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
    """Iteration of a RingLoader, which runs one iteration at a time because of its single position."""

    def __init__(self, batches: Generator[Any, None, None]) -> None:
        self._batches = batches
        self._ended = False

    @property
    def started(self) -> bool:
        """Return True after the iteration has read its starting position."""
        return inspect.getgeneratorstate(self._batches) != inspect.GEN_CREATED

    def __next__(self) -> Any:
        if self._ended:
            raise RingMismatch("a newer iteration of this loader has begun", "Make a loader for each loop")
        return next(self._batches)

    def close(self) -> None:
        """End the iteration even if other references exist, such as a traceback's."""
        self._ended = True
        self._batches.close()


def _require_index_access(ring: Ring, place: str) -> None:
    for name in ("max_uses", "max_age_s"):
        if getattr(ring.settings, name) is not None:
            raise RingMismatch(
                f"{place} has {name}, and RingDataset reads any index, however often and however old",
                "Use RingLoader, or a ring without this setting",
            )


def require_shared(place: str) -> None:
    """Raise RingMismatch for a place that other processes cannot open."""
    if place.startswith("memory:"):
        raise RingMismatch(
            f"{place} exists in this process alone, and workers are other processes", "Use workers=0, or a directory"
        )


def _survive_sigterm(worker: int) -> None:
    # SIGTERM reaches every process of the machine, while multiprocessing, too, ends workers by SIGTERM. Therefore a
    # worker survives SIGTERM for a limited time.
    signal.signal(signal.SIGTERM, lambda number, frame: signal.setitimer(signal.ITIMER_REAL, WORKER_GRACE_S))
