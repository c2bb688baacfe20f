"""The loopback provider's machines: processes that outlive the driver, get a bare environment, and end completely."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from functions.fleet.drivers.loopback import LoopbackDriver, LoopbackFaults, LoopbackMarket
from functions.fleet.drivers.protocol import Created, CreateIntent, NotCreated, ProviderRefused
from functions.fleet.records import Offer
from tests.conformance.drivers.driver_kit import ENVIRONMENT, PREFIX, SECRET, SPEC, LoopbackDriven, create, inventory
from tests.kits.waiting import alive, soon

pytestmark = pytest.mark.processes
TOKEN = f"{PREFIX}nights-1"


@pytest.fixture
def provider(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LoopbackDriven]:
    """The provider; a parameter replaces the shell script that its machines run."""
    script = getattr(request, "param", "echo started; exec sleep 600")
    made = LoopbackDriven(tmp_path / "provider", ("/bin/sh", "-c", script))
    yield made
    made.close()
    soon(lambda: not made.existing(), what="the end of all machines")


def runs(script: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("provider", [script], indirect=True)


def made(provider: LoopbackDriven) -> str:
    result = create(provider)
    assert isinstance(result, Created)
    return result.handle


def printed(provider: LoopbackDriven, handle: str, lines: int) -> list[str]:
    """Return the first lines that the machine's program prints."""
    found: list[str] = soon(
        lambda: text if len(text := (provider.driver.logs(handle) or "").splitlines()) >= lines else None
    )
    return found


@runs("env; echo end; exec sleep 600")
def test_the_environment_is_that_of_the_intent_on_a_bare_machine(provider: LoopbackDriven) -> None:
    handle = made(provider)
    soon(lambda: "\nend" in (provider.driver.logs(handle) or ""))
    found = dict(line.split("=", 1) for line in (provider.driver.logs(handle) or "").splitlines() if "=" in line)
    assert set(found) - {"PWD", "OLDPWD", "SHLVL", "_"} == {"HOME", "PATH", "PYTHONPATH", "TMPDIR", *ENVIRONMENT}
    scratch = Path(found["TMPDIR"])
    assert scratch.parent == Path(tempfile.gettempdir()) and scratch.stat().st_mode & 0o077 == 0
    assert ENVIRONMENT.items() <= found.items()
    assert Path(found["HOME"]) == Path(found["PWD"]) == provider.directory / "machines" / handle / "home"


def test_no_secret_is_in_a_file_or_a_command_line(provider: LoopbackDriven, tmp_path: Path) -> None:
    made(provider)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files and not any(SECRET in path.read_text() for path in files)
    assert SECRET not in " ".join(psutil.Process(provider.pid_of(TOKEN)).cmdline())
    assert (tmp_path / "provider").stat().st_mode & 0o077 == 0, "the output may hold users' data"


@runs("mktemp -d baton-XXXX --tmpdir; exec sleep 600")
def test_a_killed_machine_leaves_no_temporary_files(provider: LoopbackDriven) -> None:
    handle = made(provider)
    left = Path(printed(provider, handle, 1)[0])
    assert left.is_dir()
    provider.driver.destroy(handle)
    assert not left.parent.exists()


@runs("nvidia-smi --query-gpu=name,memory.total; exec sleep 600")
def test_a_machine_has_the_gpus_of_its_offer(provider: LoopbackDriven) -> None:
    offer = Offer(provider="loopback", ref="o", gpus=2, gpu_model="RTX 4090", vram_gib=24, usd_per_hour=0.3)
    LoopbackMarket(offers=[offer]).save(provider.directory)
    assert printed(provider, made(provider), 2) == ["RTX 4090, 24576, 580.65.06"] * 2


def test_machines_outlive_their_driver_and_the_next_driver_ends_them(provider: LoopbackDriven) -> None:
    handle = made(provider)
    pid = provider.pid_of(TOKEN)
    assert os.getsid(pid) == pid, "Ctrl-C in the terminal of the stack does not reach the machine"
    provider.advance(3600)
    later = LoopbackDriver(provider.directory, now=provider.clock)
    (seen,) = later.inventory(PREFIX, provider.now()).sightings
    assert (seen.handle, seen.running) == (handle, True)
    assert later.charged_usd(handle) == pytest.approx(0.2)
    later.destroy(handle)
    soon(lambda: not alive(pid), what="the end of the process")


@runs("sleep 600 & echo $!; wait")
def test_a_destroy_ends_the_whole_process_group_even_if_frozen(provider: LoopbackDriven) -> None:
    handle = made(provider)
    child, pid = int(printed(provider, handle, 1)[0]), provider.pid_of(TOKEN)
    os.killpg(pid, signal.SIGSTOP)
    assert inventory(provider).of(TOKEN)[0].running, "a frozen host is no dead host"
    provider.driver.destroy(handle)
    soon(lambda: not alive(pid) and not alive(child), what="the end of the group")


def test_a_process_with_the_id_of_a_dead_machine_is_never_killed(provider: LoopbackDriven) -> None:
    handle = made(provider)
    provider.end(TOKEN)
    path = provider.directory / "machines" / handle / "machine.json"
    record = json.loads(path.read_text())
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as stranger:
        try:
            path.write_text(json.dumps(record | {"pid": stranger.pid, "started": record["started"] - 1}))
            later = LoopbackDriver(provider.directory, now=provider.clock)
            (seen,) = later.inventory(PREFIX, provider.now()).sightings
            assert not seen.running and seen.message
            assert later.destroy(handle)
            assert later.inventory(PREFIX, provider.now()).sightings == []
            assert stranger.poll() is None
        finally:
            stranger.kill()


def test_no_process_runs_without_a_record(provider: LoopbackDriven, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process waits for its record: a driver that dies, or whose disk is full, leaves nothing behind."""

    def full(machine: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(provider.driver, "_write", full)
    result = create(provider)
    assert isinstance(result, NotCreated) and "No space left" in result.reason
    (process,) = provider.driver._children.values()
    assert process.wait(60) != 0
    assert inventory(provider).sightings == []


def test_a_host_is_rented_to_one_machine(provider: LoopbackDriven) -> None:
    offers = provider.driver.quote(SPEC)
    made(provider)
    assert [one.ref for one in provider.driver.quote(SPEC)] == [one.ref for one in offers[1:]]
    LoopbackMarket(faults=LoopbackFaults(no_capacity=1)).save(provider.directory)
    assert provider.driver.quote(SPEC) == []
    assert provider.driver.quote(SPEC)


def test_a_new_price_is_billed_from_the_inventory_that_shows_it(provider: LoopbackDriven) -> None:
    handle = made(provider)
    provider.advance(3600)
    LoopbackMarket(usd_per_hour=0.6).save(provider.directory)
    assert inventory(provider).of(TOKEN)[0].usd_per_hour == 0.6
    assert {one.usd_per_hour for one in provider.driver.quote(SPEC)} == {0.6}
    provider.advance(3600)
    assert provider.driver.charged_usd(handle) == pytest.approx(0.2 + 0.6)


def test_a_market_file_that_cannot_be_used_is_named(provider: LoopbackDriven) -> None:
    (provider.directory / "market.json").write_text('{"offer": []}')
    with pytest.raises(ProviderRefused, match=r"market\.json: Extra inputs are not permitted: correct or remove"):
        provider.driver.quote(SPEC)
    (provider.directory / "market.json").unlink()
    (offer, *_) = provider.driver.quote(SPEC)
    (provider.directory / "market.json").write_text("")
    intent = CreateIntent(token=TOKEN, offer=offer, image=None, disk_gib=1, environment={}, max_usd_per_hour=1)
    assert isinstance(provider.driver.create(intent), NotCreated), "a certain refusal, as the protocol demands"
