"""Read Wirehead's configuration file, and provide its logger on a ring: swaps and snapshots as JSON lines.

The collector deletes manifests, while the record of swaps stays. Any process may add to the record; compare-and-swap
decides which process adds a generation, therefore the record has each generation once.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import yaml

from gpu_client.ring.core.ring import Ring, make_ring
from gpu_client.ring.errors import ManifestMissing, RingMismatch
from gpu_client.ring.format.manifest import manifest_number
from gpu_client.ring.format.records import MANIFESTS, SWAPS, decode_record, encode_checksummed
from gpu_client.ring.settings import RingSettings
from gpu_client.ring.tools.status import RingStatus, read_status

MAX_SWAPS = 200
"""Number of newest swaps in the record."""


class Swap(NamedTuple):
    """Record of a generation that became readable."""

    manifest: int
    """Number of the generation's manifest."""
    total: int
    """Number of swaps up to and including this swap."""
    inserted: int
    """Number of samples that had become readable up to and including this swap."""
    at_ms: int


def read_swaps(ring: Ring) -> list[Swap]:
    """Read the recorded swaps, oldest first."""
    return [Swap(*entry) for entry in decode_record(ring.store.record(SWAPS)).get("swaps", [])]


def record_swaps(ring: Ring) -> list[Swap]:
    """Record generations that became readable since the last entry. Returns the entries added by this call.

    A generation whose manifest was deleted before any call counts but has no entry.
    """
    while True:
        record = ring.store.record(SWAPS)
        known = [Swap(*entry) for entry in decode_record(record).get("swaps", [])]
        last = known[-1] if known else Swap(0, 0, 0, 0)
        newest = ring.newest()
        if newest.inserted <= last.inserted:
            return []
        added: list[Swap] = []
        for number in sorted(map(manifest_number, ring.store.keys(MANIFESTS))):
            if not last.manifest < number <= newest.number:
                continue
            try:
                found = ring.manifest(number)
            except ManifestMissing:
                continue  # Collected since the listing.
            before = added[-1] if added else last
            more = found.inserted - before.inserted
            if more > 0:
                swaps = -(-more // ring.settings.cap)
                added.append(Swap(number, before.total + swaps, found.inserted, found.at_ms))
        content = {"swaps": [*known, *added][-MAX_SWAPS:]}
        if (
            not added
            or ring.store.swap(SWAPS, encode_checksummed(content), record.version if record else None) is not None
        ):
            return added


logger = logging.getLogger("baton.ring")

_USED = ("SWAP_CAP", "SAMPLE", "DBNAME", "RING")
_OF_MONGODB = (
    "MONGOHOST", "PORT", "CHUNKSIZE", "WRITE_COLLECTION", "READ_COLLECTION", "TEMP_COLLECTION", "COUNTER_COLLECTION",
    "LOCK_COLLECTION",
)  # fmt: skip


class WireheadConfig(NamedTuple):
    """Content of Wirehead's config.yaml."""

    name: str
    place: str
    cap: int
    kinds: tuple[str, ...]

    @classmethod
    def read(cls, path: str | Path) -> WireheadConfig:
        """Read a configuration file. Raises RingMismatch for an invalid file."""
        try:
            content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise RingMismatch(f"{path} cannot be read ({error})", "Name Wirehead's config.yaml") from error
        if not isinstance(content, dict):
            raise RingMismatch(
                f"{path} is not a Wirehead configuration", "Name a file with keys such as SWAP_CAP and DBNAME"
            )
        ignored = [key for key in _OF_MONGODB if key in content]
        if ignored:
            # Scripts without a logging set-up show warnings and errors only, therefore the message is a warning.
            logger.warning("%s: there is no MongoDB here, so these are ignored: %s", path, ", ".join(ignored))
        unknown = [str(key) for key in content if key not in (*_USED, *_OF_MONGODB)]
        if unknown:
            logger.warning("%s: not known, and ignored: %s", path, ", ".join(unknown))
        cap, name = content.get("SWAP_CAP"), content.get("DBNAME", "wirehead")
        kinds = content.get("SAMPLE", ["data", "label"])
        if not isinstance(cap, int) or isinstance(cap, bool) or cap < 1:
            raise RingMismatch(
                f"{path}: SWAP_CAP is {cap!r}", "Set the number of samples of a generation: SWAP_CAP: 1000"
            )
        if not isinstance(kinds, list) or not kinds or not all(isinstance(kind, str) for kind in kinds):
            raise RingMismatch(f"{path}: SAMPLE is {kinds!r}", 'Name the arrays of a sample: SAMPLE: ["data", "label"]')
        place = content.get("RING") or Path(path).resolve().parent / f"{name}.ring"
        return cls(str(name), str(place), cap, tuple(kinds))

    def ring(self) -> Ring:
        """Open the ring, or make a missing ring."""
        return make_ring(self.place, RingSettings(cap=self.cap, mode="generation", shapes="any", finite=False))


_MB = 1024 * 1024


@dataclass
class SwapLog:
    """Log line of a swap. `swap_duration`: seconds for which the previous generation was the newest."""

    swap_timestamp: float
    prev_swap_timestamp: float | None = None
    swap_duration: float | None = None
    swap_count: int = 0
    db_name: str = ""

    def to_jsonl(self) -> str:
        """Format as one line of JSON."""
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        return self.to_jsonl()


@dataclass
class WireheadSnapshot:
    """State of a ring at one moment, in Wirehead's fields.

    `write_*` describe the samples that wait for the next generation, `read_*` the samples of the newest generation;
    sizes follow from the mean size of the working writers. Stored samples count at once, and a swap is one atomic
    write, therefore `in_flight`, `is_swapping`, `swap_lock_duration` and `mongo_active_ops` never change.
    """

    samples_started: int = 0
    samples_completed: int = 0
    in_flight: int = 0
    swap_cap: int = 0
    fill_pct: float = 0.0
    is_swapping: bool = False
    swap_lock_duration: float | None = None
    swap_count: int = 0
    swap_timestamp: float | None = None
    swap_duration: float | None = None
    time_since_last_swap: float | None = None
    avg_swap_duration: float | None = None
    samples_per_s: float = 0.0
    swaps_per_s: float = 0.0
    write_mb_per_s: float = 0.0
    write_docs: int = 0
    write_size_mb: float = 0.0
    read_docs: int = 0
    read_size_mb: float = 0.0
    mongo_active_ops: int = 0
    db_name: str = ""
    poll_interval: float = 2.0
    timestamp: float = 0.0
    recent_swaps: list[SwapLog] = field(default_factory=list)

    def to_jsonl(self) -> str:
        """Format as one line of JSON."""
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        return self.to_jsonl()


class WireheadLogger:
    """Logger of the swaps of a configuration's ring."""

    def __init__(
        self,
        config_path: str = "config.yaml",
        poll_interval: float = 2.0,
        *,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        """Open or make the ring. `poll_interval`: seconds between two reads. Raises RingMismatch."""
        config = WireheadConfig.read(config_path)
        self._ring = config.ring()
        self._pause = pause
        self._before: tuple[RingStatus, int] | None = None
        self.db_name = config.name
        self.poll_interval = poll_interval

    def history(self) -> list[SwapLog]:
        """Return the newest recorded swaps, oldest first."""
        record_swaps(self._ring)
        return [self._log(one, before) for before, one in pairwise([None, *read_swaps(self._ring)]) if one is not None]

    def snapshot(self) -> WireheadSnapshot:
        """Return the current state, with rates since the last call."""
        logs = self.history()
        found, last = read_status(self._ring), logs[-1] if logs else None
        count = last.swap_count if last else 0
        samples_per_s = swaps_per_s = 0.0
        if self._before is not None and found.at > self._before[0].at:
            before, count_before = self._before
            seconds = found.at - before.at
            samples_per_s = max(found.inserted + found.finished - before.inserted - before.finished, 0) / seconds
            swaps_per_s = max(count - count_before, 0) / seconds
        self._before = found, count
        put = sum(row.put for row in found.at_work)
        mean_mb = sum(row.put_bytes for row in found.at_work) / put / _MB if put else 0.0
        durations = [log.swap_duration for log in logs if log.swap_duration is not None]
        return WireheadSnapshot(
            samples_started=found.finished,
            samples_completed=found.finished,
            swap_cap=found.cap,
            fill_pct=min(100 * found.finished / found.cap, 100.0),
            swap_count=count,
            swap_timestamp=last.swap_timestamp if last else None,
            swap_duration=last.swap_duration if last else None,
            time_since_last_swap=found.at - last.swap_timestamp if last else None,
            avg_swap_duration=fmean(durations) if durations else None,
            samples_per_s=samples_per_s,
            swaps_per_s=swaps_per_s,
            write_mb_per_s=samples_per_s * mean_mb,
            write_docs=found.finished,
            write_size_mb=found.finished * mean_mb,
            read_docs=found.readable,
            read_size_mb=found.readable * mean_mb,
            db_name=self.db_name,
            poll_interval=self.poll_interval,
            timestamp=found.at,
            recent_swaps=logs[-10:],
        )

    def run(self) -> None:
        """Print each recorded swap, then each new swap, until the process ends."""
        print_lines(f"Logger: {self.db_name}, looked at every {self.poll_interval:g} s")
        printed = 0
        while True:
            logs = [log for log in self.history() if log.swap_count > printed]
            print_lines(*logs)
            printed = logs[-1].swap_count if logs else printed
            self._pause(self.poll_interval)

    def run_daemon(self) -> None:
        """Print a snapshot every `poll_interval` seconds until the process ends."""
        while True:
            print_lines(self.snapshot())
            self._pause(self.poll_interval)

    def _log(self, swap: Swap, before: Swap | None) -> SwapLog:
        at, before_at = swap.at_ms / 1000, None if before is None else before.at_ms / 1000
        return SwapLog(at, before_at, None if before_at is None else at - before_at, swap.total, self.db_name)


def print_lines(*lines: object) -> None:
    """Write lines to the current `sys.stdout`, which scripts may replace, and flush."""
    for line in lines:
        sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
