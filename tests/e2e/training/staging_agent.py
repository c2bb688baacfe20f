"""Act as the agent of a trainer that stages checkpoints in memory; the store is a folder."""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from gpu_client.agent.control.channel_server import ChannelServer
from gpu_client.agent.io.committer import Committer, StagedCheckpoint
from gpu_client.agent.workspace.arena import find_checkpoint, make_arena, release_checkpoint, remove_arena
from gpu_client.transport.net.cancellation import CancelEvent


class StagingAgent:
    """The agent of one attempt: an arena, a channel, and a committer whose copies take a random time."""

    def __init__(self, root: Path, stored: Path, chance: random.Random) -> None:
        root.mkdir(parents=True)
        stored.mkdir(exist_ok=True)
        self._slot = root
        self._stored = stored
        self._chance = chance
        held = make_arena(Path("/dev/shm"), root)
        assert held is not None
        self._lock_fd = held.lock_fd
        self.arena = arena = held.path
        self.channel = ChannelServer(root, arena=arena)
        self._version: tuple[int, int] | None = None
        self.committer = Committer(self._commit, lambda: True, on_lost=lambda _: None, over=threading.Event())
        self.environment = {
            "BATON_JOB_ID": "job-1",
            "BATON_CHANNEL": str(self.channel.path),
            "BATON_ARENA": str(arena),
            "BATON_RESUME_FROM": str(self.newest() or ""),
        }

    def newest(self) -> Path | None:
        """Return the newest stored checkpoint."""
        stored = [path for path in self._stored.iterdir() if path.name.isdecimal()]
        return max(stored, key=lambda path: int(path.name), default=None)

    def gather(self) -> None:
        """Offer the arena's newest complete checkpoint to the committer."""
        staged = find_checkpoint(self.arena)
        if staged is None or staged.version == self._version:
            return
        self._version = staged.version
        self.committer.offer(
            StagedCheckpoint(
                staged.step, staged.path, staged.metrics, "session", release=lambda: release_checkpoint(self.arena)
            )
        )

    def _commit(self, staged: StagedCheckpoint, cancel: CancelEvent) -> None:
        temporary = self._stored / "unfinished"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        for path in sorted(staged.path.iterdir(), key=lambda _: self._chance.random()):
            shutil.copy(path, temporary)
            time.sleep(self._chance.random() * 0.01)  # as long as an upload may take, among other things
        temporary.rename(self._stored / str(staged.step))

    def finish(self) -> None:
        """Store what is complete in the arena, after the end of all the trainer's processes."""
        self.gather()
        assert self.committer.drain()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.committer.close()
        self.channel.close()
        remove_arena(self._slot)
        os.close(self._lock_fd)
        assert not self.arena.exists()
