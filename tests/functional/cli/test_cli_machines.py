"""`baton fleet logs` and `baton fleet ssh`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from baton.contract.fleets.fleet import FleetPage, MachineLog, MachineShell
from gpu_client.transport.api.client import BatonClient
from tests.functional.cli.people import Baton
from tests.unit.cli.test_cli_fleet_view import a_fleet, a_machine

pytestmark = [pytest.mark.emulator, pytest.mark.processes]

MACHINE = "a1b2c3d4-nights-9f8e7d6c5b4a"
JOB = "146683a1-cb76-4702-9fef-fcccd32594f1"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Answer the calls; return the fleets and machines that they name."""
    seen: list[tuple[str, str]] = []

    def machine_log(_client: BatonClient, fleet: str, machine: str) -> MachineLog:
        seen.append((fleet, machine))
        if machine.startswith("silent"):
            return MachineLog()
        return MachineLog(text="pulling\x1b]0;title\x07\nenrolled\n", job_id=JOB)

    def machine_shell(_client: BatonClient, fleet: str, machine: str) -> MachineShell:
        seen.append((fleet, machine))
        return MachineShell(host="203.0.113.7", port=40022, user="root")

    monkeypatch.setattr(BatonClient, "machine_log", machine_log)
    monkeypatch.setattr(BatonClient, "machine_shell", machine_shell)
    return seen


def test_the_output_of_a_machine(baton: Baton, asked: list[tuple[str, str]]) -> None:
    said = baton("fleet", "logs", MACHINE).ok()
    assert said.out.splitlines()[1] == "enrolled" and "\x1b" not in said.out
    assert said.err == "The log of its job: baton logs 146683a1\n"
    assert baton("fleet", "logs", MACHINE, "--json").ok().json["job_id"] == JOB
    silent = baton("fleet", "logs", "silent-my-nights-1").ok()
    assert (silent.out, silent.err) == ("", "The provider has no output of silent-my-nights-1, or none yet.\n")
    assert asked == [("nights", MACHINE), ("nights", MACHINE), ("my-nights", "silent-my-nights-1")]


def test_a_name_that_is_cut_in_the_machine_is_found_among_the_fleets(
    baton: Baton, asked: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = a_fleet()
    fleet = fleet.model_copy(update={"spec": fleet.spec.model_copy(update={"name": "n" * 31})})
    alike = fleet.model_copy(update={"spec": fleet.spec.model_copy(update={"name": "n" * 29}), "machines": []})
    mine = a_machine(id=f"a1b2c3d4-{'n' * 28}-9f8e")
    fleet = fleet.model_copy(update={"machines": [mine]})
    monkeypatch.setattr(BatonClient, "fleets", lambda _client: FleetPage(fleets=[a_fleet(), alike, fleet]))
    baton("fleet", "logs", mine.id).ok()
    baton("fleet", "logs", f"a1b2c3d4-{'n' * 28}-ended").ok()
    baton("fleet", "logs", f"a1b2c3d4-{'m' * 28}-9f8e").ok()
    assert [name for name, _ in asked] == ["n" * 31, "n" * 29, "m" * 28]
    baton("fleet", "logs", "nights").failed(2, "nights is not a machine", "baton fleet show NAME")


def test_the_shell_of_a_machine_is_opened_by_the_own_openssh(
    baton: Baton, asked: list[tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert baton("fleet", "ssh", MACHINE, "--json").ok().json == {"host": "203.0.113.7", "port": 40022, "user": "root"}
    monkeypatch.setenv("PATH", str(tmp_path))
    baton("fleet", "ssh", MACHINE).failed(
        2, "This computer has no OpenSSH client", "ssh -p 40022 -l root -- 203.0.113.7"
    )
    started: list[tuple[str, list[str]]] = []
    (tmp_path / "ssh").touch(0o700)
    monkeypatch.setattr(os, "execvp", lambda program, command: started.append((program, command)))
    baton("fleet", "ssh", MACHINE).ok()
    assert started == [("ssh", ["ssh", "-p", "40022", "-l", "root", "--", "203.0.113.7"])]


def test_refusals_name_the_remedy(baton: Baton) -> None:
    for command in ("logs", "ssh"):
        baton("fleet", command, "a1b2c3d4-unknown-9f8e").failed(3, "fleet_not_found", "baton fleet ls")
