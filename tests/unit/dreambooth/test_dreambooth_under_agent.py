"""Under an agent, checkpoints are staged in shared memory, and the next attempt resumes from the stored ones."""

from __future__ import annotations

import json
import shutil
import socket
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
from dreambooth_runs import CACHED, EVERYTHING, Run, outputs, power_cut


class StoringAgent:
    """Stores each checkpoint when it is told of it, and gives the shared memory back."""

    def __init__(self, root: Path) -> None:
        self.arena, self.stored = root / "arena", root / "stored"
        self.arena.mkdir(parents=True)
        self.steps: list[int] = []
        self.reports: list[dict[str, Any]] = []
        self.shown: list[str] = []
        self.bytes_shown: dict[str, bytes] = {}
        self.path = root / "channel"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self.path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def variables(self, resume_from: Path | None) -> dict[str, str]:
        return {
            "BATON_JOB_ID": "job-1",
            "BATON_CHANNEL": str(self.path),
            "BATON_ARENA": str(self.arena),
            "BATON_RESUME_FROM": str(resume_from or ""),
        }

    def _serve(self) -> None:
        trainer, _ = self._listener.accept()
        with trainer, trainer.makefile("rb") as lines:
            for line in lines:
                message = json.loads(line)
                if message["type"] == "checkpoint":
                    assert Path(message["path"]) == self.arena / "checkpoint"
                    self.steps.append(message["step"])
                    shutil.copytree(message["path"], self.stored / f"checkpoint-{message['step']}")
                    (self.arena / "checkpoint" / "baton.json").unlink()
                elif message["type"] == "artifact":
                    self.shown.append(Path(message["path"]).name)
                    self.bytes_shown[self.shown[-1]] = Path(message["path"]).read_bytes()
                elif message["type"] == "progress":
                    self.reports.append(message)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.join(30)
        self._listener.close()
        assert not self._thread.is_alive()


def steps_of(names: list[str]) -> set[int]:
    return {int(name.split("-")[1]) for name in names}


@pytest.mark.parametrize(
    "options", [EVERYTHING, {**CACHED, "use_ema": False, "center_crop": True}], ids=["ema", "overlap"]
)
def test_an_attempt_starts_from_what_the_agent_has_stored(options: dict[str, Any], run: Run, tmp_path: Path) -> None:
    options = {**options, "checkpointing_steps": 1}
    uninterrupted = outputs(run("uninterrupted", variables={"BATON_JOB_ID": "job-1"}, **options))
    with StoringAgent(tmp_path / "a") as agent, power_cut(21, "loss"):
        run("first", variables=agent.variables(None), **options)
    assert steps_of(agent.shown) == {2, 3, 5}, "pictures are shown as they are made"
    # 0 for the class images; some may be skipped while the one before is being stored.
    assert agent.steps[0] == 0
    assert 1 < max(agent.steps) <= 5
    assert (agent.reports[0]["step"], agent.reports[0]["total"]) == (0, 6)
    assert not list((tmp_path / "first").glob("checkpoint-*"))

    newest = agent.stored / f"checkpoint-{max(agent.steps)}"
    with StoringAgent(tmp_path / "b") as agent:
        second = run("second", variables=agent.variables(newest), **options)
    assert outputs(second) == uninterrupted
    assert agent.bytes_shown == {name: uninterrupted[f"validation/{name}"] for name in agent.shown}
    # A checkpoint does not contain the pictures that are made at the start of the next step.
    begun_at = int(newest.name.removeprefix("checkpoint-"))
    kept = [step for step in (2, 3, 5) if step < begun_at]
    made = [step for step in (2, 3, 5, 6) if step >= begun_at]
    assert steps_of(agent.shown) == {*kept[-1:], *made}, "of an earlier attempt's only the newest are shown again"
    assert max(agent.steps) == 6
    assert agent.reports[-1]["step"] == agent.reports[-1]["total"] == 6
    assert {"loss", "learning_rate", "epoch"} <= agent.reports[-1]["metrics"].keys()
