"""Hosts behind a real sshd: control plane, agents and trainings are processes; nothing was installed on the hosts."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from baton.contract.fleets.fleet import FleetSpec, MachineShell, MachineState, MachineView
from baton.contract.fleets.providers import SshAccount, SshHost
from baton.contract.jobs.job import AttemptEnd, JobState
from tests.kits.network.ssh_server import MISSING, SSHD, SshServer
from tests.kits.stack.stack import Stack, chain, clean_environment
from tests.kits.stack.workshop import Gate
from tests.kits.terminal import CTRL_C, Terminal
from tests.kits.waiting import alive, until

pytestmark = [pytest.mark.emulator, pytest.mark.processes, pytest.mark.skipif(SSHD is None, reason=MISSING)]

SPEED = 30
"""A minute of the fleets is two seconds: the 15 minutes of a boot leave a loaded computer time for ssh and an agent."""
PRICES = (0.0, 0.3)
AGENT = f'exec {shlex.quote(sys.executable)} "$@"'


class Desks:
    """Control plane and two hosts; the first one costs nothing, because its owner has paid for it."""

    def __init__(self, directory: Path) -> None:
        self.server = SshServer(directory, len(PRICES), AGENT)
        self.stack = Stack(fleet_clock_speed=SPEED, settings={"TMPDIR": str(directory)})
        self.client = self.stack.client
        hosts = [
            SshHost(
                name=f"desk-{at}",
                address="127.0.0.1",
                port=host.port,
                user=self.server.user,
                host_key=self.server.host_key,
                python=host.python,
                usd_per_hour=price,
            )
            for at, (host, price) in enumerate(zip(self.server.hosts, PRICES, strict=True))
        ]
        self.account = SshAccount(private_key=SecretStr(self.server.private_key), hosts=hosts)

    def apply(self, name: str, **more: int) -> None:
        document = {"name": name, "providers": ["ssh"], "queues": [name], "disk_gib": 1, "max_usd_per_hour": 1}
        document |= {"max": 2, "idle_timeout_s": 60, "budget": {"total_usd": 5}}
        self.client.put_fleet(FleetSpec.model_validate(document | more))

    def machine(self, name: str, state: MachineState) -> MachineView:
        """Wait for a machine in a state, with the time of `until`."""
        found: MachineView = until(
            lambda: next((one for one in self.client.fleet(name).machines if one.state is state), None),
            what=f"a machine in the state {state}",
        )
        return found

    def terminal(self, machine: str) -> Terminal:
        """Run `baton fleet ssh` in a terminal of 41 rows, with the key of the hosts as the user's own."""
        own = self.server.directory / "own"
        (own / "config").parent.mkdir(exist_ok=True)
        (own / "config").write_text(f"IdentityFile {self.server.directory / 'user'}\nUserKnownHostsFile {own}/known\n")
        # OpenSSH finds the user's files by the account, not by HOME.
        (own / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {own}/config "$@"\n')
        (own / "ssh").chmod(0o700)
        environment = {
            **clean_environment(),
            "PATH": f"{own}:{os.environ['PATH']}",
            "BATON_API_URL": self.stack.url,
            "BATON_API_KEY": self.stack.keys["submit"],
        }
        command = [sys.executable, "-m", "gpu_client.cli", "fleet", "ssh", machine]
        return Terminal(command, environment, rows=41, columns=133)

    def process(self, at: int) -> int:
        return int(json.loads((self.server.hosts[at].home / ".baton/machine/process.json").read_text())["pid"])

    def receipts(self, name: str) -> list[MachineView]:
        """Wait for the end of all machines; return them, oldest first. Nothing is left on the hosts."""
        until(lambda: not self.client.fleet(name).machines, what="the end of all machines")
        ended = sorted(
            self.client.ended_machines(name), key=lambda one: one.receipt.created_at or 0 if one.receipt else 0
        )
        assert {one.state for one in ended} == {MachineState.GONE}
        for host in self.server.hosts:
            assert not (host.home / ".baton/machine").exists() and not list(host.home.glob(".baton/ended/*/workspace"))
            for process in host.home.glob(".baton/ended/*/process.json"):
                assert not alive(json.loads(process.read_text())["pid"])
        return ended


@pytest.fixture(scope="module")
def desks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desks]:
    made = Desks(tmp_path_factory.mktemp("desks"))
    with made.stack:
        view = made.client.put_provider("ssh", made.account)
        assert (view.account, view.problems) == ("2 hosts", [])
        yield made
    made.server.stop()


def test_a_host_that_restarts_costs_the_job_no_step_and_the_next_host_has_a_bill(desks: Desks, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate", 20)
    # A loaded computer needs seconds for the first claim.
    desks.apply("lost", idle_timeout_s=86_400)
    parameters = {"steps": 30, "every": 10}
    job_id = desks.stack.submit(
        "chain.py", parameters, queue="lost", environment=gate.environment, heartbeat_interval_s=1
    )
    desks.stack.wait_for_commit(job_id, 20)
    machine = desks.machine("lost", MachineState.BUSY)
    shell = desks.client.machine_shell("lost", machine.id)
    port = desks.server.hosts[0].port
    assert shell == MachineShell(host="127.0.0.1", port=port, user=desks.server.user)
    os.kill(desks.process(0), signal.SIGKILL)
    gate.open()
    desks.stack.wait_for(job_id, JobState.COMPLETE)
    desks.apply("lost", idle_timeout_s=60)
    first, second = desks.stack.attempts(job_id)
    assert (first.end, first.checkpoint_step, second.resumed_step) == (AttemptEnd.INTERRUPTED, 20, 20)
    assert desks.stack.artifact(job_id) == chain(30)
    lost, other = desks.receipts("lost")
    assert (lost.id, other.id) == (first.machine_id, second.machine_id)
    assert (lost.provider, lost.reason, other.reason) == ("ssh", "the agent has ended", "no job for idle_timeout_s")
    assert (lost.usd_per_hour, other.usd_per_hour) == (0, 0.3), "the owner has paid for the first host"
    assert lost.receipt and (lost.receipt.observed_usd, lost.receipt.charged_usd) == (0, 0)
    assert other.receipt and other.receipt.charged_usd
    assert 0 < other.receipt.charged_usd <= other.receipt.observed_usd
    log = desks.client.machine_log("lost", other.id).text
    assert log and "baton.agent" in log and "baton_" not in log, log


def test_a_person_works_in_the_shell_of_a_machine_and_gets_the_terminal_back(desks: Desks) -> None:
    for host in desks.server.hosts:
        (host.home / ".profile").write_text("PS1='desk> '\n")
    desks.apply("shell", min=1, max=1)
    machine = desks.machine("shell", MachineState.READY)
    with desks.terminal(machine.id) as terminal:
        terminal.read_until("(yes/no")
        terminal.type("yes\r")
        terminal.read_until("desk> ")
        assert terminal.attributes() != terminal.before, "raw: the remote terminal echoes and edits"
        for rows, columns in ((41, 133), (30, 90)):
            terminal.resize(rows, columns)
            terminal.type(f"until stty size | grep -x '{rows} {columns}'; do sleep 0.05; done\r")
            terminal.read_until(f"{rows} {columns}\r\n")
        program = 'trap "echo $((6 * 7)) caught; exit" INT; echo $((6 * 7)) waits; while :; do sleep 0.1; done'
        terminal.type(f"sh -c '{program}'\r")
        terminal.read_until("42 waits")
        terminal.type(CTRL_C)
        terminal.read_until("42 caught")
        terminal.type("exit 130\r")
        code, rest = terminal.finish()
        assert (code, "baton" in rest) == (130, False), "the code is that of the shell, nobody has interrupted baton"
        assert terminal.attributes() == terminal.before
    with desks.terminal(machine.id) as terminal:
        terminal.read_until("desk> ")
        terminal.process.terminate()
        terminal.finish()
        assert terminal.attributes() == terminal.before, "also after a kill"
    desks.client.stop_fleet("shell")
    (ended,) = desks.receipts("shell")
    assert ended.id == machine.id
