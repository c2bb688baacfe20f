"""Subjects of the comparison on one server: ours, the original's zip, Kelpie's mirror."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from bench.checkpoints.plane import Plane
from bench.checkpoints.rivals.kelpie_mirror import KelpieProcess, MirrorRival
from bench.checkpoints.rivals.zip_rival import ZipRival
from bench.sink.sink_process import running_sink
from functions.storage.clients import s3_client
from gpu_client.checkpoints.restore.checkpoint_restore import restore
from gpu_client.checkpoints.save.checkpoint_commit import Committed, commit_checkpoint
from gpu_client.checkpoints.save.chunk_index import ChunkIndex
from gpu_client.transport.transfer.manager import Transfer

WORKERS = 8
_WARM_BYTES = 32 * 2**20


def store_client(endpoint: str, certificate: Path | None = None) -> Any:
    """Make a client for the sink, which accepts any credentials; `certificate`: the sink's, for TLS."""
    keys = {"aws_access_key_id": "bench", "aws_secret_access_key": "bench"}
    trusted = {} if certificate is None else {"verify": str(certificate)}
    return s3_client(endpoint, region="us-east-1", **keys, **trusted)


class Bench:
    """Server, scratch folders and states below `scratch`."""

    def __init__(self, scratch: Path, *, quick: bool) -> None:
        self.scratch = scratch
        self.quick = quick
        self._buckets = 0
        self._stack = contextlib.ExitStack()
        self._kelpie: KelpieProcess | None = None

    def __enter__(self) -> Self:
        self.url = self._stack.enter_context(running_sink(self.scratch / "sink"))
        self._client = store_client(self.url)
        self._stack.callback(self._client.close)
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def states(self, kind: str) -> Path:
        """Make the directories of a kind on first use, in a process of its own."""
        target = self.scratch / kind
        if not target.exists():
            command = [sys.executable, "-m", "bench.checkpoints.states", kind, str(target)]
            subprocess.run([*command, *(["--quick"] if self.quick else [])], check=True)
        return target

    def bucket(self) -> str:
        """Create a bucket."""
        self._buckets += 1
        name = f"bench-{self._buckets}"
        self._client.create_bucket(Bucket=name)
        return name

    def ours(self, transfer: Transfer | None = None) -> Ours:
        """Make a worker without local state, with a new transfer manager unless one is given."""
        return Ours(Plane(self.url, self.bucket()), transfer or Transfer(workers=WORKERS), self.scratch)

    def zip(self) -> ZipRival:
        return ZipRival(self._client, self.bucket(), self.scratch)

    def mirror(self) -> MirrorRival:
        if self._kelpie is None:
            self._kelpie = self._stack.enter_context(KelpieProcess(self.url, self.scratch / "kelpie.log"))
        return MirrorRival(self._kelpie, self.bucket())

    def warm_up(self) -> None:
        """Run a little of each measured action, which loads and compiles its code."""
        with self.folder() as source:
            (source / "weights").write_bytes(os.urandom(_WARM_BYTES))
            (source / "step").write_bytes(b"1")
            with self.round() as (worker, mirroring, zipping):
                worker.save(source, 1)
                mirroring.save(source, "warm")
                zipping.save(source, "warm")
                for number, fetch in enumerate(
                    (worker.fetch, lambda to: mirroring.fetch("warm", to), lambda to: zipping.fetch("warm", to))
                ):
                    fetch(source / f"fetched-{number}")

    @contextmanager
    def round(self) -> Iterator[tuple[Ours, MirrorRival, ZipRival]]:
        """Run all three against an empty server and empty the server afterwards."""
        worker = self.ours()
        try:
            yield worker, self.mirror(), self.zip()
        finally:
            worker.close()
            self.forget()

    def forget(self) -> None:
        """Delete the stored objects, which occupy memory."""
        for number in range(1, self._buckets + 1):
            bucket = f"bench-{number}"
            for page in self._client.get_paginator("list_objects_v2").paginate(Bucket=bucket):
                for entry in page.get("Contents", ()):
                    self._client.delete_object(Bucket=bucket, Key=entry["Key"])

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """Make an empty folder and delete the folder afterwards."""
        with tempfile.TemporaryDirectory(dir=self.scratch) as name:
            yield Path(name)


class Ours:
    """Save and restore as the agent does."""

    def __init__(self, plane: Plane, transfer: Transfer, scratch: Path) -> None:
        self.plane = plane
        self.known = ChunkIndex()
        self._transfer = transfer
        self._spool = scratch / "spool"

    def close(self) -> None:
        """Close the connections."""
        self._transfer.close()
        self.plane.close()

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
