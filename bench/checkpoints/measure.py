"""Figures of `make bench-checkpoint`: ours and the rivals take turns within each round on one server."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from bench.checkpoints.subjects import WORKERS, Bench
from bench.checkpoints.timing import Cost, measured
from bench.harness.figures import Figure
from gpu_client.checkpoints.local.chunk_cache import LocalChunkCache
from gpu_client.checkpoints.save.chunk_index import ChunkIndex
from gpu_client.transport.transfer.manager import Transfer

PACK_BYTES = 32 * 2**20
SLOW_LINK_BYTES_PER_S = 10e6


def saving(bench: Bench, rounds: int) -> list[Figure]:
    """Measure a full fine-tune: nothing is stored before, every byte changes."""
    first = bench.states("full") / "1"
    raw_bytes = sum(path.stat().st_size for path in first.rglob("*") if path.is_file())
    ours, zips, mirrors = [], [], []
    fetched, unzipped, mirrored = [], [], []
    puts: list[float] = []
    bench.warm_up()
    for _ in range(rounds):
        with bench.round() as (worker, mirroring, zipping):
            cost, committed = measured(lambda worker=worker: worker.save(first, 1))
            ours.append(cost)
            puts.append(worker.plane.put_requests - (committed.raw_bytes - committed.reused_bytes) / PACK_BYTES - 2)
            mirrors.append(mirroring.save(first, "one"))
            zips.append(measured(lambda zipping=zipping: zipping.save(first, "one"))[0])
            fetched.append(_fetched(bench, worker.fetch))
            mirrored.append(_mirrored(bench, lambda to, mirroring=mirroring: mirroring.fetch("one", to)))
            unzipped.append(_fetched(bench, lambda to, zipping=zipping: zipping.fetch("one", to)))
    gigabytes = raw_bytes / 1e9
    return [
        against("time to durable", "s", [c.wall_s for c in ours], "zip", [c.wall_s for c in zips], 1 / 15),
        against("time to durable", "s", [c.wall_s for c in ours], "mirror", [c.wall_s for c in mirrors], 1 / 3),
        Figure(name="CPU of saving", unit="s/GB", rounds=[c.cpu_s / gigabytes for c in ours], at_most=1.0),
        against("CPU of saving", "s", [c.cpu_s for c in ours], "zip", [c.cpu_s for c in zips], 1 / 50),
        against("CPU of saving", "s", [c.cpu_s for c in ours], "mirror", [c.cpu_s for c in mirrors], 1 / 10),
        against("resume", "s", [c.wall_s for c in fetched], "zip", [c.wall_s for c in unzipped], 1 / 15),
        against("resume", "s", [c.wall_s for c in fetched], "mirror", [c.wall_s for c in mirrored], 1 / 3),
        Figure(name="PUTs beyond new bytes / 32 MiB + 2", unit="requests", rounds=puts, at_most=0.0, counted=True),
    ]


def second_of_lora(bench: Bench, rounds: int) -> list[Figure]:
    """Measure the second checkpoint of a LoRA run that saves its frozen base too."""
    one, two = bench.states("lora") / "1", bench.states("lora") / "2"
    shares: list[float] = []
    ours, zips, mirrors, fetched, mirrored = [], [], [], [], []
    bench.warm_up()
    for _ in range(rounds):
        with bench.round() as (worker, mirroring, zipping):
            worker.save(one, 1)
            cost, committed = measured(lambda worker=worker: worker.save(two, 2))
            ours.append(cost.wall_s)
            shares.append(committed.uploaded_bytes / committed.raw_bytes)
            mirrors.append(mirroring.save(two, "two").wall_s)
            zips.append(measured(lambda zipping=zipping: zipping.save(two, "two"))[0].wall_s)
            fetched.append(_fetched(bench, worker.fetch).wall_s)
            mirrored.append(_mirrored(bench, lambda to, mirroring=mirroring: mirroring.fetch("two", to)).wall_s)
    return [
        Figure(name="second LoRA checkpoint, bytes sent", unit="of the directory", rounds=shares, at_most=0.10),
        against("second LoRA checkpoint", "s", ours, "zip", zips, 1 / 50),
        against("second LoRA checkpoint", "s", ours, "mirror", mirrors, 1 / 10),
        against("resume of a deduplicated one", "s", fetched, "mirror", mirrored, 1.0),
    ]


def _fetched(bench: Bench, fetch: Callable[[Path], object]) -> Cost:
    with bench.folder() as target:
        return measured(lambda: fetch(target))[0]


def _mirrored(bench: Bench, fetch: Callable[[Path], Cost]) -> Cost:
    with bench.folder() as target:
        return fetch(target)


def slow_link(bench: Bench, rounds: int) -> list[Figure]:
    """Measure bf16 weights at a small learning rate over a link of 10 MB/s."""
    one, two = bench.states("bf16") / "1", bench.states("bf16") / "2"
    shares: list[float] = []
    for _ in range(rounds):
        worker = bench.ours(Transfer(workers=WORKERS, max_upload_bytes_per_s=SLOW_LINK_BYTES_PER_S))
        with bench.folder() as cache_folder:
            # The agent's local store has the bytes that deltas are taken to.
            store = LocalChunkCache(cache_folder, worker.plane.item().id)
            worker.known = ChunkIndex(store)
            first = cache_folder / "first"
            shutil.copytree(one, first)
            committed = worker.save(first, 1, upload_bytes_per_s=SLOW_LINK_BYTES_PER_S)
            store.record_committed(committed.manifest, first)
            committed = worker.save(two, 2, upload_bytes_per_s=SLOW_LINK_BYTES_PER_S)
        worker.close()
        shares.append(committed.uploaded_bytes / committed.raw_bytes)
    return [Figure(name="bf16 at 10 MB/s, bytes sent", unit="of raw", rounds=shares, at_most=0.15)]


def stall(bench: Bench, rounds: int) -> list[Figure]:
    """Measure the stall of the training."""
    figures: list[Figure] = []
    for dtype in ("float32", "bfloat16"):
        command = [sys.executable, "-m", "bench.checkpoints.stall"]
        command += ["--dtype", dtype, "--rounds", str(rounds), *(["--quick"] if bench.quick else [])]
        answer = subprocess.run(command, check=True, capture_output=True, text=True)
        found = json.loads(answer.stdout)
        took = found["rounds"]
        memory = found["extra_bytes"] / found["state_bytes"]
        size = f"{dtype}, {found['state_bytes'] / 1e9:.2f} GB"
        figures += [
            against(f"stall, {size}", "s", took["checkpoint"], "memcpy", took["memcpy"], 1.1),
            against(f"stall, {size}, overlapped", "s", took["overlapped"], "memcpy", took["memcpy"], 0.2),
            against(f"stall, {size}", "s", took["checkpoint"], "torch.save", took["torch.save"], 0.2),
            Figure(name=f"peak extra memory, {dtype}", unit="of the state", rounds=[memory], at_most=1.2),
        ]
    return figures


def against(
    name: str, unit: str, rounds: list[float], other: str, theirs: list[float], at_most: float | None
) -> Figure:
    """Make a figure with a baseline; `at_most` None: no target."""
    return Figure(
        name=f"{name} / {other}", unit=unit, rounds=rounds, baseline_name=other, baseline=theirs, at_most=at_most
    )
