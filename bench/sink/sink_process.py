"""Sink as a process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NAME = "bench/sink/sink.py (S3 on loopback, bytes moved by splice and sendfile, files in memory)"


@contextmanager
def running_sink(directory: Path, *, tls: Path | None = None) -> Iterator[str]:
    """Run a sink with its objects in the new folder `directory`; returns its URL."""
    directory.mkdir()
    command = [sys.executable, "-m", "bench.sink.sink", str(directory)]
    command += ["--tls", str(tls)] if tls is not None else []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            scheme = "http" if tls is None else "https"
            yield f"{scheme}://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.communicate()
