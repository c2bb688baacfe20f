"""A watched output directory with a fake clock."""

import json
from pathlib import Path

from gpu_client.checkpoints.local.foreign_checkpoint_watcher import CheckpointWatcher
from gpu_client.checkpoints.local.staging import ReadyCheckpoint

STABLE_S = 5.0


class Scene:
    """An output directory, a clock and a trainer with open files.

    `resumed`: from a checkpoint with no files, so that no name is missing from later ones.
    """

    def __init__(self, root: Path, *, resumed: bool = True) -> None:
        self.output = root / "output"
        self.output.mkdir()
        self.now = 1000.0
        self.open: set[Path] = set()
        self.asked = 0
        self.said: list[str] = []
        self.staging = root / "staging"
        self.watcher = CheckpointWatcher(
            self.output, lambda: self.now, self.opened, STABLE_S, self.staging, log_to_job=self.said.append
        )
        if resumed:
            restored = self.output / "checkpoint-0"
            restored.mkdir()
            self.watcher.mark_seen(restored)

    def opened(self) -> set[Path]:
        self.asked += 1
        return self.open

    def write(self, name: str, **files: str) -> Path:
        directory = self.output / name
        directory.mkdir(exist_ok=True)
        for file, content in (files or {"model": "weights", "optimizer": "state"}).items():
            (directory / file).write_text(content)
        return directory

    def session(self, name: str, marker: object = None, step: int | None = None) -> Path:
        directory = self.write(name)
        if marker is None:
            marker = {"format": 2, "step": step, "metrics": {"loss": 0.5}, "created_by": "session"}
        (directory / "baton.json").write_text(json.dumps(marker))
        return directory

    def poll(self, after_s: float = 0.0) -> list[int]:
        return [found.step for found in self.ready(after_s)]

    def ready(self, after_s: float = 0.0) -> list[ReadyCheckpoint]:
        self.now += after_s
        return self.watcher.poll()
