"""Processes of the demo end when they should, with everything they started."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from demo import processes
from demo.failure import DemoError, Interrupts, log_tail
from demo.processes import Child, ManagedProcesses, own_environment
from tests.kits.waiting import alive, until

NESTED = """
import subprocess, sys, time
inner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session={apart})
print(inner.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def managed(tmp_path: Path) -> ManagedProcesses:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    return ManagedProcesses(tmp_path / "logs", scratch, Interrupts())


def start(managed: ManagedProcesses, program: str, *, grace_s: float = 5.0) -> Child:
    return managed.start("child", "-c", program, grace_s=grace_s)


def inner_pid(child: Child) -> int:
    until(lambda: child.log.read_text().endswith("\n"))
    return int(child.log.read_text())


@pytest.mark.processes
def test_killing_the_group_takes_its_children_along(managed: ManagedProcesses) -> None:
    with managed:
        child = start(managed, NESTED.format(apart=False))
        pid = inner_pid(child)
        assert child.kill_group() == 2
        assert child.exit_code == -signal.SIGKILL
        assert not alive(pid)


@pytest.mark.processes
def test_a_process_that_outlives_the_kill_is_a_failure_and_does_not_stay(
    managed: ManagedProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    killpg = os.killpg

    def kill_and_wait(leader: int, number: int) -> None:
        killpg(leader, number)
        until(lambda: not alive(leader), what="the end of the leader")

    monkeypatch.setattr(os, "killpg", kill_and_wait)
    monkeypatch.setattr(processes, "GONE_WITHIN_S", 0.2)
    with managed:
        child = start(managed, NESTED.format(apart=True))
        pid = inner_pid(child)
        with pytest.raises(DemoError, match="1 processes of child outlived its SIGKILL"):
            child.kill_group()
        until(lambda: not alive(pid))


@pytest.mark.processes
def test_nothing_is_left_behind_whatever_happens(managed: ManagedProcesses) -> None:
    with pytest.raises(ZeroDivisionError), managed:
        first = start(managed, NESTED.format(apart=True))
        pid = inner_pid(first)
        second = start(managed, "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)", grace_s=0.5)
        raise ZeroDivisionError
    assert first.exit_code == -signal.SIGTERM
    assert second.exit_code is not None
    assert not alive(pid)


@pytest.mark.processes
def test_a_worker_that_has_left_cannot_be_killed(managed: ManagedProcesses) -> None:
    with managed:
        child = start(managed, "raise SystemExit(3)")
        assert child.wait(60.0) == 3
        with pytest.raises(DemoError, match="left before it could be killed, with exit code 3"):
            child.kill_group()


@pytest.mark.processes
def test_waiting_for_a_process_has_a_deadline(managed: ManagedProcesses) -> None:
    with managed:
        child = start(managed, "import time; time.sleep(60)")
        with pytest.raises(DemoError, match="child did not end within"):
            child.wait(0.05)


@pytest.mark.processes
def test_the_log_explains_a_stack_that_does_not_start(
    managed: ManagedProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_EMULATOR_PYTHON", "nowhere/python")
    with managed, pytest.raises(DemoError, match="the control plane ended at once with exit code 1") as failure:
        managed.start_stack()
    assert failure.value.log is not None
    assert "nowhere/python does not exist" in log_tail(failure.value.log)


@pytest.mark.processes
def test_an_error_of_the_api_is_blamed_on_a_stack_that_is_gone(
    managed: ManagedProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "STACK_NAME", "child")
    refusal = OSError("connection refused")
    with managed:
        child = start(managed, "import time; time.sleep(60)")
        assert str(managed.explain(refusal)) == "a call to the control plane failed: connection refused"
        child.kill_group()
        assert str(managed.explain(refusal)) == "the control plane ended by itself with exit code -9"
        assert managed.explain(refusal).log == child.log


def test_children_get_nothing_of_a_persons_settings() -> None:
    inherited = {"PATH": "/bin", "BATON_API_KEY": "x", "AWS_PROFILE": "x", "SALAD_MACHINE_ID": "x", "PYTHONPATH": "x"}
    assert own_environment(inherited) == {"PATH": "/bin"}
    inherited["BATON_EMULATOR_PYTHON"] = "/opt/emulator/bin/python"  # where the emulator is, on this machine
    assert own_environment(inherited).keys() == {"PATH", "BATON_EMULATOR_PYTHON"}
