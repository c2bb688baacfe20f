"""Run a real worker for each machine of a fake provider: from the start of its container to the end of the machine."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from demo.failure import DemoError
from demo.processes import ROOT, kill_group, kill_processes, own_environment
from functions.fleet.drivers.loopback import install_gpus
from functions.fleet.records import Offer

PROGRAM = (sys.executable, "-m", "gpu_client.agent")


@dataclass(frozen=True)
class Container:
    """Container that a provider runs now. `environment`: exactly what the create call asked for."""

    token: str
    host: str
    environment: Mapping[str, str]


class HostedAgents:
    """The processes on the machines of the fake providers. Each machine has a home in `directory` and a log."""

    def __init__(self, directory: Path, logs: Path, offer: Offer, program: Sequence[str] = PROGRAM) -> None:
        """offer: hardware that the machines pretend to have."""
        self._directory, self._logs = directory, logs
        self._offer, self._program = offer, program
        self._started: dict[str, tuple[Container, subprocess.Popen[bytes]]] = {}
        self._lost: set[str] = set()

    def sync(self, running: Sequence[Container]) -> None:
        """Start the agents of new containers, and kill those of containers that run no longer."""
        tokens = {one.token for one in running}
        for one in running:
            if one.token not in self._started and one.token not in self._lost:
                self._start(one)
        for token in [token for token in self._started if token not in tokens]:
            container, process = self._started.pop(token)
            if process.poll() is None:
                kill_group(process.pid, container.host, self._log(container.host))
            process.wait()

    def lose(self, token: str) -> int:
        """SIGKILL everything on a machine for good; return the number of processes that ended."""
        container, process = self._started.pop(token, (None, None))
        if container is None or process is None or process.poll() is not None:
            raise DemoError(f"machine {token} left before it could be killed")
        self._lost.add(token)
        killed = kill_group(process.pid, container.host, self._log(container.host))
        process.wait()
        return killed

    def processes(self) -> list[psutil.Process]:
        """Return the processes on all machines: each has a home in the directory in its environment."""
        return processes_below(self._directory)

    def end(self) -> None:
        """Kill what still runs."""
        kill_processes(self.processes())

    def _start(self, container: Container) -> None:
        home = self._directory / container.token
        home.mkdir(parents=True)
        programs = install_gpus(home, self._offer)
        with self._log(container.host).open("ab") as log:
            process = subprocess.Popen(
                self._program,
                cwd=home,
                env={
                    **own_environment(
                        {name: value for name, value in os.environ.items() if name in ("LANG", "OPENBLAS_CORETYPE")}
                    ),
                    "HOME": str(home),
                    "PATH": os.pathsep.join([str(programs), os.environ.get("PATH", os.defpath)]),
                    "PYTHONPATH": str(ROOT),
                    "TMPDIR": tempfile.gettempdir(),
                    **container.environment,
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started[container.token] = container, process

    def _log(self, host: str) -> Path:
        return self._logs / f"{host.replace(' ', '-')}.log"


def processes_below(directory: Path) -> list[psutil.Process]:
    """Return the processes whose home lies in a directory."""
    found = []
    for process in psutil.process_iter():
        try:
            if Path(process.environ().get("HOME", "/")).is_relative_to(directory):
                found.append(process)
        except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return found
