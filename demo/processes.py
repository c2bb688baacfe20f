"""The demo's processes: the local stack and the workers. Each leads a session of its own and is never left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import psutil

from demo.failure import DemoError, Interrupts
from functions.local.emulator import PYTHON_VARIABLE

ROOT = Path(__file__).resolve().parent.parent
STACK_NAME = "the local stack"
STACK_LOG = "stack.log"
STACK_START_S = 90.0
STACK_STOP_S = 20.0
WORKER_STOP_S = 3.0
GONE_WITHIN_S = 10.0
"""The warden of a training process needs a moment to notice that its agent is dead, and to kill what it started."""
POLL_S = 0.05


class Child:
    """A subprocess with its descendants. Its standard error goes to `log`."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self.log = log
        self._process = process

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative when a signal ended it."""
        return self._process.poll()

    def family(self) -> list[psutil.Process]:
        """It and all its descendants, in whatever group or session they are."""
        try:
            leader = psutil.Process(self._process.pid)
            return [leader, *leader.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def kill_group(self) -> int:
        """SIGKILL its process group, as if the machine were gone; returns how many processes that ended.

        Raises DemoError if it has ended by itself, or if any process that it had started outlives it.
        """
        if self.exit_code is not None:
            raise DemoError(f"{self.name} left before it could be killed, with exit code {self.exit_code}", self.log)
        family = self.family()
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        survivors = _wait_gone(family, GONE_WITHIN_S)
        if survivors:
            _kill(survivors)
            raise DemoError(f"{len(survivors)} processes of {self.name} outlived its SIGKILL", self.log)
        return len(family)

    def wait(self, timeout_s: float) -> int:
        """Its exit code. Raises DemoError if it is still running after `timeout_s`."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise DemoError(f"{self.name} did not end within {timeout_s:.0f} s", self.log) from None

    def end(self, grace_s: float) -> None:
        """SIGTERM, a grace, then SIGKILL to it and all its descendants. Nothing of it runs afterwards."""
        family = self.family()
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(grace_s)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        _kill(_wait_gone(family, 2.0))


@dataclass(frozen=True)
class Stack:
    """The running control plane."""

    url: str
    admin_key: str


class Household:
    """All processes of the demo; a context manager that ends them, the last started first."""

    def __init__(self, logs: Path, scratch: Path, interrupts: Interrupts) -> None:
        self._logs = logs
        self._scratch = scratch
        self._interrupts = interrupts
        self._children: list[tuple[Child, float]] = []
        logs.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._interrupts.held():
            while self._children:
                child, grace_s = self._children.pop()
                child.end(grace_s)

    def explain(self, error: Exception) -> DemoError:
        """What an error of a call to the control plane really means."""
        for child, _ in self._children:
            if child.name == STACK_NAME and child.exit_code is not None:
                return DemoError(f"{child.name} ended by itself with exit code {child.exit_code}", child.log)
        return DemoError(f"the control plane did not do its part: {error}", self._logs / STACK_LOG)

    def start_stack(self) -> Stack:
        """Start the local control plane, which forgets everything at its end, and wait for its address."""
        said = self._scratch / "stack.json"
        command = ["-m", "functions.local", "--forget", "--port", "0", "--json", "--sweep-interval-s", "5"]
        child = self._start(STACK_NAME, command, log_name=STACK_LOG, output=said, grace_s=STACK_STOP_S)
        deadline = time.monotonic() + STACK_START_S
        while not (line := said.read_text(encoding="utf-8")).endswith("\n"):
            if child.exit_code is not None:
                raise DemoError(f"the local stack ended at once with exit code {child.exit_code}", child.log)
            if time.monotonic() > deadline:
                raise DemoError(f"the local stack did not come up within {STACK_START_S:.0f} s", child.log)
            time.sleep(POLL_S)
        answer: dict[str, Any] = json.loads(line)
        return Stack(answer["url"], answer["keys"]["admin"])

    def start_worker(self, name: str, settings: Mapping[str, str]) -> Child:
        """Start an agent with these `BATON_*` settings."""
        command = ["-m", "gpu_client.agent"]
        return self._start(name, command, settings, log_name=f"{name}.log", grace_s=WORKER_STOP_S)

    def start_program(self, name: str, module: str, *arguments: object, grace_s: float = WORKER_STOP_S) -> Child:
        """Start a module of the demo's own."""
        return self._start(name, ["-m", module, *map(str, arguments)], log_name=f"{name}.log", grace_s=grace_s)

    def _start(
        self,
        name: str,
        arguments: Sequence[str],
        settings: Mapping[str, str] = MappingProxyType({}),
        *,
        log_name: str,
        grace_s: float,
        output: Path | None = None,
    ) -> Child:
        # What a killed process leaves in its temporary directory goes with the demo's own.
        environment = own_environment(os.environ) | {"TMPDIR": str(self._scratch)} | dict(settings)
        log = self._logs / log_name
        # Held: a process that is started but not yet known could not be ended.
        with self._interrupts.held(), log.open("wb") as errors, (output or log).open("ab") as standard_output:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=standard_output,
                stderr=errors,
                start_new_session=True,
            )
            child = Child(name, process, log)
            self._children.append((child, grace_s))
        return child


def own_environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment without what would point a process at some other control plane, cloud or machine."""
    return {
        name: value
        for name, value in inherited.items()
        if name == PYTHON_VARIABLE or not name.startswith(("BATON_", "AWS_", "SALAD_", "PYTHON"))
    }


def _wait_gone(processes: Sequence[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Those that still run after `timeout_s`. A zombie is gone: it only waits for somebody to ask for its exit code."""
    deadline = time.monotonic() + timeout_s
    while (alive := [process for process in processes if _runs(process)]) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return alive


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    _wait_gone(processes, 5.0)
