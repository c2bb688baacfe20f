"""Wirehead 0.9.3 and pymongo from the index, on the stand-in for MongoDB: the ring's rival.

They are installed into `.wirehead`, beside the environment that has torch and numpy, which they use.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ROOT / ".wirehead"
"""Ignored by git."""
WANTED = Path(__file__).with_name("wirehead.txt")
CAP = 4


def install(packages: Path = PACKAGES) -> Path:
    """Install the packages once; raises RuntimeError without the index."""
    installed = packages / "installed.txt"
    if installed.exists() and installed.read_text() == WANTED.read_text():
        return packages
    # Not by its own dependencies: it would bring another torch.
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--upgrade",
            "--target",
            packages,
            "-r",
            WANTED,
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"Wirehead could not be installed: {done.stderr.strip()[-500:]}")
    # Last: what was interrupted before is begun anew.
    installed.write_text(WANTED.read_text())
    return packages


class Rival:
    """The rival's two processes. One command at a time, see `rival_process.py`."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process, self._log = process, log

    def __call__(self, name: str, *arguments: Any) -> Any:
        """Run a command and return its answer; raises RuntimeError with the end of the log."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([name, *arguments]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"Wirehead ended at {name!r}: {self._log.read_text()[-1000:]}")
        return json.loads(line)


@contextlib.contextmanager
def running(scratch: Path) -> Iterator[Rival]:
    """Run the rival with a log in `scratch`."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(install())))}
    log, config = scratch / "wirehead.log", scratch / "wirehead.yaml"
    with log.open("w") as errors, contextlib.ExitStack() as processes:
        standin = _begun("mongo_standin", [], environ, errors, processes)
        assert standin.stdout is not None
        port = int(standin.stdout.readline())
        names = {f"{kind.upper()}_COLLECTION": kind for kind in ("write", "read", "temp", "counter")}
        settings = {"MONGOHOST": "127.0.0.1", "PORT": port, "DBNAME": "bench", "SWAP_CAP": CAP, "CHUNKSIZE": 10}
        config.write_text(yaml.safe_dump({**settings, "SAMPLE": ["data", "label"], **names}))
        yield Rival(_begun("rival_process", [str(config)], environ, errors, processes), log)


def _begun(
    module: str, arguments: list[str], environ: dict[str, str], errors: Any, processes: contextlib.ExitStack
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", f"bench.ring.wirehead.{module}", *arguments]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environ, cwd=ROOT
    )
    processes.callback(process.__exit__, None, None, None)
    processes.callback(process.kill)
    return process
