"""For who comes from Wirehead (0.8 and 0.9): its names and its YAML file, on a ring in a directory.

    from gpu_client.ring.tools.wirehead import MongoheadDataset, WireheadGenerator, WireheadLogger

Of the file, `SWAP_CAP` and `SAMPLE` are used, and `DBNAME` names the ring: a directory beside the file, unless `RING`
names another. Keys that are about MongoDB are ignored, with a note. What differs, for the better: arrays come back as
they were put, nothing that was made is thrown away, and a batch is of one generation.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.util import Finalize
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from gpu_client.ring.core.maintenance import Keeper
from gpu_client.ring.core.ring import open_ring
from gpu_client.ring.errors import RingError, RingMismatch, SampleRefused
from gpu_client.ring.format.manifest import Manifest
from gpu_client.ring.format.records import WRITERS, content_of
from gpu_client.ring.generating.writer import RingWriter
from gpu_client.ring.reading.reader import RingReader
from gpu_client.ring.tools.wirehead_log import Config, SwapLog, WireheadLogger, WireheadSnapshot, note_swaps, say

__all__ = [
    "Config",
    "MongoTupleheadDataset",
    "MongoheadDataset",
    "SwapLog",
    "WireheadGenerator",
    "WireheadLogger",
    "WireheadManager",
    "WireheadSnapshot",
]

logger = logging.getLogger("baton.ring")

_PATIENCE_S = 600.0
_OLD_S = 3600.0
"""A generation of this age may be what an earlier run has left, though somebody generates."""


class WireheadGenerator:
    """Puts what a generator makes into the ring, by tuples of arrays."""

    def __init__(
        self, generator: Iterable[tuple[Any, ...]], config_path: str = "config.yaml", n_samples: int = int(1e9)
    ) -> None:
        self._config = Config.read(config_path)
        self._generator = iter(generator)
        self._left: list[tuple[Any, ...]] = []
        """The generator's last sample, if its `put` has raised without taking it."""
        self._n_samples = n_samples
        self._ring = self._config.ring()
        self._looked_at = -float("inf")
        self._writer = RingWriter(self._ring)
        # A script that calls `cycle` never ends a run: the writer leaves with its generator, or with the process.
        weakref.finalize(self, self._writer.close)

    def put(self, sample: tuple[Any, ...]) -> None:
        """One sample: as many arrays as SAMPLE names. Raises SampleRefused."""
        self._writer.put(_named(sample, self._config.kinds))

    def swap(self) -> None:
        """Make readable what there is, a whole generation or not."""
        self._writer.swap()

    def cycle(self, verbose: bool = False) -> None:
        """Put the next sample of the generator; `verbose` prints so, and the swaps of which no process has told yet.

        A refused sample is logged and passed over. Raises StopIteration behind the generator's last sample, and what
        `RingWriter.put` raises: the next call puts a sample again that was not taken.
        """
        sample = self._left.pop() if self._left else next(self._generator)
        try:
            self.put(sample)
        except SampleRefused as error:
            logger.warning("a sample was refused: %s", error)
        except BaseException:
            if not self._writer.unsure:
                self._left.append(sample)
            raise
        else:
            if verbose:
                say(f"Generator: {self._writer.put_samples} samples put, {self._config.cap} make a generation")
        now = time.monotonic()
        # Nothing is swapped more often.
        if now - self._looked_at >= self._ring.settings.publish_interval_s:
            self._looked_at = now
            self._tell_swaps(verbose)

    def run(self, verbose: bool = False) -> int:
        """Call `cycle` `n_samples` times, or until the generator ends; return how many samples were put."""
        try:
            for _ in range(self._n_samples):
                try:
                    self.cycle(verbose)
                except StopIteration:
                    break
        finally:
            self._writer.close()
        self._tell_swaps(verbose)
        return self._writer.put_samples

    run_generator = run
    """As it was called in 0.8."""

    def _tell_swaps(self, verbose: bool) -> None:
        """Record new swaps. Of all generators the one that adds a swap to the record prints it."""
        try:
            swaps = note_swaps(self._ring)
        except (OSError, RingError) as error:
            # The next look records them: a log is no reason to lose a generator.
            logger.warning("swaps cannot be recorded now: %s", error)
            return
        for swap in swaps:
            if verbose:
                say(f"Generator: swap success: generation {swap.total}, {swap.inserted} samples so far")


class WireheadManager:
    """Looks after a ring, which generators do as well: there need not be one."""

    def __init__(self, config_path: str = "config.yaml") -> None:
        self._keeper = Keeper(Config.read(config_path).ring(), "manager")
        self._ended = threading.Event()

    def run_manager(self) -> None:
        """Until `stop`."""
        self._keeper.start()
        self._ended.wait()
        self._keeper.close()

    def stop(self) -> None:
        """From another thread, or a signal handler."""
        self._ended.set()


class MongoheadDataset(Dataset[Any]):  # type: ignore[misc, unused-ignore]
    """Samples of the newest generation, by index or by lists of indices.

    A list gives `{index: {"input", "label"}}`, the first array as floats, as it always did; an index gives one of
    these. Waits for the first generation. `generation` is the number of the one that was read last: in another one
    the same index means another sample. Where a part of a generation was swapped, indices behind its end begin anew.
    """

    def __init__(  # noqa: PLR0917 - the order of Wirehead's arguments
        self,
        config_path: str = "config.yaml",
        timeout: float = _PATIENCE_S,
        collection: Any = None,
        sample: Sequence[str] | None = None,
        transform: Any = None,
        normalize: Callable[[Any], Any] | None = None,
        id: Any = "id",
        keeptrying: Any = True,
    ) -> None:
        """`normalize` is given the first array. `collection`, `transform`, `id` and `keeptrying` were MongoDB's."""
        of_mongodb = {"collection": collection is None, "transform": transform is None, "id": id == "id"}
        of_mongodb |= {"keeptrying": bool(keeptrying)}
        if ignored := [name for name, is_default in of_mongodb.items() if not is_default]:
            logger.warning("ignored, since there is no MongoDB here: %s", ", ".join(ignored))
        self._config = Config.read(config_path)
        self._kinds = tuple(sample) if sample is not None else self._config.kinds[:2]
        self._normalize = normalize
        self._timeout_s = timeout
        self._config.ring()
        self._reader: RingReader | None = None
        self._at_end: Finalize | None = None  # type: ignore[type-arg, unused-ignore]
        self.generation = 0
        newest = self._newest()
        self._length = len(newest)
        ring = self._opened().ring
        age_s = ring.clock() - newest.at_ms / 1000
        generating = any(not content_of(ring.store.record(key)).get("dead") for key in ring.store.keys(WRITERS))
        if age_s > _OLD_S or not generating:
            logger.warning(
                "the newest generation was made %.1f minutes ago%s: if that was another run, remove %s to begin anew",
                age_s / 60,
                "" if generating else ", and nobody generates now",
                self._config.place,
            )

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int | Sequence[int]) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int | Sequence[int]]) -> list[Any]:
        """Return a batch of one generation, as a DataLoader asks for a batch. Each index may be a list of indices."""
        newest = self._newest()
        self.generation = newest.number
        return [self._of(newest, index) for index in indices]

    def get(self, indices: Sequence[int]) -> Any:
        """As the dataset gives them for a list."""
        return self[list(indices)]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None, "_at_end": None}

    def _of(self, newest: Manifest, index: int | Sequence[int]) -> Any:
        if isinstance(index, int | np.integer):
            return self._fetched(newest, [index])[index]
        return self._fetched(newest, index)

    def _fetched(self, newest: Manifest, indices: Sequence[int]) -> dict[int, dict[str, Any]]:
        reader = self._opened()
        found = {}
        for index in indices:
            if not -self._length <= index < self._length:
                raise IndexError(f"there are {self._length} samples, and no {index}")
            # For a damaged one another is read, which is logged.
            sample, _ = reader.sample_or_another(newest.slots[index % self._length % len(newest)], newest)
            first = torch.as_tensor(sample[self._kinds[0]]).float()
            found[index] = {"input": self._normalize(first) if self._normalize else first}
            if len(self._kinds) > 1:
                found[index]["label"] = torch.as_tensor(sample[self._kinds[1]])
        reader.took(len(found))
        return found

    def _newest(self) -> Manifest:
        reader = self._opened()
        found: Manifest = reader.wait(lambda: reader.newest() or None, "no generation is complete")
        reader.keep_only([found.number])
        return found

    def _opened(self) -> RingReader:
        if self._reader is None or not self._reader.is_own_process():
            self._reader = RingReader(open_ring(self._config.place), patience_s=self._timeout_s)
            # Nobody closes it in a worker, which ends without atexit: what it has read would not be counted.
            self._at_end = Finalize(None, self._reader.close, exitpriority=0)
        return self._reader


class MongoTupleheadDataset(MongoheadDataset):
    """The same with pairs: a list gives `[(input, label)]`."""

    def _of(self, newest: Manifest, index: int | Sequence[int]) -> Any:
        if isinstance(index, int | np.integer):
            return tuple(self._fetched(newest, [index])[index].values())
        found = self._fetched(newest, index)
        return [tuple(found[one].values()) for one in index]


def _named(sample: tuple[Any, ...], kinds: tuple[str, ...]) -> dict[str, Any]:
    if len(sample) != len(kinds):
        raise RingMismatch(
            f"the generator makes {len(sample)} arrays and SAMPLE names {len(kinds)}: {', '.join(kinds)}",
            "Name all of them",
        )
    return dict(zip(kinds, sample, strict=True))
