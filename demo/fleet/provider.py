"""The provider of the demo: its market, the processes that are its machines, its meter."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from demo.failure import DemoError
from demo.processes import kill_group, kill_processes
from functions.fleet.drivers.loopback import LoopbackDriver, LoopbackFaults, LoopbackMarket
from functions.fleet.records import Offer

DIRECTORIES = "baton-machines-*"
"""Directory of the provider below the temporary directory of a control plane that keeps nothing."""


@dataclass(frozen=True)
class Bill:
    """State of a machine at its provider, at a time of the fleets' clock."""

    token: str
    host: str
    pid: int
    ended: bool
    charged_usd: float


class LocalProvider:
    """The provider `loopback` behind the local control plane. A context manager that keeps the logs of its machines."""

    def __init__(self, scratch: Path, logs: Path) -> None:
        (self._directory,) = scratch.glob(DIRECTORIES)
        self._logs = logs
        self._driver = LoopbackDriver(self._directory, now=time.time)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Copy the logs. A control plane that has ended by itself has left its machines running: kill them."""
        kill_processes(self.processes())
        for machine in self._driver.machines():
            shutil.copy(self._log(machine.handle), self._logs / f"{machine.host}.log")

    def sell(self, offers: Sequence[Offer], *, lost_answers: int) -> None:
        """Offer machines; make as many first creates take effect without an answer as `lost_answers` says."""
        LoopbackMarket(offers=list(offers), faults=LoopbackFaults(lost_answers=lost_answers)).save(self._directory)

    def bills(self, at: int) -> list[Bill]:
        """Return what the provider knows about each machine that it ever made, oldest first."""
        return [
            Bill(one.token, one.host, one.pid, one.ended_at is not None, one.charged_usd(at))
            for one in self._driver.machines()
        ]

    def listed(self) -> int:
        """Return the number of machines on the provider's list."""
        return len(self._driver.inventory("", 0).sightings)

    def processes(self) -> list[psutil.Process]:
        """Return the processes on all machines: each has a home of the provider in its environment."""
        found = []
        for process in psutil.process_iter():
            try:
                if Path(process.environ().get("HOME", "/")).is_relative_to(self._directory):
                    found.append(process)
            except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
        return found

    def lose_host(self, token: str) -> int:
        """SIGKILL everything on a machine; returns the number of processes that ended."""
        machine = next((one for one in self._driver.machines() if one.token == token), None)
        if machine is None or not self._driver.runs(machine):
            raise DemoError(f"machine {token} left before it could be killed")
        return kill_group(machine.pid, machine.host, self._log(machine.handle))

    def _log(self, handle: str) -> Path:
        return self._directory / "machines" / handle / "output.log"
