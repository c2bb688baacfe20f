"""Test the supervisor with real processes."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from baton.contract.jobs.job import FailureClass
from gpu_client.agent.io.log_shipper import LogSpool
from gpu_client.agent.process.failures import classify_exit
from gpu_client.agent.process.output import TrainerOutput
from gpu_client.agent.process.supervisor import TrainerProcess, start_trainer
from tests.kits.waiting import alive, until

pytestmark = [pytest.mark.processes, pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")]

HERE = Path(__file__).parent
WAIT_S = 60
MEMBERS = ("trainer", "child", "grandchild", "daemon")
ENV = {"PATH": os.environ["PATH"], "MARK": "only this"}


def start(tmp_path: Path, *command: str, output: TrainerOutput | None = None, grace_s: float = 0.5) -> TrainerProcess:
    return start_trainer(command, ENV, tmp_path, output, leftover_grace_s=grace_s, count_oom_kills=lambda: None)


def python(tmp_path: Path, code: str, *arguments: str, output: TrainerOutput | None = None) -> TrainerProcess:
    return start(tmp_path, sys.executable, "-c", code, *arguments, output=output)


def descriptors_open() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def family(directory: Path) -> dict[str, int]:
    until(lambda: all((directory / name).exists() for name in MEMBERS), WAIT_S)
    return {name: int((directory / name).read_text()) for name in MEMBERS}


def shows(process: TrainerProcess, text: str) -> None:
    until(lambda: any(text in line for line in process.output.last_lines()), WAIT_S, what=text)


def test_a_command_runs_with_what_it_was_given_and_nothing_else(tmp_path: Path) -> None:
    code = (
        "import os, sys, signal\n"
        "print(os.getcwd()); print(sorted(k for k in os.environ if k not in ('LC_CTYPE', 'BATON_WARDEN')))\n"
        "print(os.environ['MARK'], sys.stdin.read() == '', sorted(os.listdir('/proc/self/fd'))[:3])\n"
        "print(len(os.listdir('/proc/self/fd')) - 1, file=sys.stderr)\n"
        "print([signal.getsignal(s) == signal.SIG_DFL for s in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)])\n"
        "print(os.getpgrp() == os.getpid())\n"
    )
    process = python(tmp_path, code)
    status = process.wait(WAIT_S)
    assert status is not None
    assert status.clean, process.output.last_lines()
    lines = process.output.last_lines()
    assert lines.pop(lines.index("3")) == "3"  # Standard streams only; standard error comes in order of its own.
    assert lines == [str(tmp_path), "['MARK', 'PATH']", "only this True ['0', '1', '2']", "[True, True, True]", "True"]
    assert process.poll() == status
    assert not status.stopped_by_us


def test_exit_code_and_last_lines(tmp_path: Path) -> None:
    process = python(tmp_path, "print('first'); raise ValueError('bad rate')")
    status = process.wait(WAIT_S)
    assert status is not None
    assert (status.code, status.signal, status.oom_suspected, status.clean) == (1, None, False, False)
    failure = classify_exit(status, process.output.last_lines())
    assert (failure.failure_class, failure.reason) == (FailureClass.SCRIPT_ERROR, "ValueError: bad rate")


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (signal.SIGSEGV, FailureClass.SEGFAULT),
        (signal.SIGKILL, FailureClass.OUT_OF_MEMORY),
        (signal.SIGTERM, FailureClass.KILLED_BY_SIGNAL),
    ],
)
def test_death_by_a_signal_that_is_not_ours(tmp_path: Path, number: signal.Signals, expected: FailureClass) -> None:
    process = python(tmp_path, f"import os; os.kill(os.getpid(), {int(number)})")
    status = process.wait(WAIT_S)
    assert status is not None
    assert (status.code, status.signal, status.stopped_by_us) == (None, number, False)
    assert status.oom_suspected == (number == signal.SIGKILL)
    assert classify_exit(status, []).failure_class == expected


@pytest.mark.parametrize("command", [["no-such-command", "x"], ["/"], ["./not-executable"]])
def test_a_command_that_cannot_be_started(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "not-executable").write_text("x")
    process = start(tmp_path, *command)
    status = process.wait(WAIT_S)
    assert status is not None
    assert status.start_error
    assert process.pid is None
    assert classify_exit(status, []).failure_class == FailureClass.COMMAND_NOT_FOUND
    assert process.stop(1) == status


def test_what_is_wrong_with_the_call_is_an_error(tmp_path: Path) -> None:
    descriptors = descriptors_open()
    with pytest.raises(ValueError, match="empty"):
        start_trainer([], ENV, tmp_path)
    with pytest.raises(ValueError, match="null byte"):
        start_trainer(["a\0b"], ENV, tmp_path)
    with pytest.raises(FileNotFoundError):
        start_trainer(["true"], ENV, tmp_path / "missing")
    assert descriptors_open() == descriptors


def test_nothing_of_ours_is_left_open_after_a_run(tmp_path: Path) -> None:
    before = descriptors_open()
    for _ in range(3):
        start(tmp_path, "true").wait(WAIT_S)
    assert descriptors_open() == before


def test_a_killed_agent_takes_the_whole_family_with_it(tmp_path: Path) -> None:
    agent = subprocess.Popen([sys.executable, str(HERE / "fake_agent.py"), str(tmp_path)], start_new_session=True)
    try:
        pids = family(tmp_path)
        until((tmp_path / "guardian").exists, WAIT_S)
        pids["guardian"] = int((tmp_path / "guardian").read_text())
        assert all(alive(pid) for pid in pids.values())
        assert os.getsid(pids["daemon"]) not in {os.getsid(pids["guardian"]), os.getsid(pids["trainer"])}
    finally:
        os.killpg(agent.pid, signal.SIGKILL)  # The agent's whole group, as the demonstration does it.
        agent.wait()
    until(lambda: not any(alive(pid) for pid in pids.values()), what="the end of the family", every_s=0.01)


def test_a_killed_warden_takes_the_whole_family_with_it(tmp_path: Path) -> None:
    process = start(tmp_path, sys.executable, str(HERE / "family_trainer.py"), str(tmp_path), "stays")
    pids = family(tmp_path)
    os.kill(process._guardian.pid, signal.SIGKILL)
    status = process.wait(WAIT_S)
    assert status is not None
    assert not status.clean
    assert not any(alive(pid) for pid in pids.values())


def test_stop_escalates_and_leaves_nobody(tmp_path: Path) -> None:
    process = start(tmp_path, sys.executable, str(HERE / "family_trainer.py"), str(tmp_path), "stays")
    pids = family(tmp_path)
    started = time.monotonic()
    status = process.stop(0.5)
    took_s = time.monotonic() - started
    assert (status.signal, status.stopped_by_us, status.oom_suspected) == (signal.SIGKILL, True, False)
    assert 0.5 <= took_s < WAIT_S
    assert not any(alive(pid) for pid in pids.values())
    assert process.stop(1) == status


def test_a_hanging_trainer_is_killed_at_once_without_a_grace(tmp_path: Path) -> None:
    process = start(tmp_path, "sleep", "60")
    status = process.stop(0)
    assert (status.signal, status.stopped_by_us, status.oom_suspected) == (signal.SIGKILL, True, False)


LADDER = """
import signal, sys, time
def told(number, frame):
    print(signal.Signals(number).name, flush=True)
    if signal.Signals(number).name == sys.argv[1]:
        sys.exit(0)
signal.signal(signal.SIGTERM, told)
print("ready", flush=True)
while True:
    time.sleep(0.01)
"""


def test_a_polite_signal_comes_first(tmp_path: Path) -> None:
    process = python(tmp_path, LADDER, "SIGTERM")
    shows(process, "ready")
    status = process.stop(WAIT_S)
    assert (status.code, status.signal, status.stopped_by_us) == (0, None, True)
    assert process.output.last_lines() == ["ready", "SIGTERM"]


def test_a_second_impatient_stop_makes_it_faster(tmp_path: Path) -> None:
    process = python(tmp_path, LADDER, "never")
    shows(process, "ready")
    patient = threading.Thread(target=process.stop, args=(600,), daemon=True)
    patient.start()
    shows(process, "SIGTERM")
    started = time.monotonic()
    assert process.stop(0).signal == signal.SIGKILL
    patient.join(WAIT_S)
    assert not patient.is_alive()
    assert time.monotonic() - started < 2 * WAIT_S


def test_forked_children_do_not_outlive_the_trainer(tmp_path: Path) -> None:
    process = start(tmp_path, sys.executable, str(HERE / "family_trainer.py"), str(tmp_path), "leaves")
    status = process.wait(WAIT_S)
    assert status is not None
    assert status.clean
    assert not status.stopped_by_us  # The clean-up afterwards does not count.
    pids = family(tmp_path)
    assert not any(alive(pid) for pid in pids.values())


def test_massive_output_does_not_hold_up_anything(tmp_path: Path) -> None:
    output = TrainerOutput(last_lines=5, spool=LogSpool(max_bytes=100_000, chunk_bytes=10_000))
    code = (
        "import sys, os\n"
        "os.write(1, os.urandom(3_000_000)); os.write(2, b'\\n')\n"
        "sys.stdout.write('x' * 20_000_000 + '\\n')\n"
        "for i in range(20_000): sys.stdout.write(f'\\r{i}/20000 [###]')\n"
        "for i in range(100_000): sys.stdout.write(f'\\nline {i} ' + 'y' * 40)\n"
    )
    process = python(tmp_path, code, output=output)
    status = process.wait(60)
    assert status is not None
    assert status.clean
    assert output.last_lines()[-1] == "line 99999 " + "y" * 40
    assert output.spool.dropped_total_bytes > 4_000_000
    first = output.spool.next_chunk()
    assert first is not None
    assert first.dropped_bytes == output.spool.dropped_total_bytes


def test_files_open_for_writing(tmp_path: Path) -> None:
    (tmp_path / "read").write_text("x")
    code = (
        "import os, time\n"
        "a = open('written', 'w'); b = open('read'); c = open('closed', 'w'); c.close()\n"
        "if os.fork() == 0: d = open('by-child', 'r+b' if os.path.exists('by-child') else 'wb')\n"
        "print('ready', flush=True); time.sleep(60)\n"
    )
    process = python(tmp_path, code)
    until(lambda: process.output.last_lines() == ["ready", "ready"], WAIT_S)
    found = {path.name for path in process.files_open_for_writing() if path.parent == tmp_path}
    assert found == {"written", "by-child"}
    process.stop(0)
    assert process.files_open_for_writing() == set()


def test_a_memory_kill_of_a_worker_process_is_noticed(tmp_path: Path) -> None:
    counts = iter([3, 4])
    process = start_trainer(["sh", "-c", "exit 1"], ENV, tmp_path, count_oom_kills=lambda: next(counts))
    status = process.wait(WAIT_S)
    assert status is not None
    assert status.oom_suspected
    assert classify_exit(status, ["worker lost"]).failure_class == FailureClass.OUT_OF_MEMORY


def test_the_trainer_is_preferred_by_the_memory_killer(tmp_path: Path) -> None:
    process = start(tmp_path, "sh", "-c", "cat /proc/self/oom_score_adj")
    process.wait(WAIT_S)
    own = int(Path("/proc/self/oom_score_adj").read_text())
    assert int(process.output.last_lines()[0]) == min(own + 300, 1000)
