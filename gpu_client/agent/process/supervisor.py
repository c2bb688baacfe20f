"""Run one training command and end every process that the command starts.

The command runs under a guardian (see ``process_guardian.py``), which dies with the agent and kills all descendants.
This module is the agent's side: start, wait, stop with escalation, exit status, output.

The command inherits exactly the given environment, no other descriptors, and an empty standard input.
"""

import contextlib
import logging
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from gpu_client.agent.process import process_guardian
from gpu_client.agent.process.failures import ExitStatus
from gpu_client.agent.process.output import TrainerOutput

_log = logging.getLogger(__name__)

# Marks every process of one trainer, so that the agent finds the processes even if their guardian was killed.
GUARDIAN_MARK = "BATON_WARDEN"
START_TIMEOUT_S = 30.0
LEFTOVER_GRACE_S = 2.0
# Time beyond KILL_PATIENCE_S, after which the guardian gives up on unkillable processes, until the supervisor kills an
# unresponsive guardian.
GUARDIAN_MARGIN_S = 5.0
OUTPUT_DRAIN_S = 5.0
READ_BYTES = 64 * 1024


def read_oom_kill_count(
    membership: Path = Path("/proc/self/cgroup"), hierarchy: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Return the count of OOM kills in the agent's control group; None if the count is unreadable.

    cgroup v2 keeps the count in ``memory.events``, v1 in ``memory.oom_control``.
    """
    candidates: list[Path] = []
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        group = group.lstrip("/")
        if number == "0":
            # Without a cgroup namespace, a container reads a path of the host, while the visible root is the
            # container's own group. Therefore both paths are candidates.
            candidates += [hierarchy / group / "memory.events", hierarchy / "memory.events"]
        elif "memory" in controllers.split(","):
            candidates += [hierarchy / "memory" / group / "memory.oom_control"]
            candidates += [hierarchy / "memory" / "memory.oom_control"]
    for candidate in candidates:
        try:
            found = re.search(r"^oom_kill (\d+)$", candidate.read_text(), re.MULTILINE)
        except OSError:
            continue
        if found:
            return int(found.group(1))
    return None


class TrainerProcess:
    """Process of a training command; see ``start_trainer``. Thread-safe."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        cwd: Path,
        *,
        output: TrainerOutput,
        leftover_grace_s: float,
        count_oom_kills: Callable[[], int | None],
    ) -> None:
        self.output = output
        self._count_oom_kills = count_oom_kills
        self._oom_kills_before = count_oom_kills()
        self._mark = secrets.token_hex(16)
        self._started = threading.Event()
        self._main_exited = threading.Event()
        self._done = threading.Event()
        self._status: ExitStatus | None = None
        self._pid: int | None = None
        self._start_error: str | None = None
        self._main_exit: tuple[int | None, int | None, int] | None = None
        self._unkillable: tuple[int, ...] = ()
        self._forced = False
        self._control_lock = threading.Lock()

        control_read_fd, control_fd = os.pipe()
        status_fd, status_write_fd = os.pipe()
        output_fd, output_write_fd = os.pipe()
        self._control_fd: int | None = control_fd
        script = [sys.executable, "-I", "-S", str(Path(process_guardian.__file__))]
        arguments = [str(control_read_fd), str(status_write_fd), str(leftover_grace_s), *command]
        try:
            self._guardian = subprocess.Popen(
                script + arguments,
                env={**env, GUARDIAN_MARK: self._mark},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=output_write_fd,
                stderr=output_write_fd,
                pass_fds=(control_read_fd, status_write_fd),
                start_new_session=True,
            )
        except (OSError, ValueError):
            for fd in (control_fd, status_fd, output_fd):
                os.close(fd)
            raise
        finally:
            for fd in (control_read_fd, status_write_fd, output_write_fd):
                os.close(fd)
        self._reader = threading.Thread(target=self._read_output, args=(output_fd,), name="trainer-output", daemon=True)
        self._reader.start()
        threading.Thread(target=self._read_status, args=(status_fd,), name="trainer-status", daemon=True).start()
        if not self._started.wait(START_TIMEOUT_S):
            self._kill_guardian()
            self._done.wait(GUARDIAN_MARGIN_S)
            raise TimeoutError(f"the guardian did not start {command[0]!r} within {START_TIMEOUT_S:.0f} s")

    @property
    def pid(self) -> int | None:
        """Return the id of the command's main process and process group; None if the command did not start."""
        return self._pid

    def poll(self) -> ExitStatus | None:
        """Return the exit status; None while a process of the command may still run."""
        return self._status

    def wait(self, timeout_s: float | None = None) -> ExitStatus | None:
        """Wait until the command and its descendants are gone; returns None after ``timeout_s``."""
        self._done.wait(timeout_s)
        return self._status

    def stop(self, grace_s: float) -> ExitStatus:
        """Stop the command: SIGTERM, after ``grace_s`` SIGKILL (0: at once). Returns when every process is dead.

        SIGTERM goes to the command's process group, SIGKILL to every descendant. A second call, from another thread and
        with a shorter grace, shortens the first call. The result names unkillable processes.
        """
        deadline = time.monotonic() + grace_s
        if grace_s > 0:
            self._command(f"signal {int(signal.SIGTERM)}")
            self._main_exited.wait(grace_s)
            # The guardian gives leftover processes its own grace, which the caller's grace limits.
            self._done.wait(max(0.0, deadline - time.monotonic()))
        if not self._done.is_set():
            self._command("kill")
            if not self._done.wait(process_guardian.KILL_PATIENCE_S + GUARDIAN_MARGIN_S):
                self._kill_guardian()
        self._done.wait()
        assert self._status is not None  # set before _done
        return self._status

    def files_open_for_writing(self) -> set[Path]:
        """Return the regular files that a process of this trainer holds open for writing."""
        files: set[Path] = set()
        try:
            family = psutil.Process(self._guardian.pid).children(recursive=True)
        except psutil.Error:
            return files
        for process in family:
            try:
                opened = process.open_files()
            except psutil.Error:
                continue  # The process has ended or is hidden; the watcher then relies on the stability of the files.
            # Some systems do not report the mode; every open file then counts as open for writing.
            files.update(Path(file.path) for file in opened if getattr(file, "mode", "w") != "r")
        return files

    def _command(self, line: str) -> None:
        with self._control_lock:
            if self._control_fd is None:
                return
            # A broken pipe means the end of the guardian, which the status thread handles.
            with contextlib.suppress(BrokenPipeError):
                os.write(self._control_fd, line.encode() + b"\n")

    def _read_output(self, output_fd: int) -> None:
        try:
            while data := os.read(output_fd, READ_BYTES):
                self.output.feed(data)
        finally:
            os.close(output_fd)
            self.output.finish()

    def _read_status(self, status_fd: int) -> None:
        """Read the guardian's reports to their end, then set the exit status."""
        with os.fdopen(status_fd, encoding="utf-8", errors="replace") as reports:
            for report in reports:
                self._apply_report(report.rstrip("\n"))
        guardian_code = self._guardian.wait()
        if self._main_exit is None and self._start_error is None:
            _log.error("the guardian ended (%s) without a report; killing its processes from here", guardian_code)
            self._kill_marked()
        with self._control_lock:
            if self._control_fd is not None:
                os.close(self._control_fd)
                self._control_fd = None
        self._reader.join(OUTPUT_DRAIN_S)
        if self._reader.is_alive():
            _log.warning("a process still holds the trainer's output open; the last lines may be missing")
        self._status = self._make_status()
        self._main_exited.set()
        self._done.set()
        self._started.set()

    def _apply_report(self, report: str) -> None:
        kind, _, rest = report.partition(" ")
        if kind == "started":
            self._pid = int(rest)
            self._started.set()
        elif kind == "failed":
            self._start_error = rest.partition(" ")[2]
        elif kind == "exit":
            code, number, delivered = rest.split(" ")
            self._main_exit = (
                None if code == "-" else int(code),
                None if number == "-" else int(number),
                int(delivered),
            )
            self._main_exited.set()
        elif kind == "done":
            leftovers, unkillable = rest.split(" ")
            if leftovers != "0":
                _log.warning("the trainer left %s processes behind; the guardian stopped them", leftovers)
            if unkillable != "-":
                self._unkillable = tuple(int(pid) for pid in unkillable.split(","))
                _log.error("processes that cannot be killed: %s", unkillable)
        else:
            _log.warning("guardian: %s", report)

    def _make_status(self) -> ExitStatus:
        if self._start_error is not None:
            return ExitStatus(
                code=127, signal=None, oom_suspected=False, stopped_by_us=False, start_error=self._start_error
            )
        # No exit report means that the guardian was killed, and the command with the guardian, or that the guardian
        # could not kill the command.
        ours = signal.SIGKILL if self._forced or self._unkillable else 0
        code, number, delivered = self._main_exit or (None, int(signal.SIGKILL), int(ours))
        before, after = self._oom_kills_before, self._count_oom_kills()
        counted = before is not None and after is not None and after > before
        killed = number == signal.SIGKILL and delivered != signal.SIGKILL
        return ExitStatus(
            code=code,
            signal=number,
            oom_suspected=killed or (counted and code != 0),
            stopped_by_us=delivered != 0,
            unkillable_pids=self._unkillable,
        )

    def _kill_guardian(self) -> None:
        """Kill an unresponsive guardian, and every process that carries its mark."""
        _log.error("the guardian does not answer; killing its processes from here")
        self._forced = True
        self._guardian.kill()
        self._kill_marked()

    def _kill_marked(self) -> None:
        mark = f"{GUARDIAN_MARK}={self._mark}".encode()
        if self._pid is not None and not process_guardian.IS_LINUX:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._pid, signal.SIGKILL)
        deadline = time.monotonic() + GUARDIAN_MARGIN_S
        # A process may fork just before its death, therefore the search repeats until no process is left.
        while (marked := _pids_with_mark(mark)) and time.monotonic() < deadline:
            for pid in marked:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        self._unkillable = tuple(marked)


def _pids_with_mark(mark: bytes) -> list[int]:
    """Return the ids of living processes with ``mark`` in their initial environment. Linux only; [] elsewhere."""
    pids: list[int] = []
    for directory in Path("/proc").glob("[0-9]*"):
        # The process has ended, or belongs to another user. A zombie's environment reads as empty.
        with contextlib.suppress(OSError):
            if mark in (directory / "environ").read_bytes().split(b"\0"):
                pids.append(int(directory.name))
    return pids


def start_trainer(
    command: Sequence[str],
    env: Mapping[str, str],
    cwd: Path,
    output: TrainerOutput | None = None,
    *,
    leftover_grace_s: float = LEFTOVER_GRACE_S,
    count_oom_kills: Callable[[], int | None] = read_oom_kill_count,
) -> TrainerProcess:
    """Start ``command`` in ``cwd`` with exactly ``env``; its output goes to ``output``.

    For a command that cannot be executed, the function returns an ended process with ``start_error``. Raises ValueError
    for an empty command or a NUL in the command, OSError if ``cwd`` is missing or the machine cannot start processes,
    TimeoutError if the machine is too busy.
    """
    if not command or not command[0]:
        raise ValueError("the command is empty")
    return TrainerProcess(
        command,
        env,
        cwd,
        output=output or TrainerOutput(),
        leftover_grace_s=leftover_grace_s,
        count_oom_kills=count_oom_kills,
    )
