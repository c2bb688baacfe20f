"""Training processes of their own, forked from a server that has imported what they need."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import training_scripts

from gpu_client.training.checkpoint import checkpoint_directory
from tests.kits.network.ports import free_port
from tests.kits.runner.fork_server import fork_context

forkserver = fork_context("tests.e2e.training.preloaded")
HANG_S = 600.0
"""Time after which a process hangs, also on a loaded machine."""


class Run:
    """One training process, without Baton, in a process group of its own."""

    def __init__(self, script: str, output: Path, params: Mapping[str, Any] | None = None, **environment: str) -> None:
        output.mkdir(parents=True, exist_ok=True)
        number = len(list(output.parent.glob(f"{output.name}-*.log")))
        self.log = output.parent / f"{output.name}-{number}.log"
        self.log.touch()
        parameters = output.parent / f"{output.name}-params.json"
        parameters.write_text(json.dumps(dict(params or {})))
        variables = {"BATON_OUTPUT_DIR": str(output), "BATON_PARAMS": str(parameters), **environment}
        self._process = forkserver.Process(target=training_scripts.run, args=(script, variables, str(self.log)))
        self._process.start()

    @property
    def running(self) -> bool:
        """Return whether the process has not ended."""
        return self._process.exitcode is None

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds; fail if the process ends before."""
        while not condition():
            assert self.running, self.finish()
            time.sleep(0.002)

    def signal(self, number: int) -> None:
        """Send a signal to every process of the run, as a host does."""
        assert self._process.pid is not None
        os.killpg(self._process.pid, number)

    def kill(self) -> bool:
        """Send SIGKILL and wait; False if it had come to its end, and well, in the moment before."""
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self._process.join(HANG_S)
        self.finish(0 if self._process.exitcode == 0 else -signal.SIGKILL)
        return self._process.exitcode != 0

    def finish(self, code: int = 0) -> str:
        """Wait for the end; returns what was printed."""
        self._process.join(HANG_S)
        printed = self.log.read_text()
        if self.running:
            self.signal(signal.SIGKILL)
        assert self._process.exitcode == code, printed
        return printed


def run_ranks(
    script: str, output: Path, count: int = 2, environment: Mapping[str, str] = MappingProxyType({}), **params: Any
) -> list[str]:
    """Run a script in processes that know each other, to its end; returns what each printed."""
    together = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "ACCELERATE_USE_CPU": "1"}
    together["MASTER_PORT"] = str(free_port())
    ranks = [
        Run(script, output, params, RANK=rank, LOCAL_RANK=rank, **together, **environment)
        for rank in map(str, range(count))
    ]
    return [rank.finish() for rank in ranks]


def only_complete(output: Path) -> list[int]:
    """The steps of all checkpoints; fails if one that is visible is not whole."""
    return sorted(checkpoint_directory.verify(path).step for path in output.glob("checkpoint-*"))


def same_bytes(one: Path, other: Path, name: str) -> bool:
    """Return whether the file has the same bytes in both directories."""
    return (one / name).read_bytes() == (other / name).read_bytes()


def flat(value: Any) -> Any:
    """A nested state with its tensors as bytes, for comparison bit for bit."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.numpy().tobytes()
    if isinstance(value, dict):
        return {name: flat(item) for name, item in value.items()}
    return [flat(item) for item in value] if isinstance(value, list | tuple) else value
