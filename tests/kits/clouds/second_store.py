"""Second S3 server that shares no code with the first: rclone's `serve s3` on loopback, one pair of credentials."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, Self

from baton.contract.names import BUCKETS
from functions.storage.clients import s3_client
from functions.storage.s3.objects import S3ObjectStore
from tests.kits.clouds.emulator import unique
from tests.kits.clouds.store_sets import Cloud, memory_cloud
from tests.kits.network.ports import free_port

RCLONE = Path(sysconfig.get_path("scripts"), "rclone")
START_TIMEOUT_S = 90
LEASHED = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execv(sys.argv[1], sys.argv[1:])"
"""Becomes the program of its arguments, which gets a SIGTERM when the test run dies, however it dies."""
ACCESS_KEY_ID, SECRET_ACCESS_KEY = "second-store-key", "second-store-secret-access-key"


class SecondStore:
    """Server that runs from construction to `close`, at most as long as the test run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        port = free_port()
        self.endpoint_url = f"http://127.0.0.1:{port}"
        folder.mkdir(exist_ok=True)
        self._log_path = folder.parent / f"{folder.name}.log"
        with self._log_path.open("wb") as log:
            self._process = self._started(port, log)
        try:
            self._wait()
        except BaseException:
            self.close()
            raise
        self.client = self.client_with(SECRET_ACCESS_KEY)

    def _started(self, port: int, log: BinaryIO) -> subprocess.Popen[bytes]:
        serve = [str(RCLONE), "serve", "s3", ":memory:", "--addr", f"127.0.0.1:{port}"]
        return subprocess.Popen(
            [sys.executable, "-c", LEASHED, *serve],
            env={
                # Not as an argument: those can be read by everybody on the machine. A list of one, as CSV.
                "RCLONE_AUTH_KEY": f'"{ACCESS_KEY_ID},{SECRET_ACCESS_KEY}"',
                "RCLONE_CONFIG": os.devnull,
                "HOME": str(self.folder.parent),
            },
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            process_group=0,
        )

    def client_with(self, secret_access_key: str) -> Any:
        """Make a client as a deployment does."""
        return s3_client(
            self.endpoint_url,
            region="auto",
            aws_access_key_id=ACCESS_KEY_ID,
            aws_secret_access_key=secret_access_key,
        )

    def cloud(self) -> Cloud:
        """Make a set of stores: objects in fresh buckets here, all others in memory."""
        buckets = {name: unique(name) for name in BUCKETS}
        for bucket in buckets.values():
            self.client.create_bucket(Bucket=bucket)
        objects = S3ObjectStore(self.client, self.client, buckets)
        return replace(memory_cloud(), kind="rclone", objects=objects, s3=self.client, buckets=buckets)

    def _wait(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                urllib.request.urlopen(self.endpoint_url, timeout=2).close()
            except urllib.error.HTTPError as error:
                error.close()
                return
            except OSError:
                assert self._process.poll() is None, self._log_path.read_text()
                assert time.monotonic() < deadline, "rclone did not answer"
                time.sleep(0.05)
            else:
                return

    def close(self) -> None:
        """Stop the server."""
        self._process.terminate()
        try:
            self._process.wait(60)
        finally:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()
