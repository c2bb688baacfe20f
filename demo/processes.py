"""Start, kill and end the demo's processes. Each process leads a session of its own; none outlives the demo."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

import psutil

from demo.failure import DemoError, Interrupts
from functions.local.emulator import PYTHON_VARIABLE

ROOT = Path(__file__).resolve().parent.parent
STACK_NAME = "stack"
STACK_START_S = 90.0
STACK_STOP_S = 20.0
STOP_S = 3.0
GONE_WITHIN_S = 10.0
"""The guardian of a training process takes a moment to notice that the agent is dead, and to kill the training."""
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
        """Return the process and all its descendants, whatever their group or session."""
        return _family(self._process.pid)

    def kill_group(self) -> int:
        """SIGKILL the process group, as if the machine were lost; returns the number of processes that ended.

        Raises DemoError if the process had ended before, or if a descendant outlives it.
        """
        if self.exit_code is not None:
            raise DemoError(f"{self.name} left before it could be killed, with exit code {self.exit_code}", self.log)
        killed = kill_group(self._process.pid, self.name, self.log)
        self._process.wait()
        return killed

    def wait(self, timeout_s: float) -> int:
        """Wait for the exit code. Raises DemoError if the process still runs after `timeout_s`."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise DemoError(f"{self.name} did not end within {timeout_s:.0f} s", self.log) from None

    def end(self, grace_s: float) -> None:
        """Send SIGTERM; after `grace_s` SIGKILL. No descendant runs afterwards."""
        family = self.family()
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(grace_s)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        kill_processes(_wait_gone(family, 2.0))


class ManagedProcesses:
    """All processes of the demo; a context manager that ends them, the last started first."""

    def __init__(self, logs: Path, scratch: Path, interrupts: Interrupts) -> None:
        self.logs = logs
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
        """Make a DemoError of a failed API call: if the control plane has ended, that is the cause."""
        for child, _ in self._children:
            if child.name == STACK_NAME and child.exit_code is not None:
                return DemoError(f"the control plane ended by itself with exit code {child.exit_code}", child.log)
        return DemoError(f"a call to the control plane failed: {error}", self.logs / f"{STACK_NAME}.log")

    def start_stack(self, *more: str) -> tuple[str, str]:
        """Start the local control plane, which keeps nothing; returns its URL and admin key when it is ready.

        more: further options.
        """
        output = self._scratch / "stack.json"
        options = ["--forget", "--port", "0", "--json", "--sweep-interval-s", "5", *more]
        child = self.start(STACK_NAME, "-m", "functions.local", *options, output=output, grace_s=STACK_STOP_S)
        deadline = time.monotonic() + STACK_START_S
        while not (line := output.read_text(encoding="utf-8")).endswith("\n"):
            if child.exit_code is not None:
                raise DemoError(f"the control plane ended at once with exit code {child.exit_code}", child.log)
            if time.monotonic() > deadline:
                raise DemoError(f"the control plane was not ready within {STACK_START_S:.0f} s", child.log)
            time.sleep(POLL_S)
        answer = json.loads(line)
        return answer["url"], answer["keys"]["admin"]

    def start(
        self,
        name: str,
        *arguments: object,
        settings: Mapping[str, str] = MappingProxyType({}),
        grace_s: float = STOP_S,
        output: Path | None = None,
    ) -> Child:
        """Start Python with `arguments` and the variables in `settings`. `output`: file of its standard output."""
        # Temporary files of a killed process are deleted with the demo's own.
        environment = own_environment(os.environ) | {"TMPDIR": str(self._scratch)} | dict(settings)
        log = self.logs / f"{name}.log"
        # Held: an interruption before `append` would leave the new process running.
        with self._interrupts.held(), log.open("wb") as errors, (output or log).open("ab") as standard_output:
            process = subprocess.Popen(
                [sys.executable, *map(str, arguments)],
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
    """Remove the variables that would lead a process to another control plane, cloud or machine."""
    return {
        name: value
        for name, value in inherited.items()
        if name == PYTHON_VARIABLE or not name.startswith(("BATON_", "AWS_", "SALAD_", "PYTHON"))
    }


def kill_group(leader: int, name: str, log: Path) -> int:
    """SIGKILL a process group, as if its machine were lost; returns the number of processes that ended.

    Raises DemoError if a descendant of the leader outlives the kill.
    """
    family = _family(leader)
    os.killpg(leader, signal.SIGKILL)
    survivors = _wait_gone(family, GONE_WITHIN_S)
    if survivors:
        kill_processes(survivors)
        raise DemoError(f"{len(survivors)} processes of {name} outlived its SIGKILL", log)
    return len(family)


def kill_processes(processes: Sequence[psutil.Process]) -> None:
    """SIGKILL processes and wait for their ends."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    _wait_gone(processes, 5.0)


def _family(leader: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(leader)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _wait_gone(processes: Sequence[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Return the processes that still run after `timeout_s`. A zombie does not run."""
    deadline = time.monotonic() + timeout_s
    while (alive := [process for process in processes if _runs(process)]) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return alive


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
