"""Test the promises of hosts behind a real sshd that go beyond those of `test_drivers.py`."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import SecretStr

from baton.contract.fleets.fleet import MachineState
from functions.fleet import lifecycle
from functions.fleet.drivers.protocol import (
    Ambiguous,
    Created,
    CreateIntent,
    NotCreated,
    ProviderRefused,
    ProviderUnavailable,
    RefusalKind,
    SshTarget,
)
from functions.fleet.drivers.ssh import driver, host
from functions.fleet.drivers.ssh.driver import SshDriver
from functions.fleet.records import Offer
from tests.conformance.drivers.driven_ssh import SshDriven
from tests.conformance.drivers.driver_kit import ENVIRONMENT, PREFIX, SECRET, SPEC, create, inventory
from tests.kits.network.ports import free_port
from tests.kits.network.ssh_server import MISSING, SSHD
from tests.kits.waiting import alive, soon, until
from tests.unit.fleet.test_machine_states import make_machine

pytestmark = [pytest.mark.processes, pytest.mark.skipif(SSHD is None, reason=MISSING)]

TOKEN = f"{PREFIX}nights-1"
OTHER_HOST_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIEa6bPtBSq4hZYBDCrVFyDmhY9gRZSkh7OXzmPZKwl4g"
AGENT = """env > "$HOME/environment"; setsid sleep 600 & echo $! > "$HOME/trainer"; echo started; wait"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshDriven]:
    """Two hosts for all tests of this file; no test leaves a machine."""
    made = SshDriven(tmp_path_factory.mktemp("ssh"), count=2, agent=AGENT)
    yield made
    made.close()
    soon(lambda: not made.existing(), what="the end of all machines")


@pytest.fixture
def provider(hosts: SshDriven) -> Iterator[SshDriven]:
    for name in ("environment", "trainer"):
        (hosts.server.hosts[0].home / name).unlink(missing_ok=True)
    yield hosts
    hosts.driver = SshDriver(hosts.account, now=hosts.clock)
    for seen in inventory(hosts, "").sightings:
        hosts.driver.destroy(seen.handle)
    soon(lambda: not hosts.existing(), what="the end of all machines")


def made(provider: SshDriven) -> str:
    result = create(provider)
    assert isinstance(result, Created)
    return result.handle


def described(provider: SshDriven, *changes: Mapping[str, Any]) -> SshDriver:
    """Return a driver of hosts with another description."""
    hosts = [host.model_copy(update=one) for host, one in zip(provider.account.hosts, changes, strict=False)]
    return SshDriver(provider.account.model_copy(update={"hosts": hosts}), now=provider.clock)


def read(path: Path) -> str:
    return str(until(lambda: path.exists() and path.read_text(), what=str(path), every_s=0.01))


def test_the_agent_outlives_the_connection_and_gets_its_own_environment(provider: SshDriven) -> None:
    handle = made(provider)
    home = provider.server.hosts[0].home
    environment = dict(line.split("=", 1) for line in read(home / "environment").splitlines())
    assert environment.items() >= ENVIRONMENT.items()
    workspace = home / ".baton/machine/workspace"
    assert environment["BATON_WORKSPACE"] == environment["PWD"] == str(workspace)
    assert list(Path(environment["PYTHONPATH"]).glob("gpu_client/agent/__main__.py"))
    assert Path(environment["BATON_ARENA_DIR"]).stat().st_mode & 0o777 == 0o700
    assert not [name for name in environment if name.startswith("SSH_")]
    agent = psutil.Process(json.loads((home / ".baton/machine/process.json").read_text())["pid"])
    assert os.getsid(agent.pid) == agent.pid and agent.parent() != psutil.Process()
    # Another control plane finds the machine.
    provider.driver = SshDriver(provider.account, now=provider.clock)
    assert [one.handle for one in inventory(provider).of(TOKEN)] == [handle]
    assert provider.driver.logs(handle) == "started\n"


def test_no_secret_is_in_a_command_line_or_left_in_a_file(
    provider: SshDriven, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made(provider)
    commands = provider.server.hosts[0].commands
    assert "BatchMode=yes" in commands and "baton-ssh-host" in commands
    key = provider.server.private_key.splitlines()[1]
    assert SECRET not in commands and key not in commands
    assert list(tmp_path.iterdir()) == []
    home = provider.server.hosts[0].home
    kept = [path for path in home.rglob("*") if path.is_file() and path.name != "environment"]
    assert kept and not [path for path in kept if SECRET.encode() in path.read_bytes()]
    assert (home / ".baton").stat().st_mode & 0o777 == 0o700


def test_a_destroy_ends_escaped_processes_and_deletes_the_data_but_not_the_log(provider: SshDriven) -> None:
    handle = made(provider)
    home = provider.server.hosts[0].home
    trainer = int(read(home / "trainer"))
    arena = Path(dict(line.split("=", 1) for line in read(home / "environment").splitlines())["BATON_ARENA_DIR"])
    (home / ".baton/machine/workspace/data").write_text("of a user")
    assert alive(trainer) and provider.driver.destroy(handle)
    assert not alive(trainer) and not arena.exists()
    left = (home / ".baton/ended" / handle.rpartition(":")[2]).iterdir()
    assert sorted(path.name for path in left) == ["machine.json", "output.log", "process.json"]
    assert provider.driver.logs(handle) == "started\n"
    assert provider.driver.ssh_target(handle) == SshTarget(
        host="127.0.0.1", port=provider.server.hosts[0].port, user=provider.server.user
    )


def test_a_call_without_a_greeting_made_no_machine(provider: SshDriven) -> None:
    provider.server.hosts[0].inject("create", "dropped")
    result = create(provider)
    assert isinstance(result, NotCreated) and "cannot be reached" in result.reason
    assert (result.kind, provider.existing(), inventory(provider).sightings) == (None, [], [])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            {"host_key": "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIEa6bPtBSq4hZYBDCrVFyDmhY9gRZSkh7OXzmPZKwl4g"},
            "ssh-keyscan -p",
        ),
        ({"python": "/no/python"}, "cannot run /no/python: install Python 3.11 or newer"),
        ({"user": "nobody-of-this-name"}, "refuses the key: append the public half"),
        ({"port": 0}, "cannot be reached: ssh: connect to host 127.0.0.1 port"),
        ({"address": "host.invalid"}, "Could not resolve hostname"),
        ({"python": "/bin/echo"}, "cannot run /bin/echo"),
    ],
    ids=["another host key", "no Python", "refused key", "closed port", "no such name", "no greeting"],
)
def test_a_host_that_cannot_be_used_is_named_with_the_remedy(
    provider: SshDriven, change: dict[str, Any], problem: str
) -> None:
    driver = described(provider, {}, {"port": free_port()} if "port" in change else change)
    provider.driver = driver
    assert [one.ref for one in driver.quote(SPEC)] == ["desk-0"]
    (text,) = driver.examine(PREFIX).problems
    assert text.startswith("desk-1: ") and problem in text
    found = inventory(provider)
    assert (found.complete, found.unread) == (False, ["desk-1"])
    provider.driver = described(provider, {"port": free_port()} if "port" in change else change)
    with pytest.raises(ProviderUnavailable, match="desk-0: "):
        inventory(provider)
    # A login repeats the question only if an answer may come.
    with pytest.raises(ProviderUnavailable if "reach" in problem or "resolve" in problem else ProviderRefused):
        provider.driver.examine(PREFIX)
    result = provider.driver.create(intent(driver.quote(SPEC)[0]))
    assert isinstance(result, NotCreated) and problem in result.reason
    assert provider.existing() == []


def test_an_account_whose_key_has_a_passphrase_names_the_remedy(provider: SshDriven) -> None:
    account = provider.account.model_copy(update={"private_key": SecretStr("-----BEGIN NO KEY-----")})
    with pytest.raises(ProviderRefused, match="cannot read the private key"):
        SshDriver(account, now=provider.clock).examine(PREFIX)


def test_a_busy_host_is_not_offered_and_makes_no_second_machine(provider: SshDriven) -> None:
    offer = provider.driver.quote(SPEC)[0]
    handle = made(provider)
    assert [one.ref for one in provider.driver.quote(SPEC)] == ["desk-1"]
    result = provider.driver.create(intent(offer))
    assert isinstance(result, NotCreated) and result.reason == "the host desk-0 made no machine: has a machine already"
    assert [one.handle for one in inventory(provider).sightings] == [handle]
    report = provider.driver.examine("dep20000-")
    assert [one.handle for one in report.foreign] == [handle] and report.account == "2 hosts"
    corrected = described(provider, {}, {"vram_gib": 24}).quote(SPEC)[0]
    assert corrected.machine_ref not in {None, described(provider, {}, {}).quote(SPEC)[0].machine_ref}, "no quarantine"
    gone = provider.driver.create(intent(offer.model_copy(update={"ref": "sold"})))
    assert isinstance(gone, NotCreated) and gone.reason == "the account has no host sold"


def test_a_host_that_is_off_proves_nothing_about_its_own_machines_only(provider: SshDriven) -> None:
    here, there = provider.driver.quote(SPEC)
    provider.driver = described(provider, {}, {"port": free_port()})
    found = inventory(provider)
    for offer, absences in ((here, [found.at]), (there, [])):
        machine = make_machine(MachineState.BUSY, offer=offer)
        assert lifecycle.advance(machine, found, idle_timeout_s=None).absences == absences


def test_without_an_openssh_client_the_provider_is_refused(
    provider: SshDriven, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer = provider.driver.quote(SPEC)[0]
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "/nowhere")
        with pytest.raises(ProviderRefused, match="AWS Lambda has none"):
            provider.driver.quote(SPEC)
        result = provider.driver.create(intent(offer))
    assert isinstance(result, NotCreated) and result.kind is RefusalKind.INVALID


def test_an_answer_that_cannot_be_read_proves_nothing(provider: SshDriven, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = made(provider)
    offer = provider.driver.quote(SPEC)[0]
    state = {"python": [3, 11], "linux": True, "free_gib": 1, "machine": None, "running": False}
    answers: list[tuple[Any, str]] = [
        ({**state, "free_gib": float("nan")}, "finite"),
        ({**state, "machine": {"id": "1", "token": "t", "usd_per_hour": -1, "created_at": 1}}, "greater"),
        (None, "HostState"),
    ]
    for answer, problem in answers:
        monkeypatch.setattr(driver, "call", lambda *args, answer=answer, **options: answer)
        with pytest.raises(ProviderUnavailable, match=problem):
            inventory(provider)
        assert isinstance(provider.driver.create(intent(offer)), Ambiguous)
    monkeypatch.setattr(driver, "call", lambda *args, **options: {"alive": [7]})
    with pytest.raises(ProviderUnavailable, match=r"desk-0: the processes \[7\] do not end, restart the host"):
        provider.driver.destroy(handle)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"python": (3, 10)}, "has Python 3.10: install Python 3.11"),
        ({"linux": False}, "is no Linux computer"),
        ({}, ""),
    ],
)
def test_a_host_that_cannot_run_the_agent_is_not_offered(
    provider: SshDriven, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], problem: str
) -> None:
    state = {"python": (3, 12), "linux": True, "free_gib": 10, "machine": None, "running": False, **changes}
    monkeypatch.setattr(driver, "call", lambda *args, **options: state)
    offers, report = provider.driver.quote(SPEC), provider.driver.examine(PREFIX)
    assert len(offers) == (0 if problem else 2) and len(report.problems) == 2 - len(offers)
    assert all(problem in text for text in report.problems)
    assert all(one.disk_gib == pytest.approx(9.5) for one in offers), "no more than is free"


def test_a_machine_whose_agent_ended_keeps_its_host_until_the_destroy(provider: SshDriven) -> None:
    handle = made(provider)
    provider.end(TOKEN)
    (seen,) = until(lambda: [one for one in inventory(provider).sightings if not one.running])
    assert seen.message == "the agent has ended"
    assert [one.ref for one in provider.driver.quote(SPEC)] == ["desk-1"]
    provider.driver.destroy(handle)
    assert [one.ref for one in provider.driver.quote(SPEC)] == ["desk-0", "desk-1"]


def test_a_call_that_is_cut_off_makes_nothing() -> None:
    request = json.dumps({"record": {}, "bundle_bytes": 10}).encode()
    with pytest.raises(EOFError):
        host.main("create", io.BytesIO(request + b"\n123"))
    with pytest.raises(json.JSONDecodeError):
        host.main("create", io.BytesIO(request[:-3]))


def test_a_process_that_cannot_be_killed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "KILL_WITHIN_S", 0.02)
    hung = subprocess.Popen(["/bin/sleep", "600"])
    with monkeypatch.context() as patch:
        patch.setattr(os, "kill", lambda pid, signal: None)
        assert host._kill({"pid": hung.pid}) == [hung.pid]
    hung.kill()
    hung.wait()


@pytest.mark.timeout(600)
def test_an_interpreter_without_the_packages_gets_an_environment_once(provider: SshDriven, tmp_path: Path) -> None:
    """The only test that downloads: pip and eight packages, about 30 MB, 50 s of CPU time."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    (packages,) = (tmp_path / "bare").glob("lib/python*/site-packages")
    (packages / "of_the_host.py").write_text("")
    provider.driver = described(provider, {"python": str(tmp_path / "bare/bin/python")})
    first, second = _log_of_a_start(provider), _log_of_a_start(provider)
    assert first.startswith("installing pydantic, requests") and "installed\n" in first, first
    assert "install" not in second
    (place,) = (provider.server.hosts[0].home / ".baton/python").iterdir()
    subprocess.run([place / "bin/python", "-c", "import of_the_host, awscrt, numpy"], check=True)


def _log_of_a_start(provider: SshDriven) -> str:
    """Return the output of a real agent that looks for its control plane."""
    handle = made(provider)
    until(lambda: "enroll" in (provider.driver.logs(handle) or ""), 250, what="the agent", every_s=0.2)
    log = provider.driver.logs(handle)
    provider.driver.destroy(handle)
    return log or ""


def intent(offer: Offer) -> CreateIntent:
    return CreateIntent(
        token=TOKEN,
        offer=offer,
        image=None,
        disk_gib=1,
        environment=ENVIRONMENT,
        max_usd_per_hour=SPEC.max_usd_per_hour,
    )
