"""Run one attempt in a scripted world: control plane, trainer, transfers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baton.contract.worker.calls import DeclaredArtifact, HeartbeatRequest, InputPage, WorkItem
from baton.contract.worker.output import LogChunk
from gpu_client.agent.app.settings import AgentSettings
from gpu_client.agent.app.shutdown import ShutdownRequest
from gpu_client.agent.attempt import job_run, required_outputs, trainer_run
from gpu_client.agent.attempt.attempt_reporter import AttemptOutcome
from gpu_client.agent.attempt.job_run import JobRun
from gpu_client.agent.attempt.outage_tolerance import LeasedCalls
from gpu_client.agent.io import checkpoint_collector
from gpu_client.agent.process.failures import ExitStatus
from gpu_client.agent.process.output import TrainerOutput
from gpu_client.agent.workspace.slots import Workspace
from gpu_client.training.channel import AgentChannel
from gpu_client.training.protocol import TrainerDirective
from gpu_client.transport.net.cancellation import CancelEvent, stop_if_set
from tests.kits.waiting import until
from tests.unit.agent.agent_kit import Heart, make_committed, make_item, make_manifest

SIGTERMED = ExitStatus(code=None, signal=15, oom_suspected=False, stopped_by_us=True)
CLEAN = ExitStatus(code=0, signal=None, oom_suspected=False, stopped_by_us=False)


def exited(code: int) -> ExitStatus:
    return ExitStatus(code=code, signal=None, oom_suspected=False, stopped_by_us=False)


def checkpoint(trainer: Trainer, step: int) -> None:
    """Make a complete checkpoint in the trainer's output directory."""
    directory = trainer.directory / f"checkpoint-{step}"
    directory.mkdir()
    (directory / "weights").write_text(str(step))
    (directory / "baton.json").write_text(json.dumps({"format": 2, "step": step, "metrics": {}}))


class Client:
    """Scripted control plane. `trouble` maps a call to the errors that it raises in turn; then it succeeds."""

    def __init__(self) -> None:
        self.heart = Heart()
        self.said: list[tuple[str, Any]] = []
        self.trouble: dict[str, list[Exception]] = {}
        self.before: dict[str, Callable[[], object]] = {}

    def within(self, budget_s: float) -> Client:
        return self

    def _take(self, kind: str, body: Any) -> None:
        self.before.get(kind, lambda: None)()
        trouble = self.trouble.get(kind)
        if trouble:
            raise trouble.pop(0)
        self.said.append((kind, body))

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.said]

    def heartbeat(self, job_id: str, token: str, request: HeartbeatRequest) -> Any:
        return self.heart(request)

    def inputs_page(self, job_id: str, token: str, *, cursor: str | None = None) -> InputPage:
        self._take("inputs", cursor)
        return InputPage(inputs=[], expires_at=1_790_000_900)

    def complete(self, token: str, request: Any) -> None:
        self._take("complete", request)

    def fail(self, token: str, request: Any) -> None:
        self._take("fail", request)

    def release(self, token: str, request: Any) -> None:
        self._take("release", request)

    def send_logs(self, job_id: str, token: str, chunk: LogChunk) -> None:
        self._take("logs", chunk)


class Transfer:
    """Transfer that moves nothing and knows no speed."""

    speed = SimpleNamespace(upload_bytes_per_s=lambda: None)

    def download(self, items: list[object], *, cancel: CancelEvent) -> None:
        stop_if_set(cancel)
        assert items == []


class Trainer:
    """Scripted training process. `act` is called at each poll with the number of polls; it may end the process."""

    def __init__(
        self,
        act: Callable[[Trainer, int], object],
        env: dict[str, str],
        output: TrainerOutput,
        greeted: Callable[[], bool],
    ) -> None:
        """`greeted` returns True once the agent knows of a connected process."""
        self._greeted = greeted
        self.env = env
        self.output = output
        self.directory = Path(env["BATON_OUTPUT_DIR"])
        self.status: ExitStatus | None = None
        self.on_stop: Callable[[], ExitStatus] = lambda: SIGTERMED
        self.stops: list[float] = []
        self.directives: list[TrainerDirective] = []
        self._act = act
        self._looks = 0
        self._channel: AgentChannel | None = None

    def connect(self) -> AgentChannel:
        if self._channel is None:
            self._channel = AgentChannel(self.env["BATON_CHANNEL"], self.directives.append)
            # The agent asks only known processes for anything; an unknown one gets SIGTERM.
            until(self._greeted, what="the agent's hearing of the trainer", every_s=0.001)
        return self._channel

    def ends(self, status: ExitStatus) -> None:
        if self._channel:
            self._channel.close()
        if self.status is None:
            self.status = status

    def poll(self) -> ExitStatus | None:
        if self.status is None:
            self._looks += 1
            self._act(self, self._looks)
        return self.status

    def stop(self, grace_s: float) -> ExitStatus:
        self.stops.append(grace_s)
        if self.status is None:
            self.ends(self.on_stop())
        assert self.status is not None
        return self.status

    def files_open_for_writing(self) -> set[Path]:
        return set()

    def print(self, text: str) -> None:
        self.output.feed(text.encode() + b"\n")


class Stage:
    """Runs attempts. `act` scripts the trainer, which by default succeeds at once."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.client = Client()
        self.stop = ShutdownRequest(same_request_s=0)
        self.settings = AgentSettings(
            api_url="http://control.plane", api_key="baton_id_secret", workspace=tmp_path, worker_id="w1"
        )
        self.workspace = Workspace.open(tmp_path, "w1")
        self.trainers: list[Trainer] = []
        self.committed: list[int] = []
        self.commit_s = 0.0
        """Reported duration of a commit."""
        self.phases: list[str] = []
        self.restored: Any = None
        self.uploads: list[Exception | None] = []
        self.start_error: Exception | None = None
        self.renewed: list[float] = []
        self.act: Callable[[Trainer, int], object] = lambda trainer, _looks: trainer.ends(CLEAN)
        stage = self

        def start(command: list[str], env: dict[str, str], cwd: Path, output: TrainerOutput) -> Trainer:
            if stage.start_error:
                raise stage.start_error
            stage.trainers.append(Trainer(stage.act, env, output, stage.greeted))
            return stage.trainers[-1]

        def restore(*_: object, **__: object) -> Any:
            if isinstance(stage.restored, Exception):
                raise stage.restored
            return stage.restored

        def upload(*_: object, **__: object) -> list[DeclaredArtifact]:
            error = stage.uploads.pop(0) if stage.uploads else None
            if error:
                raise error
            return []

        def commit(_client: object, _transfer: object, item: WorkItem, path: Path, step: int, **_: object) -> Any:
            assert path.is_dir()
            stage.committed.append(step)
            stage.client.said.append(("commit", step))
            manifest = make_manifest(item.id, step, item.epoch, path)
            return make_committed(step, manifest, epoch=item.epoch, seconds=stage.commit_s)

        monkeypatch.setattr(job_run, "start_trainer", start)
        monkeypatch.setattr(job_run, "restore", restore)
        monkeypatch.setattr(job_run, "upload_artifacts", upload)
        monkeypatch.setattr(checkpoint_collector, "commit_checkpoint", commit)
        monkeypatch.setattr(trainer_run, "POLL_S", 0.002)
        monkeypatch.setattr(required_outputs, "COMPLETE_RETRY_S", 0.0)
        monkeypatch.setattr(job_run, "LeasedCalls", partial(LeasedCalls, retry_s=0.0))
        write_state = self.workspace.write_state

        def noted(job_id: str, epoch: int, phase: str, started_at: int, *, lease_token: str = "") -> None:
            stage.phases.append(phase)
            write_state(job_id, epoch, phase, started_at, lease_token=lease_token)

        monkeypatch.setattr(self.workspace, "write_state", noted)

    def greeted(self) -> bool:
        steps = self.attempt._steps
        return steps is not None and steps._channel is not None and bool(steps._channel.hellos())

    def make(self, **item: Any) -> JobRun:
        self.attempt = JobRun(
            self.item(**item),
            client=self.client,  # type: ignore[arg-type]
            transfer=Transfer(),  # type: ignore[arg-type]
            settings=self.settings,
            workspace=self.workspace,
            stop=self.stop,
            claimed_at=time.monotonic(),
            on_renewed=self.renewed.append,
        )
        return self.attempt

    def item(self, **fields: Any) -> WorkItem:
        return make_item(**{"stop_grace_s": 8, **fields})

    def run(self, **item: Any) -> AttemptOutcome:
        return self.make(**item).run()

    @property
    def trainer(self) -> Trainer:
        (trainer,) = self.trainers
        return trainer

    def last_report(self) -> Any:
        """Return the one report of the attempt's end."""
        ((_, request),) = [said for said in self.client.said if said[0] in ("complete", "fail", "release")]
        return request
