"""Stage a checkpoint in the arena, shared memory whose files the agent reads in place.

The agent makes the directory, names the directory in BATON_ARENA, and removes the directory after the attempt. The
arena has one checkpoint, `checkpoint/`. Checkpoints with an unchanged layout overwrite its files, so that a copy has
the speed of warm memory, and memory contains the state twice and not three times.

The marker `baton.json` transfers the ownership. The training process changes files only without a marker, and writes
the marker last: a marked checkpoint is complete, whenever the training process died. Then the agent owns the files
until the agent has stored (or skipped) the checkpoint and removes the marker.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch

from baton.contract.checkpoints.marker import MARKER
from gpu_client.training.checkpoint import checkpoint_directory
from gpu_client.training.checkpoint.safetensors_file import FileContents, FileLayout, MappedFile
from gpu_client.training.protocol import ARENA_CHECKPOINT

RESERVED_FREE_BYTES = 256 * 2**20
"""Memory in bytes that staging leaves to the training and the agent."""

log = logging.getLogger("baton.training")

Pairs = list[tuple[torch.Tensor, torch.Tensor]]
"""Pairs of a target tensor and a source tensor."""


class NoRoomError(Exception):
    """Error of a state that does not fit; the text contains the sizes."""


class Arena:
    """Arena of one training process. The first rank writes the marker."""

    def __init__(self, root: Path) -> None:
        self.directory = root / ARENA_CHECKPOINT
        self._marker = self.directory / MARKER
        self._files: dict[str, MappedFile] = {}
        self._fresh = True

    @property
    def occupied(self) -> bool:
        """Return True while the agent owns a complete checkpoint in the arena."""
        return self._marker.exists()

    def begin(self) -> None:
        """Prepare an arena that is not `occupied`. Raises OSError if the agent has removed the arena."""
        if self._fresh:
            # A dead process may have left files of any layout.
            shutil.rmtree(self.directory, ignore_errors=True)
            self.directory.mkdir(mode=0o700)
            self._fresh = False

    def allocate(self, files: Mapping[str, FileContents]) -> Pairs:
        """Allocate memory for `files`. Returns the copies to make.

        Raises NoRoomError, after which the caller must `clear` the arena.
        """
        reused = {
            name
            for name, contents in files.items()
            if name in self._files and self._files[name].signature == contents.signature()
        }
        for name in self._files.keys() - reused:
            self._files.pop(name).remove()
        new = {name: contents for name, contents in files.items() if name not in reused}
        try:
            self._require(sum(FileLayout.of(contents).size_bytes for contents in new.values()))
            for name, contents in new.items():
                self._files[name] = MappedFile(self.directory / name, contents)
        except OSError as error:
            raise NoRoomError(str(error)) from error
        pairs: Pairs = []
        for name, contents in files.items():
            if any(tensor.is_cuda for tensor in contents.tensors.values()):
                self._files[name].pin()
            targets = self._files[name].targets
            pairs += [(targets[key], contents.tensors[key]) for key in targets]
        return pairs

    def finish(self, step: int, metrics: Mapping[str, float], forms: Mapping[str, str], tag: str = "") -> None:
        """Write the marker after all copies, which passes the checkpoint to the agent."""
        for file in self.directory.iterdir():
            # Readers detect a change by the modification time, which a write through a mapping may not update.
            os.utime(file)
        checkpoint_directory.write_marker(
            self.directory, step, metrics, "session", forms, tag=tag, durable=False, digests=False
        )

    def clear(self) -> None:
        """Release all memory. The next checkpoint allocates new memory."""
        for file in self._files.values():
            file.remove()
        self._files.clear()

    def _require(self, needed_bytes: int) -> None:
        if not needed_bytes:
            return
        system = os.statvfs(self.directory)
        free_bytes = system.f_bavail * system.f_frsize
        if needed_bytes > free_bytes:
            raise NoRoomError(f"{needed_bytes} bytes are needed in {self.directory}, {free_bytes} are free")
        memory_bytes = read_available_bytes()
        if memory_bytes is not None and needed_bytes + RESERVED_FREE_BYTES > memory_bytes:
            raise NoRoomError(f"{needed_bytes} bytes of memory are needed, {memory_bytes} are available")


def read_available_bytes(machine: Path = Path("/proc/meminfo"), group: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the available bytes of the machine, or of the control group (version 2) if fewer; None if unknown."""
    limits = []
    text = _read(machine)
    if found := re.search(r"^MemAvailable:\s+(\d+) kB$", text, re.MULTILINE):
        limits.append(int(found[1]) * 1024)
    limit, used = _read(group / "memory.max").strip(), _read(group / "memory.current").strip()
    if limit.isdigit() and used.isdigit():
        # The kernel reclaims file pages without recent use, therefore these pages count as available.
        cached = re.search(r"^inactive_file (\d+)$", _read(group / "memory.stat"), re.MULTILINE)
        limits.append(max(int(limit) - int(used) + (int(cached[1]) if cached else 0), 0))
    return min(limits, default=None)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""
