"""A process killed between any two calls while staging: the arena has the whole checkpoint, or none."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from session_helpers import Calls, Counter, give_back
from torch import nn

from baton import Session
from gpu_client.agent.workspace.arena import find_checkpoint

# Newer Pythons warn about forking a process that has threads; nothing is done in the child that needs them.
pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")


def touches(function: Any) -> bool:
    """Select the calls that touch files, memory or other processes."""
    return getattr(function, "__module__", None) in ("posix", "io", "_io", "mmap", "_thread") or (
        getattr(function, "__name__", "") in ("copy_", "send", "wait", "start")
    )


def model(value: float, width: int) -> nn.Module:
    made = nn.Linear(300, width)
    nn.init.constant_(made.weight, value)
    return made


def stage(root: Path, calls: int | None, width: int, overlap: bool) -> int:
    """Stage checkpoint 1, which the agent gives back, then 2, in a child, and kill it before call number `calls`.

    Return the child's exit code; with None the child lives, and the code is the number of its calls (at most 255).
    """
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    count = Calls(touches, calls)
    code = 99
    try:
        torch.set_num_threads(1)
        variables = {"BATON_OUTPUT_DIR": str(root / "output"), "BATON_JOB_ID": "j", "BATON_ARENA": str(root / "arena")}
        session = Session.start(variables={**variables, "BATON_CHANNEL": str(root / "channel")})

        def take(step: int, width: int) -> None:
            trained = model(float(step), width)
            optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
            path = session.checkpoint(step, overlap=overlap, model=trained, optimizer=optimizer, counter=Counter(step))
            assert path == root / "arena" / "checkpoint"
            session._writer.settle()

        take(1, 300)
        give_back(root / "arena")
        threading.setprofile(count)  # the thread that copies, with `overlap`
        sys.setprofile(count)
        take(2, width)
        sys.setprofile(None)
        code = min(count.seen, 255)
    finally:
        os._exit(code)


@pytest.mark.parametrize(("width", "overlap"), [(300, False), (299, False), (300, True)])
def test_killed_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int, overlap: bool) -> None:
    """300: into the memory of checkpoint 1; 299: into other memory."""

    def round_of(calls: int | None) -> tuple[int, bool]:
        root = tmp_path / str(calls)
        (root / "arena").mkdir(parents=True)
        monkeypatch.chdir(root)  # a socket's path is short
        with socket.socket(socket.AF_UNIX) as listener:
            # An agent that takes the connection and reads nothing: what it is told is not what counts.
            listener.bind("channel")
            listener.listen()
            code = stage(root, calls, width, overlap)
        staged = find_checkpoint(root / "arena")
        if staged is None:
            return code, False
        assert staged.step == 2
        trained, counter = model(0, width), Counter()
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        variables = {"BATON_OUTPUT_DIR": str(root / "o"), "BATON_RESUME_FROM": str(staged.path)}
        with Session.start(variables=variables) as session:
            assert session.resume(model=trained, optimizer=optimizer, counter=counter) == 2
        assert (trained.weight == 2.0).all() and counter.value == 2
        return code, True

    total, complete = round_of(None)
    assert 12 < total < 99 and complete
    outcomes = set()
    for calls in range(1, total + 1):
        code, complete = round_of(calls)
        if not overlap:  # two threads take turns as they like: the last call need not come
            assert code == -signal.SIGKILL
        outcomes.add(complete)
    assert outcomes == {True, False}, "kills before and after it was complete"
