"""The providers of the demo: processes of this computer, a fake Vast.ai and a fake SaladCloud, each with its meter."""

from __future__ import annotations

import shutil
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from baton.contract.fleets.providers import SaladAccount, VastAccount
from demo.fleet.agents import Container, HostedAgents, processes_below
from demo.fleet.market import GPU, local_offers, salad_classes, vast_asks
from demo.processes import kill_processes
from fakes.salad.api import JWKS, FakeSalad
from fakes.salad.imds import FakeImds
from fakes.salad.signing_key import WorkloadKey
from fakes.vast.provider import KEY, FakeVast
from functions.fleet.drivers.loopback import LoopbackDriver, LoopbackMarket

DIRECTORIES = "baton-machines-*"
"""Directory of the loopback provider below the temporary directory of a control plane that keeps nothing."""
SYNC_S = 0.1
LATE_S = 600.0
"""Time after which Vast.ai lists the machine whose answer was lost."""
VISIBLE_AFTER_S = 5.0
CREATE = "PUT /api/v0/asks/"


@dataclass(frozen=True)
class Bill:
    """State of a machine at its provider, at a time of the fleets' clock."""

    token: str
    host: str
    ended: bool
    charged_usd: float


class FleetTime:
    """Clock of the fake providers, which runs as fast as the clock of the fleets."""

    def __init__(self, speed: int) -> None:
        self._speed = speed
        self._real = self._fleet = time.time()

    def align(self, at: int) -> None:
        """Take over the time of the fleets."""
        self._real, self._fleet = time.time(), float(at)

    def __call__(self) -> float:
        """Return the time in seconds."""
        return self._fleet + (time.time() - self._real) * self._speed


class DemoProviders:
    """All three providers. A context manager that keeps the logs of the machines and leaves no process."""

    def __init__(self, scratch: Path, logs: Path, speed: int) -> None:
        (self._directory,) = scratch.glob(DIRECTORIES)
        self._logs = logs
        self.clock = FleetTime(speed)
        self._local = LoopbackDriver(self._directory, now=time.time)
        self.vast = FakeVast(self.clock, vast_asks())
        self.salad = FakeSalad(self.clock, salad_classes())
        self._key = WorkloadKey()
        self.salad.keys.append(self._key.jwk)
        self._metadata: dict[str, FakeImds] = {}
        """Metadata services of Salad's containers, by group."""
        self._agents = HostedAgents(scratch / "hosts", logs, GPU)
        self._stack = ExitStack()
        self._ends = threading.Event()
        self._failure: BaseException | None = None

    def __enter__(self) -> Self:
        self._stack.enter_context(self.vast)
        self._stack.enter_context(self.salad)
        LoopbackMarket(offers=local_offers()).save(self._directory)
        self._thread = threading.Thread(target=self._host, name="hosts")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Copy the logs. A control plane that has ended by itself has left its machines running: kill them."""
        self._ends.set()
        self._thread.join()
        kill_processes(self.processes())
        for machine in self._local.machines():
            log = self._directory / "machines" / machine.handle / "output.log"
            shutil.copy(log, self._logs / f"{machine.host}.log")
        self._stack.close()
        if self._failure is not None:
            raise self._failure

    def vast_account(self) -> VastAccount:
        """Return the account of the fake Vast.ai."""
        return VastAccount.model_validate({"api_key": KEY, "address": self.vast.url})

    def salad_account(self) -> SaladAccount:
        """Return the account of the fake SaladCloud."""
        return SaladAccount.model_validate(
            {
                "api_key": self.salad.api_key,
                "organization": self.salad.organization,
                "project": self.salad.project,
                "address": self.salad.address,
                "identity_keys": self.salad.url + JWKS,
            }
        )

    def lose_next_answer(self) -> None:
        """Let the next create at Vast.ai take effect without an answer; Vast.ai lists its machine late."""
        self.vast.visible_after_s = LATE_S
        self.vast.inject("lost", CREATE)

    def lose_host(self, token: str) -> int:
        """Take a host of Vast.ai away: SIGKILL to all its processes; return their number.

        The other host of Vast.ai is rented by somebody else at the same moment.
        """
        with self.vast.lock:
            killed = self._agents.lose(token)
            lost = next(one for one in self.vast.instances if one.body["label"] == token and not one.destroyed)
            self.vast.set_status(lost.handle, "offline")
            for ask in self.vast.asks:
                ask.rented = True
        return killed

    def bills(self, at: int) -> list[Bill]:
        """Return what the providers know about each machine that they ever made, by provider and age."""
        local = [
            Bill(one.token, one.host, one.ended_at is not None, one.charged_usd(at)) for one in self._local.machines()
        ]
        with self.vast.lock:
            vast = [
                Bill(one.body["label"], _vast_host(one.ask.machine_id), one.destroyed, self.vast.meter.usd(one.handle))
                for one in self.vast.instances
            ]
        with self.salad.lock:
            self.salad.cloud.settle()
            names = dict.fromkeys(one.handle for one in self.salad.meter.spans)
            salad = [
                Bill(name, "salad node", name not in self.salad.cloud.groups, self.salad.meter.usd(name))
                for name in names
            ]
        return [*local, *vast, *salad]

    def listed(self) -> int:
        """Return the number of machines that exist at the providers."""
        with self.vast.lock, self.salad.lock:
            self.salad.cloud.settle()
            fakes = len(self.vast.labels()) + len(self.salad.cloud.groups)
        return fakes + len(self._local.inventory("", 0).sightings)

    def processes(self) -> list[psutil.Process]:
        """Return the processes on all machines."""
        return [*processes_below(self._directory), *self._agents.processes()]

    def _host(self) -> None:
        """Run the agents of the fake providers' containers until the demo ends."""
        try:
            while not self._ends.wait(SYNC_S):
                with self.vast.lock:
                    self._agents.sync(self._containers())
                    if not any(fault.count for fault in self.vast.faults):
                        # Only the machine whose answer was lost is listed late.
                        self.vast.visible_after_s = VISIBLE_AFTER_S
        except BaseException as error:  # noqa: BLE001 - raised again at the end of the demo
            self._failure = error

    def _containers(self) -> list[Container]:
        now = self.clock()
        vast = [
            Container(one.body["label"], _vast_host(one.ask.machine_id), one.body["env"])
            for one in self.vast.instances
            if not one.destroyed and one.status(now) == "running"
        ]
        with self.salad.lock:
            self.salad.cloud.settle()
            salad = [
                Container(name, "salad node", self._salad_environment(name))
                for name, group in self.salad.cloud.groups.items()
                if any(one.state == "running" for one in group.instances)
            ]
        return [*vast, *salad]

    def _salad_environment(self, name: str) -> dict[str, str]:
        """Return the environment of a container, with the address of the metadata service that proves its identity."""
        if name not in self._metadata:
            service = FakeImds(self.salad, name, sign=self._key.sign, key_id=self._key.key_id)
            service.now = time.time  # Identities are compared with the server's clock, not with that of the fleets.
            self._metadata[name] = service
            self._stack.enter_context(service)
        return {**self.salad.environment(name), "SALAD_IMDS_URL": self._metadata[name].url}


def _vast_host(machine_id: int) -> str:
    return f"vast host {machine_id}"
