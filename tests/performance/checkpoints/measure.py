"""The figures of `make bench-checkpoint`: ours and theirs take turns within each round, on the same server."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_client.checkpoints.known import Known
from gpu_client.checkpoints.restore import restore
from gpu_client.checkpoints.store import LocalStore
from gpu_client.checkpoints.upload import Committed, commit_checkpoint
from gpu_client.transport.segments import Segment
from gpu_client.transport.transfer import RangeDownload, Transfer, Upload
from tests.performance.checkpoints import raw
from tests.performance.checkpoints.plane import Plane
from tests.performance.checkpoints.rivals import MirrorRival, ZipRival
from tests.performance.figures import Figure
from tests.second_store import SecondStore

MIB = 2**20
PACK_BYTES = 32 * MIB
SLOW_LINK_BYTES_PER_S = 10e6


@dataclass(frozen=True)
class Cost:
    """Of one action: wall time, and CPU time of this process and its children."""

    wall_s: float
    cpu_s: float


def measured(action: Callable[[], Any]) -> tuple[Cost, Any]:
    """Do it, and say what it took."""
    before, began = os.times(), time.perf_counter()
    result = action()
    wall_s, after = time.perf_counter() - began, os.times()
    return Cost(wall_s, sum(after[:4]) - sum(before[:4])), result


class Bench:
    """A server, scratch folders and the states to save."""

    def __init__(self, scratch: Path, store: SecondStore, *, quick: bool) -> None:
        self.scratch = scratch
        self._store = store
        self._quick = quick
        self._buckets = 0

    def states(self, kind: str) -> Path:
        """The directories of a kind, made on first use in a process of its own."""
        target = self.scratch / kind
        if not target.exists():
            command = [sys.executable, "-m", "tests.performance.checkpoints.states", kind, str(target)]
            subprocess.run([*command, *(["--quick"] if self._quick else [])], check=True)
        return target

    def bucket(self) -> str:
        """A new one."""
        self._buckets += 1
        name = f"bench-{self._buckets}"
        self._store.client.create_bucket(Bucket=name)
        return name

    def ours(self, upload_bytes_per_s: float | None = None) -> Ours:
        """A worker that knows nothing yet, on a link of that speed."""
        return Ours(Plane(self._store.client, self.bucket()), self.scratch, upload_bytes_per_s)

    def zip(self) -> ZipRival:
        return ZipRival(self._store.client, self.bucket(), self.scratch)

    def mirror(self) -> MirrorRival:
        return MirrorRival(self._store.client, self.bucket())

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """An empty one that goes away."""
        with tempfile.TemporaryDirectory(dir=self.scratch) as name:
            yield Path(name)


class Ours:
    """Saving and restoring as the agent does it."""

    def __init__(self, plane: Plane, scratch: Path, upload_bytes_per_s: float | None = None) -> None:
        self.plane = plane
        self.known = Known()
        self._spool = scratch / "spool"
        self._transfer = Transfer(workers=8, max_upload_bytes_per_s=upload_bytes_per_s)

    def save(self, directory: Path, step: int, *, upload_bytes_per_s: float | None = None) -> Committed:
        return commit_checkpoint(
            self.plane,
            self._transfer,
            self.plane.item(),
            directory,
            step,
            known=self.known,
            upload_bytes_per_s=upload_bytes_per_s,
            spool=self._spool,
        )

    def fetch(self, directory: Path) -> None:
        if restore(self.plane, self._transfer, self.plane.item(), directory) is None:
            raise RuntimeError("nothing was restored")


def saving(bench: Bench, rounds: int) -> list[Figure]:
    """A full fine-tune: nothing was stored before, everything changes."""
    first = bench.states("full") / "1"
    raw_bytes = sum(path.stat().st_size for path in first.rglob("*") if path.is_file())
    ours, zips, mirrors = [], [], []
    fetched, unzipped, mirrored = [], [], []
    puts: list[float] = []
    for _ in range(rounds):
        worker, zipping, mirroring = bench.ours(), bench.zip(), bench.mirror()
        cost, committed = measured(lambda worker=worker: worker.save(first, 1))
        ours.append(cost)
        puts.append(worker.plane.put_requests - (committed.raw_bytes - committed.reused_bytes) / PACK_BYTES - 2)
        mirrors.append(measured(lambda mirroring=mirroring: mirroring.save(first, "one"))[0])
        zips.append(measured(lambda zipping=zipping: zipping.save(first, "one"))[0])
        for took, fetch in (
            (fetched, worker.fetch),
            (mirrored, lambda target, mirroring=mirroring: mirroring.fetch("one", target)),
            (unzipped, lambda target, zipping=zipping: zipping.fetch("one", target)),
        ):
            with bench.folder() as target:
                took.append(measured(lambda fetch=fetch, target=target: fetch(target))[0])
    gigabytes = raw_bytes / 1e9
    return [
        _against("time to durable", "s", [c.wall_s for c in ours], "zip", [c.wall_s for c in zips], 1 / 15),
        _against("time to durable", "s", [c.wall_s for c in ours], "mirror", [c.wall_s for c in mirrors], 1 / 3),
        Figure(name="CPU of saving", unit="s/GB", rounds=[c.cpu_s / gigabytes for c in ours], at_most=1.0),
        _against("CPU of saving", "s", [c.cpu_s for c in ours], "zip", [c.cpu_s for c in zips], 1 / 50),
        _against("CPU of saving", "s", [c.cpu_s for c in ours], "mirror", [c.cpu_s for c in mirrors], 1 / 10),
        _against("resume", "s", [c.wall_s for c in fetched], "zip", [c.wall_s for c in unzipped], 1 / 15),
        _against("resume", "s", [c.wall_s for c in fetched], "mirror", [c.wall_s for c in mirrored], 1 / 3),
        Figure(name="PUTs beyond new bytes / 32 MiB + 2", unit="requests", rounds=puts, at_most=0.0, counted=True),
    ]


def second_of_lora(bench: Bench, rounds: int) -> list[Figure]:
    """A LoRA run that saves its frozen base too."""
    one, two = bench.states("lora") / "1", bench.states("lora") / "2"
    shares: list[float] = []
    ours, zips, mirrors, fetched, mirrored = [], [], [], [], []
    for _ in range(rounds):
        worker, zipping, mirroring = bench.ours(), bench.zip(), bench.mirror()
        worker.save(one, 1)
        cost, committed = measured(lambda worker=worker: worker.save(two, 2))
        ours.append(cost.wall_s)
        shares.append(committed.uploaded_bytes / committed.raw_bytes)
        mirrors.append(measured(lambda mirroring=mirroring: mirroring.save(two, "two"))[0].wall_s)
        zips.append(measured(lambda zipping=zipping: zipping.save(two, "two"))[0].wall_s)
        for took, fetch in (
            (fetched, worker.fetch),
            (mirrored, lambda target, mirroring=mirroring: mirroring.fetch("two", target)),
        ):
            with bench.folder() as target:
                took.append(measured(lambda fetch=fetch, target=target: fetch(target))[0].wall_s)
    return [
        Figure(name="second LoRA checkpoint, bytes sent", unit="of the directory", rounds=shares, at_most=0.10),
        _against("second LoRA checkpoint", "s", ours, "zip", zips, 1 / 50),
        _against("second LoRA checkpoint", "s", ours, "mirror", mirrors, 1 / 10),
        _against("resume of a deduplicated one", "s", fetched, "mirror", mirrored, 1.0),
    ]


def slow_link(bench: Bench, rounds: int) -> list[Figure]:
    """bf16 weights at a small learning rate, on a link of 10 MB/s."""
    one, two = bench.states("bf16") / "1", bench.states("bf16") / "2"
    shares: list[float] = []
    for _ in range(rounds):
        worker = bench.ours(upload_bytes_per_s=SLOW_LINK_BYTES_PER_S)
        with bench.folder() as kept:
            # The agent's local store has the bytes that deltas are taken to.
            store = LocalStore(kept, worker.plane.item().id)
            worker.known = Known(store)
            first = kept / "first"
            shutil.copytree(one, first)
            committed = worker.save(first, 1, upload_bytes_per_s=SLOW_LINK_BYTES_PER_S)
            store.committed(committed.manifest, first)
            committed = worker.save(two, 2, upload_bytes_per_s=SLOW_LINK_BYTES_PER_S)
        shares.append(committed.uploaded_bytes / committed.raw_bytes)
    return [Figure(name="bf16 at 10 MB/s, bytes sent", unit="of raw", rounds=shares, at_most=0.15)]


def stall(bench: Bench, rounds: int, *, quick: bool) -> list[Figure]:
    """How long the training stands still."""
    figures: list[Figure] = []
    for dtype in ("float32", "bfloat16"):
        command = [
            sys.executable,
            "-m",
            "tests.performance.checkpoints.stall",
            "--dtype",
            dtype,
            "--rounds",
            str(rounds),
        ]
        answer = subprocess.run([*command, *(["--quick"] if quick else [])], check=True, capture_output=True, text=True)
        found = json.loads(answer.stdout)
        took = found["rounds"]
        memory = found["extra_bytes"] / found["state_bytes"]
        figures += [
            _against(f"stall, {dtype}", "s", took["checkpoint"], "memcpy", took["memcpy"], 1.1),
            _against(f"stall, {dtype}, overlapped", "s", took["overlapped"], "memcpy", took["memcpy"], 0.2),
            _against(f"stall, {dtype}", "s", took["checkpoint"], "torch.save", took["torch.save"], 0.2),
            Figure(name=f"peak extra memory, {dtype}", unit="of the state", rounds=[memory], at_most=1.2),
        ]
    return figures


def engine(bench: Bench, rounds: int, *, quick: bool) -> list[Figure]:
    """Upload and download of 1 GiB by the transfer engine against a raw copy through the same server."""
    size_bytes = (64 if quick else 1024) * MIB
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="baton-bench-", dir="/dev/shm") as name:
        folder = Path(name)
        source = folder / "source"
        source.write_bytes(os.urandom(MIB) * (size_bytes // MIB))
        (folder / "store").mkdir()
        with raw.server(folder / "store") as url:
            transfer = Transfer(workers=8)
            parts = [(offset, min(PACK_BYTES, size_bytes - offset)) for offset in range(0, size_bytes, PACK_BYTES)]
            ups, raw_ups, downs, raw_downs = [], [], [], []
            for number in range(rounds):
                raw_ups.append(measured(lambda: raw.put(url, "raw", source, parts))[0])
                ups.append(measured(lambda number=number: transfer.upload(_uploads(url, number, source, parts)))[0])
                raw_downs.append(measured(lambda: raw.get(url, "raw", parts))[0])
                downs.append(measured(lambda number=number: transfer.fetch_ranges(_ranges(url, number, parts)))[0])
            transfer.close()
        figures += [
            _against("upload, CPU", "s", [c.cpu_s for c in ups], "raw sendfile", [c.cpu_s for c in raw_ups], 1.3),
            _against("upload", "s", [c.wall_s for c in ups], "raw copy", [c.wall_s for c in raw_ups], 1 / 0.8),
            _against("download", "s", [c.wall_s for c in downs], "raw copy", [c.wall_s for c in raw_downs], 1 / 0.8),
        ]
    return figures


def _uploads(url: str, number: int, source: Path, parts: list[tuple[int, int]]) -> list[Upload]:
    return [
        Upload(
            name=f"part {offset}",
            segments=(Segment(source, offset, size),),
            size_bytes=size,
            url=f"{url}/ours-{number}-{offset}",
            headers={},
        )
        for offset, size in parts
    ]


def _ranges(url: str, number: int, parts: list[tuple[int, int]]) -> list[RangeDownload]:
    return [
        RangeDownload(
            name=f"part {offset}",
            url=f"{url}/ours-{number}-{offset}",
            offset=start,
            size_bytes=min(8 * MIB, size - start),
            object_bytes=size,
            deliver=lambda piece: None,
        )
        for offset, size in parts
        for start in range(0, size, 8 * MIB)
    ]


def _against(name: str, unit: str, rounds: list[float], other: str, theirs: list[float], at_most: float) -> Figure:
    return Figure(
        name=f"{name} / {other}", unit=unit, rounds=rounds, baseline_name=other, baseline=theirs, at_most=at_most
    )
