"""The driver of SSH hosts, over a real sshd; a shell runs in place of the agent."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from pydantic import SecretStr

from baton.contract.fleets.providers import SshAccount, SshHost
from functions.fleet.drivers.ssh.driver import SshDriver
from tests.kits.clock import Clock
from tests.kits.network.ssh_server import ServedHost, SshServer
from tests.kits.waiting import alive


class SshDriven:
    """Hosts of one account, each with a price of its own; the first is the cheapest."""

    charges = True

    def __init__(self, directory: Path, count: int = 3, agent: str = "echo started; exec sleep 600") -> None:
        self.clock = Clock(1_700_000_000)
        self.server = SshServer(directory, count, agent)
        self.account = SshAccount(
            private_key=SecretStr(self.server.private_key),
            hosts=[self.describe(at, host) for at, host in enumerate(self.server.hosts)],
        )
        self.driver = SshDriver(self.account, now=self.clock)

    def describe(self, at: int, host: ServedHost) -> SshHost:
        return SshHost(
            name=f"desk-{at}",
            address="127.0.0.1",
            port=host.port,
            user=self.server.user,
            host_key=self.server.host_key,
            python=host.python,
            usd_per_hour=0.1 + at / 100,
        )

    def now(self) -> int:
        return int(self.clock())

    def advance(self, seconds: int) -> None:
        self.clock.advance(seconds)

    def inject(self, fault: str) -> None:
        cheapest, *_, dearest = self.server.hosts
        match fault:
            case "lost_answers":
                cheapest.inject("create", "lost")
            case "snatched":
                cheapest.inject("create", "snatched")
            case "incomplete":
                dearest.inject("state", "dropped")
            case "unreadable":
                for host in self.server.hosts:
                    host.inject("state", "dropped")
            case "ignored_destroys":
                cheapest.inject("destroy", "ignored")

    def existing(self) -> list[str]:
        return [token for token, pid in self._machines() if alive(pid)]

    def end(self, token: str) -> None:
        os.kill(dict(self._machines())[token], signal.SIGKILL)

    def close(self) -> None:
        for host, place in self._places():
            self.driver.destroy(f"{host.name}:{json.loads((place / 'machine.json').read_text())['id']}")
        self.server.stop()

    def _machines(self) -> list[tuple[str, int]]:
        """Return token and process of each machine, from the files of the hosts."""
        return [
            (json.loads((place / "machine.json").read_text())["token"], json.loads(process.read_text())["pid"])
            for _, place in self._places()
            if (process := place / "process.json").exists()
        ]

    def _places(self) -> list[tuple[SshHost, Path]]:
        """Return the hosts that have a machine, with its directory."""
        places = [host.home / ".baton/machine" for host in self.server.hosts]
        return [(host, place) for host, place in zip(self.account.hosts, places, strict=True) if place.exists()]
