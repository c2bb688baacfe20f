"""Local stack and agents as processes."""

from __future__ import annotations

import hashlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import BinaryIO, Self
from urllib.parse import urlsplit

import psutil

from functions.storage.clients import dynamodb_client, s3_client
from tests.kits.clouds.emulator import CREDENTIALS
from tests.kits.network.proxies import FaultyProxy
from tests.kits.stack.control_plane import ControlPlane
from tests.kits.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[3]
MARK = "E2E_MARK"
"""An environment variable that a test's processes pass on to all that they start."""
LIGHT_START = ROOT / "tests/kits/runner/light_start"
START_TIMEOUT_S = 90.0


def clean_environment() -> dict[str, str]:
    """Copy the environment without the settings of the product. Trainings start without torch's compiler."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("BATON_", "SALAD_"))}
    return {**kept, "PYTHONPATH": os.pathsep.join([str(LIGHT_START), *filter(None, [kept.get("PYTHONPATH")])])}


def leashed(number: signal.Signals) -> list[str]:
    """Make the start of a command line whose module or script dies with the test run."""
    return [sys.executable, str(Path(__file__).with_name("leash.py")), str(int(number))]


class Stack(ControlPlane):
    """Local stack without persistence; its presigned URLs lead through the proxy `s3`."""

    def __init__(
        self,
        *,
        sweep_interval_s: float = 1,
        fleet_clock_speed: int = 1,
        program: str = "functions.local",
        settings: Mapping[str, str] | None = None,
        log: BinaryIO | None = None,
    ) -> None:
        """Start the stack; `program`: a module or script with the same command line. `log`: receives standard error."""
        self.s3 = FaultyProxy()
        command = [*leashed(signal.SIGTERM), program, "--forget", "--port", "0", "--json"]
        self._process = subprocess.Popen(
            [
                *command,
                *("--sweep-interval-s", str(sweep_interval_s)),
                *("--fleet-clock-speed", str(fleet_clock_speed)),
            ],
            cwd=ROOT,
            env={**clean_environment(), "BATON_S3_PUBLIC_ENDPOINT": self.s3.url, **(settings or {})},
            stdout=subprocess.PIPE,
            stderr=log,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the local stack did not start"
        said = json.loads(line)
        self.s3.upstream = ("127.0.0.1", self._emulator_port())
        self.cloud_url = f"http://127.0.0.1:{self.s3.upstream[1]}"
        # A program without the tests' environment starts a stack, too.
        objects, tables = (make(self.cloud_url, **CREDENTIALS) for make in (s3_client, dynamodb_client))
        super().__init__(said["url"], said["keys"], objects, tables)
        place = urlsplit(self.url)
        self.front = (str(place.hostname), int(place.port or 0))

    def _emulator_port(self) -> int:
        for child in psutil.Process(self._process.pid).children(recursive=True):
            for connection in child.net_connections("tcp4"):
                if connection.status == psutil.CONN_LISTEN:
                    return int(connection.laddr.port)
        raise AssertionError("no child of the stack listens")

    def close(self) -> None:
        """Stop the stack and check that no process is left."""
        self.client.close()
        family = psutil.Process(self._process.pid).children(recursive=True)
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(120)
        finally:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait(60)
            assert self._process.stdout is not None
            self._process.stdout.close()
            self.s3.close()
        psutil.wait_procs(family, timeout=60)
        assert not [process for process in family if process.is_running()]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


class ForkedAgent:
    """Agent from the server in `agent_server.py`, with the part of the interface of `Popen` that tests use."""

    def __init__(self, environment: Mapping[str, str], log: BinaryIO) -> None:
        self.returncode: int | None = None
        self._link, link = socket.socketpair()
        with link:
            requests, _ = agent_server()
            socket.send_fds(requests, [json.dumps(dict(environment)).encode()], [link.fileno(), log.fileno()])
        self.pid = self._read()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; returns the exit code."""
        if self.returncode is None:
            if not select.select([self._link], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("gpu_client.agent", timeout or 0)
            self.returncode = self._read()
            self._link.close()
        return self.returncode

    def poll(self) -> int | None:
        """Return the exit code, None before the end."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal if the agent has not ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def _read(self) -> int:
        number = self._link.recv(4)
        assert number, "the server of the agents has ended"
        return int.from_bytes(number, "big", signed=True)


@cache
def agent_server() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start the server of forked agents, which ends with this process; returns the socket for requests."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        program = [*leashed(signal.SIGKILL), str(Path(__file__).with_name("agent_server.py")), str(theirs.fileno())]
        return ours, subprocess.Popen(
            program, cwd=ROOT, env=clean_environment(), stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
        )


class AgentProcess:
    """Agent as the leader of a session of its own. `fork`: from the server, which saves the import."""

    def __init__(
        self, environment: Mapping[str, str], log_path: Path, *, wrapper: Path | None = None, fork: bool = False
    ) -> None:
        self.log_path = log_path
        program = str(wrapper) if wrapper else "gpu_client.agent"
        self.process: subprocess.Popen[bytes] | ForkedAgent
        with log_path.open("ab") as log:
            self.process = (
                ForkedAgent(environment, log)
                if fork
                else subprocess.Popen(
                    [*leashed(signal.SIGKILL), program],
                    cwd=ROOT,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    @property
    def pid(self) -> int:
        """Return the id of the agent's process, session and process group."""
        return self.process.pid

    def last_step(self) -> int:
        """Return the number of the last step that the trainer has printed."""
        said = (line for line in self.log().splitlines() if "| step " in line)
        return max((int(line.rpartition(" ")[2]) for line in said), default=0)

    def log(self) -> str:
        """Read the log so far."""
        return self.log_path.read_text(errors="replace")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the agent."""
        self.process.send_signal(number)

    def kill_group(self) -> None:
        """Kill the whole process group, as the removal of a container does."""
        os.killpg(self.pid, signal.SIGKILL)
        self.process.wait(60)

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """Wait for the end; returns the exit code."""
        return self.process.wait(timeout_s)


def marked(mark: str) -> list[psutil.Process]:
    """List living processes with the mark in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def chain(steps: int) -> bytes:
    """Compute the state of `trainers/chain.py` after `steps` steps."""
    digest = hashlib.sha256(b"seed").hexdigest()
    for step in range(1, steps + 1):
        digest = hashlib.sha256(f"{digest}{step}".encode()).hexdigest()
    return digest.encode()


def weights(job_id: str, state: bytes) -> bytes:
    """Compute the weights of `trainers/chain.py`, different for each job."""
    return hashlib.shake_128(job_id.encode() + state).digest(32_000)
