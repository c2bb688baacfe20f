"""Processes of the demo end when they should, with everything they started; failures and interruptions are told."""

from __future__ import annotations

import io
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from demo import processes
from demo.failure import DemoError, Interrupts, log_tail
from demo.processes import Child, Household, own_environment
from demo.screen import Screen

NESTED = """
import subprocess, sys, time
inner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session={apart})
print(inner.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def household(tmp_path: Path) -> Household:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    return Household(tmp_path / "logs", scratch, Interrupts())


def start(household: Household, program: str, *, grace_s: float = 5.0) -> Child:
    return household._start("child", ["-c", program], log_name="child.log", grace_s=grace_s)


def eventually(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def inner_pid(child: Child) -> int:
    eventually(lambda: child.log.read_text().endswith("\n"))
    return int(child.log.read_text())


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.processes
def test_killing_the_group_takes_its_children_along(household: Household) -> None:
    with household:
        child = start(household, NESTED.format(apart=False))
        pid = inner_pid(child)
        assert child.kill_group() == 2
        assert child.exit_code == -signal.SIGKILL
        assert not runs(pid)


@pytest.mark.processes
def test_a_process_that_outlives_the_kill_is_a_failure_and_does_not_stay(
    household: Household, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "GONE_WITHIN_S", 0.2)
    with household:
        child = start(household, NESTED.format(apart=True))
        pid = inner_pid(child)
        with pytest.raises(DemoError, match="1 processes of child outlived its SIGKILL"):
            child.kill_group()
        eventually(lambda: not runs(pid))


@pytest.mark.processes
def test_nothing_is_left_behind_whatever_happens(household: Household) -> None:
    with pytest.raises(ZeroDivisionError), household:
        first = start(household, NESTED.format(apart=True))
        pid = inner_pid(first)
        second = start(household, "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)", grace_s=0.5)
        raise ZeroDivisionError
    assert first.exit_code == -signal.SIGTERM
    assert second.exit_code is not None
    assert not runs(pid)


@pytest.mark.processes
def test_a_worker_that_has_left_cannot_be_killed(household: Household) -> None:
    with household:
        child = start(household, "raise SystemExit(3)")
        assert child.wait(10.0) == 3
        with pytest.raises(DemoError, match="left before it could be killed, with exit code 3"):
            child.kill_group()


@pytest.mark.processes
def test_waiting_for_a_process_has_a_deadline(household: Household) -> None:
    with household:
        child = start(household, "import time; time.sleep(60)")
        with pytest.raises(DemoError, match="child did not end within"):
            child.wait(0.05)


@pytest.mark.processes
def test_a_stack_that_does_not_start_is_told_with_its_log(
    household: Household, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_EMULATOR_PYTHON", "nowhere/python")
    with household, pytest.raises(DemoError, match="the local stack ended at once with exit code 1") as failure:
        household.start_stack()
    assert failure.value.log is not None
    assert "nowhere/python does not exist" in log_tail(failure.value.log)


@pytest.mark.processes
def test_an_error_of_the_api_is_blamed_on_a_stack_that_is_gone(
    household: Household, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "STACK_NAME", "child")
    refusal = OSError("connection refused")
    with household:
        child = start(household, "import time; time.sleep(60)")
        assert household.explain(refusal).sentence == "the control plane did not do its part: connection refused"
        child.kill_group()
        assert household.explain(refusal).sentence == "child ended by itself with exit code -9"
        assert household.explain(refusal).log == child.log


def test_children_get_nothing_of_a_persons_settings() -> None:
    inherited = {"PATH": "/bin", "BATON_API_KEY": "x", "AWS_PROFILE": "x", "SALAD_MACHINE_ID": "x", "PYTHONPATH": "x"}
    assert own_environment(inherited) == {"PATH": "/bin"}
    inherited["BATON_EMULATOR_PYTHON"] = "/opt/emulator/bin/python"  # where the emulator is, on this machine
    assert own_environment(inherited).keys() == {"PATH", "BATON_EMULATOR_PYTHON"}


@pytest.fixture
def interrupts() -> object:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield Interrupts()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_every_interruption_unwinds_the_demo(interrupts: Interrupts, number: signal.Signals) -> None:
    interrupts.install()
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), number)


def test_a_held_section_runs_to_its_end_first(interrupts: Interrupts) -> None:
    interrupts.install()
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts.held():
        with interrupts.held():
            os.kill(os.getpid(), signal.SIGTERM)
        done.append("outer")
    assert done == ["outer"]
    with interrupts.held():  # it was raised once; nothing is pending any more
        done.append("again")
    assert done == ["outer", "again"]


def test_the_tail_of_a_log_is_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert log_tail(log) == ""
    log.write_bytes(b"\n".join(b"line %d" % number for number in range(50)) + b"\n\xff\n")
    assert log_tail(log, 2) == "line 49\n\ufffd"


def screen(*, terminal: bool) -> tuple[Screen, io.StringIO]:
    output = io.StringIO()
    ticks = iter(range(1000))
    console = Console(file=output, force_terminal=terminal, width=120, legacy_windows=False)
    return Screen(console, clock=lambda: float(next(ticks))), output


def test_without_a_terminal_there_are_plain_lines_at_each_quarter() -> None:
    shown, output = screen(terminal=False)
    with shown.phase("train", "Train", 100) as phase:
        for step in range(0, 101, 5):
            phase.at(step, f"step {step} [0/1]")
        phase.ends_with("complete")
    lines = output.getvalue().splitlines()
    assert [line.split("] ", 1)[1].split() for line in lines] == [
        ["Train", "..."],
        ["Train", "25", "%", "step", "25", "[0/1]"],
        ["Train", "50", "%", "step", "50", "[0/1]"],
        ["Train", "75", "%", "step", "75", "[0/1]"],
        ["Train", "complete"],
    ]
    assert "\x1b" not in output.getvalue()
    assert shown.durations_s["train"] > 0


def test_a_phase_that_fails_is_not_told_as_done() -> None:
    shown, output = screen(terminal=False)
    with pytest.raises(DemoError), shown.phase("fetch", "Fetch") as phase:
        phase.ends_with("fetched")
        raise DemoError("no")
    assert "fetched" not in output.getvalue()
    assert shown.durations_s == {}


def test_on_a_terminal_a_phase_ends_with_a_mark() -> None:
    shown, output = screen(terminal=True)
    with shown.phase("a", "Whole", 10) as phase:
        phase.at(10, "complete")
    with shown.phase("b", "Cut short", 10) as phase:
        phase.at(4, "killed")
    with shown.phase("c", "Unmeasured") as phase:
        phase.ends_with("ready")
    last = {line.split("\x1b[2K")[-1] for line in output.getvalue().splitlines()}
    for mark, name in (("✓", "Whole"), ("✗", "Cut short"), ("✓", "Unmeasured")):
        assert any(mark in line and name in line for line in last)


def test_long_sentences_are_wrapped_under_their_bullet() -> None:
    shown, output = screen(terminal=False)
    shown.say_point("word [7] " * 40)
    first, *others = output.getvalue().rstrip("\n").split("\n")
    assert first.startswith(" • word [7]")
    assert others
    assert all(line.startswith(("   word", "   [7]")) and len(line) <= 100 and line == line.rstrip() for line in others)
