"""Kelpie's upload and download: `kelpie/mirror.mjs` as a process on the environment's Node."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bench.checkpoints.timing import Cost
from cdk import NODE
from cdk.tool.npm import NpmError, install_locked

SOURCE = Path(__file__).with_name("kelpie")
TOOLS = Path(__file__).parents[3] / ".kelpie"
"""The SDK is installed here, as the lock file says; ignored by git."""
_LOCK = "package-lock.json"


def install(tools: Path = TOOLS) -> Path:
    """Install the program beside its packages once; raises RuntimeError without npm's registry."""
    lock, installed = (SOURCE / _LOCK).read_text(), tools / "installed-lock.json"
    tools.mkdir(exist_ok=True)
    program = Path(shutil.copy(SOURCE / "mirror.mjs", tools))
    if installed.exists() and installed.read_text() == lock:
        return program
    for name in ("package.json", _LOCK):
        shutil.copy(SOURCE / name, tools)
    try:
        install_locked(tools)
    except NpmError as error:
        raise RuntimeError(f"the SDK of the mirror could not be installed from npm: {error}") from error
    # Last: what was interrupted before is begun anew.
    installed.write_text(lock)
    return program


class KelpieProcess:
    """Process of the mirror while entered; its start is not counted. One command at a time."""

    def __init__(self, endpoint: str, log: Path) -> None:
        """Start the process; `log` receives its standard error."""
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [str(NODE), str(install()), endpoint],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        try:
            self._heard()
        except BaseException:
            self._process.communicate()
            raise

    def run(self, act: str, directory: Path, bucket: str, prefix: str) -> Cost:
        """Run `save` or `fetch`; returns the process's own wall and CPU time. Raises RuntimeError with its message."""
        assert self._process.stdin is not None
        command = {"act": act, "directory": str(directory), "bucket": bucket, "prefix": prefix}
        self._process.stdin.write(f"{json.dumps(command)}\n")
        self._process.stdin.flush()
        answer = self._heard()
        return Cost(answer["wall_s"], answer["cpu_s"])

    def _heard(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": self._log.read_text(errors="replace")[-2000:]}
        if "error" in answer:
            raise RuntimeError(f"the mirror failed: {answer['error']}")
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the standard input, which ends the process."""
        self._process.communicate()


class MirrorRival:
    """Store each file as one object: parts of 10 MiB, 8 in flight per file, up to 20 files at once; stream back."""

    def __init__(self, process: KelpieProcess, bucket: str) -> None:
        self._process = process
        self._bucket = bucket

    def save(self, directory: Path, name: str) -> Cost:
        return self._process.run("save", directory, self._bucket, f"{name}/")

    def fetch(self, name: str, directory: Path) -> Cost:
        """Restore a usable directory."""
        return self._process.run("fetch", directory, self._bucket, f"{name}/")
