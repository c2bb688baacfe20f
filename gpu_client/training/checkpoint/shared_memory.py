"""Shared memory in which a checkpoint is staged: files in their final form that the agent reads as they are.

The agent makes the directory, names it in BATON_ARENA, and removes it after the attempt. In it lies one checkpoint,
`checkpoint/`, whose files are kept and overwritten for as long as their layout stays the same: a copy then costs what
copying into warm memory costs, and the state is in memory twice, not three times.

Its marker, `baton.json`, says whose turn it is. The training process changes files only while there is none, and
writes it last: with it the checkpoint is complete, whenever that process died. From then on the files are the agent's,
until it has stored (or passed over) them and removes the marker.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch

from baton.contract.checkpoint_marker import MARKER
from gpu_client.training.checkpoint import checkpoint_directory
from gpu_client.training.checkpoint.safetensors_file import Contents, Layout, MappedFile
from gpu_client.training.protocol import ARENA_CHECKPOINT

KEPT_FREE_BYTES = 256 * 2**20
"""Memory that staging leaves to the training and to the agent."""

log = logging.getLogger("baton.training")

Pairs = list[tuple[torch.Tensor, torch.Tensor]]
"""What is to be copied: into, from."""


class NoRoomError(Exception):
    """The state does not fit; the text says why."""


class Arena:
    """One process's use of the shared memory. Of several ranks, the first one has the marker."""

    def __init__(self, root: Path) -> None:
        self.directory = root / ARENA_CHECKPOINT
        self._marker = self.directory / MARKER
        self._files: dict[str, MappedFile] = {}
        self._fresh = True

    @property
    def held(self) -> bool:
        """Whether a complete checkpoint lies in it that the agent has not given back yet."""
        return self._marker.exists()

    def begin(self) -> None:
        """The arena is not `held`: make it ready. Raises OSError when the agent has removed it."""
        if self._fresh:
            # A process that died before this one may have left files of any form.
            shutil.rmtree(self.directory, ignore_errors=True)
            self.directory.mkdir(mode=0o700)
            self._fresh = False

    def allocate(self, files: Mapping[str, Contents]) -> Pairs:
        """Make room for these files, and say what has to be copied.

        Raises NoRoomError: then `clear`.
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
            self._require(sum(Layout.of(contents).size_bytes for contents in new.values()))
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
        """Everything is copied: from here on it is a checkpoint, and the agent's."""
        for file in self.directory.iterdir():
            # Writing through a mapping need not change the time that tells readers of a change.
            os.utime(file)
        checkpoint_directory.write_marker(
            self.directory, step, metrics, "session", forms, tag=tag, durable=False, digests=False
        )

    def clear(self) -> None:
        """Give all memory back. The next checkpoint allocates anew."""
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
        memory_bytes = available_bytes()
        if memory_bytes is not None and needed_bytes + KEPT_FREE_BYTES > memory_bytes:
            raise NoRoomError(f"{needed_bytes} bytes of memory are needed, {memory_bytes} are available")


def available_bytes(machine: Path = Path("/proc/meminfo"), group: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What the machine has left, or the control group (version 2) if that is less; None where neither is told."""
    limits = []
    text = _read(machine)
    if found := re.search(r"^MemAvailable:\s+(\d+) kB$", text, re.MULTILINE):
        limits.append(int(found[1]) * 1024)
    limit, used = _read(group / "memory.max").strip(), _read(group / "memory.current").strip()
    if limit.isdigit() and used.isdigit():
        # Pages of files that were read or written some time ago give way.
        cached = re.search(r"^inactive_file (\d+)$", _read(group / "memory.stat"), re.MULTILINE)
        limits.append(max(int(limit) - int(used) + (int(cached[1]) if cached else 0), 0))
    return min(limits, default=None)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""
