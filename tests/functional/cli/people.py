"""Actors of command-line tests: a user who runs commands, and a worker without a machine."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from baton.contract.jobs.goodput import Goodput
from baton.contract.jobs.job import FailureClass
from baton.contract.worker.calls import (
    CompleteRequest,
    FailRequest,
    HeartbeatRequest,
    ReleaseRequest,
    WorkItem,
    WorkQuery,
)
from baton.contract.worker.output import LogChunk
from gpu_client.checkpoints.save.artifacts import collect_outputs, upload_artifacts
from gpu_client.checkpoints.save.checkpoint_commit import commit_checkpoint
from gpu_client.cli.core.session import CliSession
from gpu_client.cli.main import main
from gpu_client.transport.api.client import BatonClient
from tests.kits.clouds.emulator import unique
from tests.kits.files.directories import write_files
from tests.kits.stack.stack import ROOT, clean_environment, leashed


@dataclass(frozen=True)
class Said:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[Any]:
        """Parse a stream of JSON documents."""
        return [json.loads(line) for line in self.out.splitlines()]

    def ok(self) -> Said:
        assert self.code == 0, self
        return self

    def refused(self, code: int, summary: str, *problems: str) -> Said:
        """Assert the exit code, a summary line, one line per problem, and an empty standard output."""
        assert (self.code, self.out) == (code, ""), self
        assert self.err.splitlines() == [f"baton: {summary}", *problems], self
        return self

    def failed(self, code: int, *parts: str) -> Said:
        """Assert the exit code, one line with all the parts, and an empty standard output."""
        assert self.code == code, self
        assert self.out == "", self
        assert self.err.startswith("baton: "), self
        assert self.err.count("\n") == 1, self
        for part in parts:
            assert part in self.err, self
        return self


@dataclass
class Baton:
    """User who runs commands. `environ`: environment of the commands."""

    environ: dict[str, str]
    capture: pytest.CaptureFixture[str]
    monkeypatch: pytest.MonkeyPatch
    heard: list[str] = field(default_factory=list)
    session_options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, *arguments: object, stdin: str = "", **environ: str) -> Said:
        """Run one command in this process."""
        self.monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        self.capture.readouterr()
        session = CliSession(environ={**self.environ, **environ}, **self.session_options)
        code = main(list(map(str, arguments)), session)
        seen = self.capture.readouterr()
        self.heard += [seen.out, seen.err]
        return Said(code, seen.out, seen.err)

    def started(self, *arguments: object, wrapper: Path | None = None, **environ: str) -> Running:
        """Start one command as a process. `wrapper`: script that prepares a special machine and runs the program."""
        return Running({**self.environ, **environ}, arguments, self.heard, str(wrapper or "gpu_client.cli"))


class Running:
    """Command in a process of its own."""

    def __init__(
        self, environ: Mapping[str, str], arguments: tuple[object, ...], heard: list[str], program: str
    ) -> None:
        self._heard = heard
        self.process = subprocess.Popen(
            [*leashed(signal.SIGKILL), program, *map(str, arguments)],
            cwd=ROOT,
            env={**clean_environment(), **environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def interrupt(self) -> Said:
        """Send SIGINT; return the result, which must come soon."""
        self.process.send_signal(signal.SIGINT)
        return self.end()

    def kill(self) -> None:
        """Send SIGKILL."""
        self.process.kill()
        self.process.communicate(timeout=60)

    def end(self) -> Said:
        """Wait for the end of the process."""
        out, err = self.process.communicate(timeout=60)
        self._heard += [out, err]
        return Said(self.process.returncode, out, err)


class Labour:
    """Worker of one queue, without a machine."""

    def __init__(self, client: BatonClient, tmp_path: Path) -> None:
        self.client = client
        self.queue = unique("q")
        self._tmp_path = tmp_path
        self.item: WorkItem | None = None

    @property
    def held(self) -> WorkItem:
        assert self.item is not None
        return self.item

    def claim(self, machine_id: str = "m-1") -> WorkItem:
        """Claim the next job of the queue."""
        self.item = self.client.claim(WorkQuery(queue=self.queue, machine_id=machine_id, runs_nodes=True))
        return self.held

    def report(self, step: int, total_steps: int, loss: float, goodput: Goodput | None = None) -> None:
        """Send a heartbeat with progress."""
        request = HeartbeatRequest(step=step, total_steps=total_steps, metrics={"loss": loss}, goodput=goodput)
        self.client.heartbeat(self.held.id, self.held.lease_token, request)

    def commit(self, step: int) -> None:
        """Commit a checkpoint."""
        place = self._files({"model.bin": b"%d" % step}, f"checkpoint-{self.held.id}-{step}")
        commit_checkpoint(self.client, self.client.transfer, self.held, place, step)

    def log(self, first_line: int, *lines: str) -> None:
        """Send log lines."""
        self.client.send_logs(self.held.id, self.held.lease_token, LogChunk(first_line=first_line, lines=list(lines)))

    def release(self) -> None:
        """Release the job."""
        self.client.release(self.held.lease_token, ReleaseRequest(job_id=self.held.id))

    def fail(self, message: str, *log_tail: str) -> None:
        """Fail the job."""
        request = FailRequest(
            job_id=self.held.id,
            failure_class=FailureClass.SCRIPT_ERROR,
            exit_code=1,
            message=message,
            log_tail=list(log_tail),
        )
        self.client.fail(self.held.lease_token, request)

    def show(self, files: Mapping[str, bytes]) -> None:
        """Upload files while the job runs."""
        place = self._files(files, f"output-{self.held.id}")
        upload_artifacts(self.client, self.client.transfer, self.held, collect_outputs(place, list(files)))

    def complete(self, outputs: Mapping[str, bytes]) -> None:
        """Upload the outputs and end the job."""
        place = self._files(outputs, f"output-{self.held.id}")
        found = collect_outputs(place, self.held.outputs)
        declared = upload_artifacts(self.client, self.client.transfer, self.held, found)
        self.client.complete(self.held.lease_token, CompleteRequest(job_id=self.held.id, artifacts=declared))

    def _files(self, files: Mapping[str, bytes], name: str) -> Path:
        return write_files(self._tmp_path / name, files)


def submit(baton: Baton, labour: Labour, tmp_path: Path, **job: Any) -> str:
    """Submit a job to the worker's queue by the command; return its id."""
    file = tmp_path / "job.json"
    file.write_text(json.dumps({"command": ["train"], "queue": labour.queue, **job}))
    return baton("submit", file).ok().out.strip()


def finished(baton: Baton, labour: Labour, tmp_path: Path, outputs: Mapping[str, bytes]) -> str:
    """Complete a job with these outputs; return its id."""
    job_id = submit(baton, labour, tmp_path, outputs=sorted(outputs))
    labour.claim()
    labour.complete(outputs)
    return job_id
