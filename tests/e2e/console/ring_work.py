"""A ring of the control plane with scripted generators and trainings, without threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from gpu_client.ring.core.maintenance import Maintainer
from gpu_client.ring.core.ring import Ring
from gpu_client.ring.generating.writer import RingWriter
from gpu_client.ring.reading.reader import RingReader
from gpu_client.ring.settings import RingSettings
from gpu_client.ring.store.control_plane import ControlPlaneStore
from gpu_client.ring.store.uri import ControlPlaneAccess
from tests.kits.stack.control_plane import ControlPlane


class RingWork:
    """A ring, its maintainer, writers and readers by name."""

    def __init__(self, stack: ControlPlane, name: str, **settings: Any) -> None:
        self.name = name
        access = ControlPlaneAccess(stack.url, stack.keys["admin"])
        self.ring = Ring.make(
            ControlPlaneStore(name, access),
            RingSettings.model_validate({"cap": 40, "lease_s": 600, "pack": 10, **settings}),
        )
        self.keeper = Maintainer(self.ring, "keeper")
        self._writers: dict[str, RingWriter] = {}
        self._readers: dict[str, RingReader] = {}

    def put(self, writer: str, samples: int, *, waited_s: float = 0) -> None:
        """Put samples, publish them, and report; the writer waits no longer than an instant."""
        if writer not in self._writers:
            self._writers[writer] = RingWriter(self.ring, writer, maintainer=self.keeper, threads=False)
        one = self._writers[writer]
        for seed in range(samples):
            one.put({"x": np.full(8, seed, np.uint8)}, seed=seed)
        one.flush()
        one.waited_s += waited_s
        self.keeper.turn()
        one.renew()

    def read(self, reader: str, samples: int, *, waited_s: float = 0) -> None:
        """Count samples as read, and report."""
        if reader not in self._readers:
            self._readers[reader] = RingReader(self.ring, reader, threads=False)
            self._readers[reader].newest()
        one = self._readers[reader]
        one.record_consumed(samples)
        one.waited_s += waited_s
        one.flush_stats()
        self.keeper.turn()

    def close(self) -> None:
        """End all processes."""
        for one in (*self._writers.values(), *self._readers.values(), self.keeper):
            one.close()


@contextmanager
def ring_work(stack: ControlPlane, name: str, **settings: Any) -> Iterator[RingWork]:
    """Yield a ring whose processes end afterwards."""
    work = RingWork(stack, name, **settings)
    try:
        yield work
    finally:
        work.close()
