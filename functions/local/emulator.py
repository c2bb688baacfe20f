"""The emulated cloud: a child process that serves AWS APIs on 127.0.0.1 and ends with its parent."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from botocore.config import Config

from functions.local.lifecycle import HOST, Lifecycle, bind_socket
from functions.storage.clients import new_session

logger = logging.getLogger(__name__)

REGION = "us-east-1"
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 15.0
POLL_INTERVAL_S = 0.05
LOG_TAIL_BYTES = 4_000
EXIT_DIRECTORY_IN_USE = 73
"""Exit status of `functions.local.emulated`, which another environment runs."""
PYTHON_VARIABLE = "BATON_EMULATOR_PYTHON"
_ROOT = Path(__file__).resolve().parents[2]


class EmulatorError(Exception):
    """The emulator failed to start, or ended early. The message ends with the last lines of the log."""


class StateInUseError(EmulatorError):
    """Another emulator serves the state directory. The message names the process of its control plane."""


class Emulator(Lifecycle):
    """Process of ministack, which can start again after a stop.

    `state_dir`: directory of the durable state (README.md lists what survives); None keeps the state in memory.
    `port`: 0 selects a free port. `start_timeout_s`, `stop_timeout_s`: limits in seconds of the start and of the save
    at the stop. The process ends with its parent, also after `kill -9` of the parent.
    """

    def __init__(
        self,
        *,
        state_dir: Path | None = None,
        port: int = 0,
        start_timeout_s: float = START_TIMEOUT_S,
        stop_timeout_s: float = STOP_TIMEOUT_S,
    ) -> None:
        self._state_dir = state_dir.resolve() if state_dir is not None else None
        self._wanted_port = port
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._log_path: Path | None = None

    @property
    def endpoint_url(self) -> str:
        """Endpoint for AWS clients. Raises EmulatorError if the emulator is not running."""
        if self._process is None:
            raise EmulatorError("the emulator is not running")
        return f"http://{HOST}:{self._port}"

    @property
    def pid(self) -> int:
        """Process id of the emulator. Raises EmulatorError if the emulator is not running."""
        if self._process is None:
            raise EmulatorError("the emulator is not running")
        return self._process.pid

    def start(self) -> None:
        """Start the process; return once the health check succeeds.

        Raises EmulatorError (no environment, port in use, failed start).
        """
        if self._process is not None:
            raise EmulatorError("the emulator is already running")
        python = find_python()
        try:
            listener = bind_socket(self._wanted_port)
        except OSError as error:
            raise EmulatorError(str(error)) from error
        with listener:
            # The child inherits the bound socket, so no other process can take the port before the start.
            self._port = listener.getsockname()[1]
            self._spawn(python, listener)
        try:
            self._wait_until_healthy()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop the process after its save; kill the process after the timeout. No effect if not running."""
        process, self._process = self._process, None
        if process is None:
            return
        os.kill(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + self._stop_timeout_s
        while not _has_ended(process) and time.monotonic() < deadline:
            time.sleep(POLL_INTERVAL_S)
        if not _has_ended(process):
            logger.warning("the emulator did not stop within %.0f s and is killed", self._stop_timeout_s)
        self._reap(process)

    def kill(self) -> None:
        """Send SIGKILL to the process group, for tests of durability."""
        process, self._process = self._process, None
        if process is not None:
            self._reap(process)

    def _reap(self, process: subprocess.Popen[bytes]) -> None:
        # The leader is not reaped yet, so the kernel cannot have given its group id to another group.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdin is not None:
            process.stdin.close()
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None

    def client(self, service: str, *, max_connections: int = 32, **settings: Any) -> Any:
        """Create a botocore client of `service` ("dynamodb", "s3"); `settings` go to botocore's Config.

        Dummy credentials, `max_connections` pooled connections, 5 s to connect, 30 s to read, path-style buckets.
        """
        config = Config(
            **{
                "max_pool_connections": max_connections,
                "connect_timeout": 5,
                "read_timeout": 30,
                "retries": {"mode": "standard", "total_max_attempts": 3},
                "s3": {"addressing_style": "path"},
                "signature_version": "s3v4" if service == "s3" else None,
                **settings,
            }
        )
        return new_session().create_client(
            service,
            region_name=REGION,
            endpoint_url=self.endpoint_url,
            aws_access_key_id="test",
            aws_secret_access_key="test",  # noqa: S106 - the emulator accepts any
            config=config,
        )

    def log_tail(self) -> str:
        """Return the end of the emulator's log."""
        if self._log_path is None or not self._log_path.exists():
            return ""
        return self._log_path.read_bytes()[-LOG_TAIL_BYTES:].decode("utf-8", "replace")

    def _spawn(self, python: Path, listener: socket.socket) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="baton-emulator-")
        if self._state_dir is None:
            self._log_path = Path(self._scratch.name, "emulator.log")
        else:
            self._state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._log_path = self._state_dir / "emulator.log"
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [str(python), "-m", f"{__package__}.emulated"],
                cwd=self._log_path.parent,
                env=emulator_environment(os.environ, listener, self._port, self._state_dir, self._scratch.name),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(listener.fileno(),),
                process_group=0,
            )

    def _wait_until_healthy(self) -> None:
        deadline = time.monotonic() + self._start_timeout_s
        while time.monotonic() < deadline:
            self.check()
            try:
                with urllib.request.urlopen(f"{self.endpoint_url}/_ministack/health", timeout=2) as answer:  # noqa: S310
                    if answer.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                time.sleep(POLL_INTERVAL_S)
        raise EmulatorError(f"the emulator did not answer within {self._start_timeout_s:.0f} s\n{self.log_tail()}")

    def check(self) -> None:
        """Raise EmulatorError if the process has ended."""
        if self._process is None:
            raise EmulatorError("the emulator is not running")
        if _has_ended(self._process):
            if _exit_status(self._process) == EXIT_DIRECTORY_IN_USE:
                raise StateInUseError(self.log_tail().strip())
            raise EmulatorError(f"the emulator has ended by itself\n{self.log_tail()}")


def find_python() -> Path:
    """Return the interpreter of the environment with ministack. Raises EmulatorError, which names the remedy."""
    configured = os.environ.get(PYTHON_VARIABLE)
    python = Path(configured) if configured else _ROOT / ".emulator" / "bin" / "python"
    if not python.exists():
        raise EmulatorError(f"{python} does not exist: run `make setup`, or set {PYTHON_VARIABLE}")
    return python


def emulator_environment(
    inherited: Mapping[str, str], listener: socket.socket, port: int, state_dir: Path | None, scratch: str
) -> dict[str, str]:
    """Return the environment of the child: the parent's without AWS_* and PYTHON*, plus the settings of ministack."""
    inherited_variables = {
        name: value for name, value in inherited.items() if not name.startswith(("AWS_", "PYTHON", "MINISTACK"))
    }
    settings = {
        "PYTHONPATH": str(_ROOT),
        "PYTHONUNBUFFERED": "1",
        "GATEWAY_PORT": str(port),
        "BIND_HOST": HOST,
        "MINISTACK_REGION": REGION,
        "LOG_LEVEL": "WARNING",
        # Listeners that Baton does not use.
        "IOT_MTLS_ENABLED": "0",
        "SFTP_ENABLED": "0",
        "PERSIST_STATE": "0",
        "S3_PERSIST": "0",
        "BATON_EMULATOR_FD": str(listener.fileno()),
        "BATON_EMULATOR_PARENT": str(os.getpid()),
        # ministack removes its copies of the functions with a function, not at its end.
        "TMPDIR": scratch,
        "BATON_EMULATOR_SCRATCH": scratch,
    }
    if state_dir is not None:
        settings |= {
            "BATON_EMULATOR_STATE": str(state_dir),
            "PERSIST_STATE": "1",
            "STATE_DIR": str(state_dir / "services"),
            "S3_PERSIST": "1",
            "S3_DATA_DIR": str(state_dir / "s3"),
        }
    return inherited_variables | settings


def _exit_status(process: subprocess.Popen[bytes]) -> int | None:
    """Return the exit status of a dead process, without reaping the process."""
    ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    return ended.si_status if ended is not None and ended.si_code == os.CLD_EXITED else None


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Return True if the process is dead, without reaping the process as Popen.poll does."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
