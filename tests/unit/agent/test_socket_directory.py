"""The private directory of a socket ends with its agent: removed at the end, or by a later agent after a kill."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_client.agent.control.socket_directory import SocketDirectory

DIES = """
import os, signal
from gpu_client.agent.control.socket_directory import SocketDirectory
directory = SocketDirectory()
(directory.path / "channel").touch()
print(directory.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    # The path of pytest's directory can be too long for a socket, and then the product chooses another parent.
    with tempfile.TemporaryDirectory(prefix="agents-") as path:
        monkeypatch.setattr(tempfile, "tempdir", path)
        monkeypatch.setenv("TMPDIR", path)
        yield Path(path)


def test_a_directory_is_private_and_removed_with_its_contents(parent: Path) -> None:
    directory = SocketDirectory()
    assert directory.path.parent == parent and directory.path.stat().st_mode & 0o077 == 0
    (directory.path / "channel").touch()
    directory.remove()
    directory.remove()
    assert list(parent.iterdir()) == []


@pytest.mark.processes
def test_the_next_agent_removes_the_directory_of_a_killed_one_and_of_no_living_one(parent: Path) -> None:
    living = SocketDirectory()
    dead = subprocess.run([sys.executable, "-c", DIES], stdout=subprocess.PIPE, text=True, check=False).stdout.strip()
    assert sorted(parent.iterdir()) == sorted([living.path, Path(dead)])
    third = SocketDirectory()
    assert sorted(parent.iterdir()) == sorted([living.path, third.path])


def test_what_a_job_left_under_such_a_name_stays(parent: Path) -> None:
    (parent / "elsewhere").mkdir()
    (parent / "baton-socket-file").touch()
    (parent / "baton-socket-link").symlink_to(parent / "elsewhere")
    SocketDirectory().remove()
    assert {path.name for path in parent.iterdir()} == {"elsewhere", "baton-socket-file", "baton-socket-link"}
