"""The command line of the local stack: budgets, directories, and what the start and the end tell about money."""

from __future__ import annotations

import errno
import logging
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.contract.fleets.fleet import MachineState
from functions.domain.errors import StorageUnavailable
from functions.fleet.clock import ClockAnchor, FleetClock
from functions.fleet.records import Machine
from functions.local import program
from functions.local.emulator import StateInUseError
from functions.local.machines import describe_machines
from functions.local.program import REPEAT_S, RepeatFilter, main
from tests.unit.fleet.test_machine_states import make_machine

Run = Callable[..., dict[str, Any]]


@pytest.mark.parametrize("text", ["5", "{}", "per_day_usd: 5", '{"per_day_usd": 0}'])
def test_a_budget_of_all_fleets_that_is_none_ends_before_anything_starts(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--fleet-budget", text])
    assert 'Write JSON such as {"per_day_usd": 5}' in capsys.readouterr().err


class StackDouble:
    """A stack without parts, which receives Ctrl-C at its first check."""

    given: dict[str, Any]
    machines: list[Machine] = []
    error: Exception | None = None
    storage_error: Exception | None = None
    ahead_s = 0

    def __init__(self, **given: Any) -> None:
        StackDouble.given = given
        self.url = self.cloud_url = "http://127.0.0.1:8787"
        self.keys = {"worker": "baton_key"}
        now = int(time.time())
        self.fleet_clock = FleetClock(ClockAnchor(server=now, fleet=now + self.ahead_s))

    def start(self) -> None:
        if self.error is not None:
            raise self.error
        (StackDouble.given["state_dir"] or Path()).mkdir(parents=True, exist_ok=True)

    def check(self) -> None:
        signal.raise_signal(signal.SIGINT)

    def describe_rented_machines(self) -> str:
        if self.storage_error is not None:
            raise self.storage_error
        return describe_machines(self.machines)

    def stop(self) -> None:
        print("stopped")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Run]:
    """Run the program with a double of the stack; return the stack's arguments."""
    filters = list(logging.getLogger("baton.fleet").filters)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr(program, "LocalStack", StackDouble)
    monkeypatch.setattr(program, "CLOUD_CHECK_S", 0.001)
    monkeypatch.chdir(tmp_path)

    def run_program(*arguments: str, exit_code: int = 0) -> dict[str, Any]:
        assert main([*arguments]) == exit_code
        return StackDouble.given

    yield run_program
    logging.getLogger("baton.fleet").filters = filters
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_a_budget_of_all_fleets_stays_until_it_is_removed(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run()["fleet_budget"] is None
    assert "Fleets:" not in capsys.readouterr().out
    assert run("--fleet-budget", '{"per_day_usd": 5}')["fleet_budget"].per_day_usd == 5
    capsys.readouterr()
    assert run()["fleet_budget"].per_day_usd == 5
    assert 'within the budget {"per_day_usd":5.0}; --fleet-budget none removes' in capsys.readouterr().out
    assert run("--forget")["fleet_budget"] is None
    assert run("--fleet-budget", "none")["fleet_budget"] is None
    assert run()["fleet_budget"] is None


@pytest.mark.parametrize("content", [b"", b"{}", b'{"per_day_usd": 5', b"\xff"])
def test_a_kept_budget_that_cannot_be_read_ends_before_anything_starts(
    content: bytes, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run("--fleet-budget", '{"per_day_usd": 5}')
    Path(".baton/local/fleet-budget.json").write_bytes(content)
    capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        main([])
    last = capsys.readouterr().err.splitlines()[-1]
    assert ".baton/local/fleet-budget.json" in last and "--fleet-budget none" in last
    assert run("--forget")["fleet_budget"] is None
    assert run("--fleet-budget", "none")["fleet_budget"] is None
    assert run()["fleet_budget"] is None


def test_a_budget_that_cannot_be_kept_ends_the_stack_and_leaves_the_earlier_one(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next start would let the fleets spend without the bound."""
    run("--fleet-budget", '{"per_day_usd": 5}')
    capsys.readouterr()

    def fill_disk(path: Path, text: str) -> None:
        path.write_bytes(b"")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", fill_disk)
        run("--fleet-budget", '{"per_day_usd": 9}', exit_code=1)
    said = capsys.readouterr()
    assert said.err == "The local stack could not start: No space left on device\n"
    assert said.out == "stopped\n"
    assert run()["fleet_budget"].per_day_usd == 5


def test_a_fast_clock_has_a_directory_of_its_own(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run()["state_dir"] == Path(".baton/local")
    assert run("--fleet-clock-speed", "60")["state_dir"] == Path(".baton/local-x60")
    assert "60 times as fast, for trials with loopback" in capsys.readouterr().out
    assert run("--fleet-clock-speed", "60", "--state-dir", "here")["state_dir"] == Path("here")
    monkeypatch.setattr(StackDouble, "ahead_s", 26 * 3600)
    run("--state-dir", "here")
    assert "the clock is 26.0 h ahead" in capsys.readouterr().out


def test_the_end_names_the_machines_that_go_on(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run()
    assert "rented" not in capsys.readouterr().out
    machines = [make_machine(MachineState.BUSY, id=name, usd_per_hour=0.2) for name in ("m1", "m2")]
    monkeypatch.setattr(StackDouble, "machines", machines)
    run()
    told = capsys.readouterr().out.partition("Ctrl-C stops it.")[2].splitlines()
    assert told[1:4] == [
        "2 machines are still rented, 0.40 USD/h:",
        "  m1  loopback  0.20 USD/h",
        "  m2  loopback  0.20 USD/h",
    ]
    assert "then run `baton fleet stop NAME` (nights)" in told[5]
    assert told[-2:] == ["Stopping ...", "stopped"]
    run("--json")
    said = capsys.readouterr()
    assert said.err.startswith("2 machines are still rented, 0.40 USD/h:") and said.out.count("\n") == 2
    monkeypatch.setattr(StackDouble, "storage_error", StorageUnavailable("GetItem: timed out"))
    run()
    assert "Rented machines go on and cost money, and cannot be named: GetItem: timed out" in capsys.readouterr().out


def test_a_directory_in_use_has_a_remedy(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StackDouble, "error", StateInUseError(".baton/local/cloud is in use"))
    run("--port", "8787", exit_code=1)
    remedy = "End that control plane, or add: --state-dir .baton/local-2 --port 8788"
    assert remedy in capsys.readouterr().err


def test_a_directory_that_cannot_be_written_has_a_remedy(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StackDouble, "error", PermissionError(13, "Permission denied", "/srv/state"))
    run(exit_code=1)
    assert capsys.readouterr().err == (
        "The local stack could not start: /srv/state: Permission denied. "
        "Name a directory that you may write with --state-dir.\n"
    )


@pytest.mark.parametrize(
    "arguments", [("--port", "99999"), ("--port", "-1"), ("--fleet-clock-speed", "0"), ("--sweep-interval-s", "0")]
)
def test_a_number_out_of_range_ends_before_anything_starts(
    arguments: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*arguments])
    assert f"argument {arguments[0]}: must be " in capsys.readouterr().err


def test_what_each_tick_repeats_is_logged_once_an_hour() -> None:
    repeats = RepeatFilter()

    def is_logged(text: str, at: float) -> bool:
        record = logging.LogRecord("baton.fleet", logging.WARNING, "", 1, "%s", (text,), None)
        record.created = at
        return repeats.filter(record)

    shown = [is_logged("vast: no account", at) for at in (1e9, 1e9 + 1, 1e9 + REPEAT_S, 1e9 + REPEAT_S + 1)]
    assert shown == [True, False, True, False]
    assert is_logged("salad: no account", 1e9)
