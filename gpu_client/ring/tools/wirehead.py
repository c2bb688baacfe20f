"""Provide Wirehead's generators (0.8 and 0.9) on a ring in a directory.

    from baton import MongoheadDataset, WireheadGenerator, WireheadLogger

The classes use the file's `SWAP_CAP` and `SAMPLE`. `DBNAME` names the ring, a directory beside the file, unless `RING`
names another directory. The classes ignore MongoDB's keys with a warning. Differences: arrays keep their type, every
finished sample becomes readable, and a batch belongs to one generation. The data sets have a module of their own,
since generators need no torch.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Iterable
from typing import Any

from gpu_client.ring.core.maintenance import Maintainer
from gpu_client.ring.errors import RingError, RingMismatch, SampleRefused
from gpu_client.ring.generating.writer import RingWriter
from gpu_client.ring.tools.wirehead_log import WireheadConfig, print_lines, record_swaps

logger = logging.getLogger("baton.ring")


class WireheadGenerator:
    """Writer of a generator's samples, as tuples of arrays."""

    def __init__(
        self, generator: Iterable[tuple[Any, ...]], config_path: str = "config.yaml", n_samples: int = int(1e9)
    ) -> None:
        self._config = WireheadConfig.read(config_path)
        self._generator = iter(generator)
        self._pending: list[tuple[Any, ...]] = []
        """The generator's last sample, if its `put` raised without accepting the sample."""
        self._n_samples = n_samples
        self._ring = self._config.ring()
        self._checked_at = -float("inf")
        self._writer = RingWriter(self._ring)
        # A script that calls `cycle` never ends a run, therefore a finalizer closes the writer with the generator or
        # the process.
        weakref.finalize(self, self._writer.close)

    def put(self, sample: tuple[Any, ...]) -> None:
        """Put one sample with an array for each name in SAMPLE. Raises SampleRefused."""
        self._writer.put(_name_arrays(sample, self._config.kinds))

    def swap(self) -> None:
        """Publish all samples, also an incomplete generation."""
        self._writer.swap()

    def cycle(self, verbose: bool = False) -> None:
        """Put the next sample of the generator. `verbose` prints progress, and swaps that no process has printed.

        The method logs and skips a refused sample. Raises StopIteration after the last sample, and the exceptions of
        `RingWriter.put`, after which the next call repeats the sample.
        """
        sample = self._pending.pop() if self._pending else next(self._generator)
        try:
            self.put(sample)
        except SampleRefused as error:
            logger.warning("a sample was refused: %s", error)
        except BaseException:
            if not self._writer.commit_uncertain:
                self._pending.append(sample)
            raise
        else:
            if verbose:
                print_lines(f"Generator: {self._writer.put_samples} samples put, {self._config.cap} make a generation")
        now = time.monotonic()
        # Swaps are at most as frequent as publications.
        if now - self._checked_at >= self._ring.settings.publish_interval_s:
            self._checked_at = now
            self._record_swaps(verbose)

    def run(self, verbose: bool = False) -> int:
        """Call `cycle` `n_samples` times, or until the generator ends. Returns the number of put samples."""
        try:
            for _ in range(self._n_samples):
                try:
                    self.cycle(verbose)
                except StopIteration:
                    break
        finally:
            self._writer.close()
        self._record_swaps(verbose)
        return self._writer.put_samples

    run_generator = run
    """Name of `run` in Wirehead 0.8."""

    def _record_swaps(self, verbose: bool) -> None:
        """Record new swaps. The generator that adds a swap to the record prints the swap."""
        try:
            swaps = record_swaps(self._ring)
        except (OSError, RingError) as error:
            # A failure of the log must not end a generator, and the next check records the swaps.
            logger.warning("swaps cannot be recorded now: %s", error)
            return
        for swap in swaps:
            if verbose:
                print_lines(f"Generator: swap success: generation {swap.total}, {swap.inserted} samples so far")


class WireheadManager:
    """Maintainer of a ring; optional, because generators maintain the ring, too."""

    def __init__(self, config_path: str = "config.yaml") -> None:
        self._maintainer = Maintainer(WireheadConfig.read(config_path).ring(), "manager")
        self._ended = threading.Event()

    def run_manager(self) -> None:
        """Run until `stop`."""
        self._maintainer.start()
        self._ended.wait()
        self._maintainer.close()

    def stop(self) -> None:
        """Stop, from another thread or a signal handler."""
        self._ended.set()


def _name_arrays(sample: tuple[Any, ...], kinds: tuple[str, ...]) -> dict[str, Any]:
    if len(sample) != len(kinds):
        raise RingMismatch(
            f"the generator makes {len(sample)} arrays and SAMPLE names {len(kinds)}: {', '.join(kinds)}",
            "Name all of them",
        )
    return dict(zip(kinds, sample, strict=True))
