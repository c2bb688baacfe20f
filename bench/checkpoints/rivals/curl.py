"""Send files over TLS with the program `curl`, that is with libcurl."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from bench.checkpoints.timing import Cost

CURL = shutil.which("curl")


def put(url: str, files: Sequence[Path], certificate: Path) -> Cost:
    """Send files one after the other over one connection; returns wall and CPU time. Raises RuntimeError."""
    assert CURL is not None
    command = [CURL, "--silent", "--show-error", "--fail", "--disable", "--cacert", str(certificate), "--http1.1"]
    for file in files:
        command += ["--header", "Expect:", "--upload-file", str(file), f"{url}/{file.name}"]
    began = time.perf_counter()
    process = os.posix_spawn(CURL, command, {})
    _, status, used = os.wait4(process, 0)
    wall_s = time.perf_counter() - began
    if status:
        raise RuntimeError(f"curl ended with {os.waitstatus_to_exitcode(status)}")
    return Cost(wall_s, used.ru_utime + used.ru_stime)
