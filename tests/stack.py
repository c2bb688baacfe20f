"""The local stack and agents as real processes, and what tests ask of them."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import boto3
import psutil

from contract.history import AttemptView, EventView
from contract.jobs import InputRef, JobState, JobSubmit, JobView, Policy
from gpu_client.transport.api import BatonClient
from tests.proxies import FaultyProxy

ROOT = Path(__file__).parent.parent
TRAINERS = Path(__file__).parent / "e2e" / "trainers"
MARK = "E2E_MARK"
"""An environment variable that a test's processes pass on to all that they start."""
START_TIMEOUT_S = 90.0
PATIENCE_S = 60.0


def until(
    condition: Callable[[], Any], timeout_s: float = PATIENCE_S, *, what: str = "it", every_s: float = 0.05
) -> Any:
    """Wait until a condition holds, and give its value; fails if that takes longer than `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s} s"
        time.sleep(every_s)
    return found


def clean_environment() -> dict[str, str]:
    """Ours without settings of anything that is tested."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("BATON_", "SALAD_"))}


def leashed(number: signal.Signals) -> list[str]:
    """The beginning of a command line; what follows is a module or a script that must not outlive the test run."""
    return [sys.executable, str(Path(__file__).with_name("leash.py")), str(int(number))]


class Stack:
    """`python -m functions.local` with nothing kept, its presigned URLs leading through the proxy `s3`."""

    def __init__(self, *, sweep_interval_s: float = 1) -> None:
        self.s3 = FaultyProxy()
        command = [*leashed(signal.SIGTERM), "functions.local", "--forget", "--port", "0", "--json"]
        self._process = subprocess.Popen(
            [*command, "--sweep-interval-s", str(sweep_interval_s)],
            cwd=ROOT,
            env={**clean_environment(), "BATON_S3_PUBLIC_ENDPOINT": self.s3.url},
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the local stack did not start"
        said = json.loads(line)
        # The handlers log to standard output: unread, the pipe would fill up and stop them.
        self._log: deque[str] = deque(maxlen=2_000)
        self._drain = threading.Thread(target=self._log.extend, args=(self._process.stdout,), daemon=True)
        self._drain.start()
        self.url: str = said["url"]
        self.keys: dict[str, str] = said["keys"]
        place = urlsplit(self.url)
        self.front = (str(place.hostname), int(place.port or 0))
        self.s3.upstream = ("127.0.0.1", self._emulator_port())
        self.client = BatonClient(self.url, self.keys["admin"])
        self.objects = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{self.s3.upstream[1]}")

    def _emulator_port(self) -> int:
        for child in psutil.Process(self._process.pid).children(recursive=True):
            for connection in child.net_connections("tcp4"):
                if connection.status == psutil.CONN_LISTEN:
                    return int(connection.laddr.port)
        raise AssertionError("no child of the stack listens")

    def close(self) -> None:
        """End it; nothing of it is left."""
        self.client.close()
        family = psutil.Process(self._process.pid).children(recursive=True)
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(30)
        finally:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait(10)
            self._drain.join(10)
            assert self._process.stdout is not None
            self._process.stdout.close()
            self.s3.close()
        psutil.wait_procs(family, timeout=20)
        assert not [process for process in family if process.is_running()]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def log(self) -> str:
        """What the handlers have logged, the last lines of it."""
        return "".join(list(self._log))

    # Jobs

    def submit(
        self,
        script: str,
        parameters: Mapping[str, Any] | None = None,
        *,
        queue: str,
        outputs: tuple[str, ...] = ("model.bin",),
        inputs: tuple[str, ...] = (),
        arguments: tuple[str, ...] = (),
        command: list[str] | None = None,
        environment: Mapping[str, str] | None = None,
        **policy: Any,
    ) -> str:
        """Submit a job that runs one of our trainers; its id. A failed one is tried again at once, on any machine."""
        defaults = {"heartbeat_interval_s": 2, "backoff_s": 0, "avoid_machine_s": 0, "stop_grace_s": 20}
        job = self.client.submit(
            JobSubmit(
                command=command or ["python", str(TRAINERS / script), *arguments],
                parameters=dict(parameters or {}),
                queue=queue,
                outputs=list(outputs),
                inputs=[InputRef(prefix=prefix) for prefix in inputs],
                environment=dict(environment or {}),
                policy=Policy(**{**defaults, **policy}),
            )
        )
        return job.id

    def job(self, job_id: str) -> JobView:
        """The job as it is now."""
        return self.client.get_job(job_id)

    def attempts(self, job_id: str) -> list[AttemptView]:
        """Its attempts, oldest first."""
        return self.client.attempts(job_id).attempts

    def events(self, job_id: str) -> list[EventView]:
        """Its history, oldest first."""
        return self.client.events(job_id, limit=1000).events

    def steps(self, job_id: str) -> list[int]:
        """Committed steps, in order of their commits."""
        return [int(event.data["step"]) for event in self.events(job_id) if event.type == "checkpoint.committed"]

    def log_lines(self, job_id: str) -> list[str]:
        """All of the job's output."""
        return [line.text for line in self.client.logs(job_id, limit=1000).lines]

    def wait_for(self, job_id: str, *states: JobState | str, timeout_s: float = PATIENCE_S) -> JobView:
        """Wait until the job is in one of these states."""
        found: JobView = until(
            lambda: job if (job := self.job(job_id)).state in states else None,
            timeout_s,
            what=f"job {job_id} becoming {' or '.join(states)}",
            every_s=0.1,
        )
        return found

    def wait_for_step(self, job_id: str, step: int, timeout_s: float = PATIENCE_S) -> JobView:
        """Wait until the trainer has reported this step or a later one."""
        found: JobView = until(
            lambda: job if (job := self.job(job_id)).progress and job.progress.step >= step else None,
            timeout_s,
            what=f"step {step}",
            every_s=0.1,
        )
        return found

    def wait_for_commit(self, job_id: str, step: int = 1, timeout_s: float = PATIENCE_S) -> int:
        """Wait until a checkpoint of this step or a later one is committed; its step."""
        found: int = until(
            lambda: newest if (newest := self.job(job_id).checkpoint_step or 0) >= step else 0,
            timeout_s,
            what=f"a checkpoint of step {step}",
            every_s=0.1,
        )
        return found

    # Objects, behind everybody's back

    def artifact(self, job_id: str, path: str = "model.bin") -> bytes:
        """The bytes of a finished job's output."""
        key = next(artifact.key for artifact in self.job(job_id).artifacts if artifact.path == path)
        return self.read(key)

    def read(self, key: str, bucket: str = "training-checkpoints") -> bytes:
        """An object's bytes."""
        body: bytes = self.objects.get_object(Bucket=bucket, Key=f"default/{key}")["Body"].read()
        return body

    def write(self, key: str, data: bytes, bucket: str = "training-checkpoints") -> None:
        """Store, or overwrite, an object."""
        self.objects.put_object(Bucket=bucket, Key=f"default/{key}", Body=data, ChecksumAlgorithm="CRC64NVME")

    def keys_below(self, prefix: str, bucket: str = "training-checkpoints") -> dict[str, str]:
        """Keys and ETags of everything below a prefix."""
        listed = self.objects.list_objects_v2(Bucket=bucket, Prefix=f"default/{prefix}").get("Contents", [])
        return {entry["Key"].removeprefix("default/"): entry["ETag"] for entry in listed}


class AgentProcess:
    """`python -m gpu_client.agent` as the leader of a session of its own."""

    def __init__(self, environment: Mapping[str, str], log_path: Path, *, wrapper: Path | None = None) -> None:
        self.log_path = log_path
        program = str(wrapper) if wrapper else "gpu_client.agent"
        with log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [*leashed(signal.SIGKILL), program],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The agent's process, session and process group."""
        return self.process.pid

    def log(self) -> str:
        """What it has logged so far."""
        return self.log_path.read_text(errors="replace")

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def kill_group(self) -> None:
        """SIGKILL to the whole process group, as when a container is removed."""
        os.killpg(self.pid, signal.SIGKILL)
        self.process.wait(10)

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """Wait for its end; the exit code."""
        return self.process.wait(timeout_s)


def marked(mark: str) -> list[psutil.Process]:
    """Living processes that carry the mark in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def chain(steps: int) -> bytes:
    """What `trainers/chain.py` computes in so many steps."""
    digest = hashlib.sha256(b"seed").hexdigest()
    for step in range(1, steps + 1):
        digest = hashlib.sha256(f"{digest}{step}".encode()).hexdigest()
    return digest.encode()
