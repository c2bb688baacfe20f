"""Guard the processes of a training command, so that neither the agent nor the command outlives the other.

The supervisor runs ``python -I -S process_guardian.py CONTROL_FD STATUS_FD LEFTOVER_GRACE_S COMMAND...`` as the leader
of its own session. The guardian imports the standard library only, because the guardian has to start in milliseconds
and to survive a broken training environment.

* The guardian is the *child subreaper* (Linux) of the command's processes, so that a grandchild that calls ``setsid``
  or loses its parent stays a descendant of the guardian.
* The command gets a process group of its own. SIGTERM goes to that group; SIGKILL goes to every descendant. (SIGKILL in
  a shared group would kill the guardian, the only process that can check the deaths.)
* The guardian owns the read end of the control pipe. End of file means the death of the agent: the guardian kills every
  process at once. Commands are lines: ``signal N`` and ``kill``.
* The guardian reports on the status pipe, one line each: ``note TEXT``, ``started PID``, ``failed ERRNO TEXT``, ``exit
  CODE|- SIGNAL|- DELIVERED``, ``done LEFTOVERS UNKILLABLE,...``. DELIVERED is the last signal that went to the group
  while the command lived, 0 without one.
* When the command's main process ends, leftover processes get SIGTERM, a grace, and SIGKILL.

On systems without /proc and subreapers (macOS) signals reach the process group only.
"""

import ctypes
import os
import select
import signal
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

# A process in uninterruptible sleep (a hung GPU driver) cannot be killed, therefore the guardian gives up after this
# time and reports the process.
KILL_PATIENCE_S = 10.0
LEFTOVER_POLL_S = 0.05
# Raises the command's badness, so that the kernel's OOM killer picks the command and not the agent, which reports the
# kill.
OOM_SCORE_RAISE = 300
OOM_SCORE_MAX = 1000

IS_LINUX = sys.platform.startswith("linux")
IGNORED_SIGNALS = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGALRM,
)
# Python ignores these two signals, and exec preserves ignored signals, which the command does not expect.
PYTHON_IGNORES = (signal.SIGPIPE, signal.SIGXFSZ)


def _prctl(option: int, value: int) -> bool:
    """Call prctl; returns False if prctl does not exist or refuses."""
    if not IS_LINUX:
        return False
    try:
        return bool(ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0)
    except (AttributeError, OSError):
        return False


def list_descendants(ancestor_pid: int) -> list[int]:
    """Return the ids of living (not zombie) descendants of a process, from /proc. Linux only; [] elsewhere."""
    children: dict[int, list[int]] = {}
    zombies: set[int] = set()
    try:
        names = os.listdir("/proc")  # noqa: PTH208 (pathlib would triple the start-up time)
    except OSError:
        return []
    for name in names:
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as stat:  # noqa: PTH123
                fields = stat.read().rpartition(b")")[2].split()
        except OSError:
            continue  # The process has ended since the listing.
        children.setdefault(int(fields[1]), []).append(int(name))
        if fields[0] in (b"Z", b"X"):
            zombies.add(int(name))
    found: list[int] = []
    frontier = [ancestor_pid]
    while frontier:
        for pid in children.get(frontier.pop(), ()):
            frontier.append(pid)
            if pid not in zombies:
                found.append(pid)
    return found


def _send(pid: int, signal_number: int) -> bool:
    """Signal a process (negative: a group); returns False if the process is gone or belongs to another user."""
    try:
        os.kill(pid, signal_number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _become_command(command: list[str], guardian_pid: int, error_fd: int) -> None:
    """Replace the forked child by the command: own group, clean signal state, exec. Never returns."""
    try:
        os.setpgid(0, 0)
        # The kernel kills the command if the guardian itself is SIGKILLed.
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guardian_pid:
            os._exit(127)
        try:
            with open("/proc/self/oom_score_adj", "r+") as score:  # noqa: PTH123
                raised = min(int(score.read()) + OOM_SCORE_RAISE, OOM_SCORE_MAX)
                score.seek(0)
                score.write(str(raised))
        except OSError:
            pass  # Not Linux, or forbidden: the score is a preference only.
        signal.set_wakeup_fd(-1)
        for number in (*IGNORED_SIGNALS, *PYTHON_IGNORES):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.execvp(command[0], command)  # noqa: S606 (no shell is the point)
    except OSError as error:
        os.write(error_fd, f"{error.errno} {error.strerror}".encode())
    finally:
        os._exit(127)


class ProcessGuardian:
    """Event loop over the control pipe, dying children and deadlines."""

    def __init__(self, control_fd: int, status_fd: int, leftover_grace_s: float) -> None:
        self._control_fd = control_fd
        self._status_fd = status_fd
        self._leftover_grace_s = leftover_grace_s
        self._command_pid = 0
        self._command_alive = False
        self._delivered = 0
        self._control = b""
        self._agent_alive = True
        self._leftovers = 0
        self._leftover_deadline: float | None = None
        self._kill_deadline: float | None = None

    def run(self, command: list[str]) -> int:
        """Start the command and stay until the command and its descendants are gone."""
        wake_fd, wake_write_fd = os.pipe()
        for fd in (wake_fd, wake_write_fd):
            os.set_blocking(fd, False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.set_wakeup_fd(wake_write_fd, warn_on_full_buffer=False)
        if not _prctl(PR_SET_CHILD_SUBREAPER, 1):
            self._report("note no child subreaper here: only the command's process group can be ended")
        if not self._start(command):
            return 127
        poller = select.poll()
        poller.register(self._control_fd, select.POLLIN)
        poller.register(wake_fd, select.POLLIN)
        try:
            while not self._finished():
                for fd, _events in poller.poll(self._pause_ms()):
                    if fd == wake_fd:
                        os.read(wake_fd, 4096)
                    elif not self._read_control():
                        poller.unregister(self._control_fd)
                self._reap()
        finally:
            self._kill_all()
        return 0

    def _start(self, command: list[str]) -> bool:
        guardian_pid = os.getpid()
        error_fd, error_write_fd = os.pipe()  # A successful exec closes the pipe.
        pid = os.fork()
        if pid == 0:
            _become_command(command, guardian_pid, error_write_fd)
        os.close(error_write_fd)
        # The agent waits for the end of the output, therefore only the command may hold the output open.
        null_fd = os.open(os.devnull, os.O_RDWR)
        os.dup2(null_fd, 1)
        os.dup2(null_fd, 2)
        # The read returns after the child's exec or failure; by then the group exists.
        failure = os.read(error_fd, 4096)
        os.close(error_fd)
        if failure:
            os.waitpid(pid, 0)
            self._report("failed " + failure.decode(errors="replace"))
            return False
        self._command_pid = pid
        self._command_alive = True
        self._report(f"started {pid}")
        return True

    def _report(self, line: str) -> None:
        try:
            os.write(self._status_fd, line.encode() + b"\n")
        except BrokenPipeError:
            self._agent_alive = False

    def _read_control(self) -> bool:
        """Execute the commands in the control pipe; returns False at the end of the pipe."""
        data = os.read(self._control_fd, 4096)
        if not data:
            self._agent_alive = False
            self._begin_kill()
            return False
        *lines, self._control = (self._control + data).split(b"\n")
        for line in lines:
            if line == b"kill":
                self._begin_kill()
            elif line.startswith(b"signal "):
                self._signal_group(int(line[7:]))
        return True

    def _signal_group(self, signal_number: int) -> None:
        # After the command's end, another process may have its id.
        if self._command_alive and _send(-self._command_pid, signal_number):
            self._delivered = signal_number

    def _begin_kill(self) -> None:
        if self._kill_deadline is None:
            self._kill_deadline = time.monotonic() + KILL_PATIENCE_S
            if self._command_alive:
                self._delivered = signal.SIGKILL
        self._kill_all()

    def _alive(self) -> list[int]:
        """Return the ids of the living processes; without /proc the group as a negative number."""
        if IS_LINUX:
            return list_descendants(os.getpid())
        return [-self._command_pid] if self._command_pid and _send(-self._command_pid, 0) else []

    def _kill_all(self) -> None:
        if self._command_alive:
            _send(-self._command_pid, signal.SIGKILL)
        for pid in self._alive():
            _send(pid, signal.SIGKILL)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._command_pid and self._command_alive:
                self._command_alive = False
                code = str(os.WEXITSTATUS(status)) if os.WIFEXITED(status) else "-"
                number = str(os.WTERMSIG(status)) if os.WIFSIGNALED(status) else "-"
                self._report(f"exit {code} {number} {int(self._delivered)}")

    def _pause_ms(self) -> float | None:
        """Return the milliseconds until the next check; None while no shutdown is in progress."""
        waiting = self._kill_deadline is not None or not self._command_alive
        return LEFTOVER_POLL_S * 1000 if waiting else None

    def _finished(self) -> bool:
        """Advance the shutdown; returns True when all processes are dead or unkillable."""
        if self._command_alive and self._kill_deadline is None:
            return False
        alive = self._alive()
        now = time.monotonic()
        if not alive and not self._command_alive:
            self._report(f"done {self._leftovers} -")
            return True
        if self._kill_deadline is not None:
            if now >= self._kill_deadline:
                self._report(f"done {self._leftovers} {','.join(str(pid) for pid in alive) or '-'}")
                return True
            self._kill_all()
        elif self._leftover_deadline is None:
            self._leftovers = len(alive)
            self._leftover_deadline = now + self._leftover_grace_s
            for pid in alive:
                _send(pid, signal.SIGTERM)
        elif now >= self._leftover_deadline:
            self._begin_kill()
        return False


def main(arguments: list[str]) -> int:
    """Run the guardian; the top of this file describes the arguments."""
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    control_fd, status_fd = int(arguments[0]), int(arguments[1])
    # The command must not inherit the pipes, because the command could hold a pipe open or write false reports.
    os.set_inheritable(control_fd, False)
    os.set_inheritable(status_fd, False)
    return ProcessGuardian(control_fd, status_fd, float(arguments[2])).run(arguments[3:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
