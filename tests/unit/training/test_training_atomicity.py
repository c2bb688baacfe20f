"""A checkpoint killed between any two of its system calls: every visible checkpoint is complete, and one remains."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from session_helpers import Calls
from torch import nn

from baton import Session
from gpu_client.training.checkpoint import checkpoint_directory

# Newer Pythons warn about forking a process that has threads; nothing is done in the child that needs them.
pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")


def write_until(output: Path, calls: int | None) -> int:
    """Write checkpoint 2 in a child, replacing 1 (keep_last=1), and kill the child before system call number `calls`.

    Return the child's exit code; with None the child lives, and the code is the number of its calls (at most 255).
    """
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    count = Calls(lambda function: getattr(function, "__module__", None) in ("posix", "io", "_io"), calls)
    session = Session.start(output_dir=output, resume=True, keep_last=1, variables={})
    sys.setprofile(count)
    session.checkpoint(2, model=model(2.0), optimizer=optimizer())
    sys.setprofile(None)
    os._exit(min(count.seen, 255))


def model(value: float) -> nn.Module:
    made = nn.Linear(2, 2)
    nn.init.constant_(made.weight, value)
    return made


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)


def test_killed_anywhere(tmp_path: Path) -> None:
    prepared = tmp_path / "prepared"
    with Session.start(output_dir=prepared, variables={}) as session:
        session.checkpoint(1, model=model(1.0), optimizer=optimizer())
    output = tmp_path / "output"
    shutil.copytree(prepared, output)
    total = write_until(output, None)
    assert 20 < total < 255
    reached = set()
    for calls in range(1, total + 1):
        shutil.rmtree(output)
        shutil.copytree(prepared, output)
        assert write_until(output, calls) == -signal.SIGKILL
        visible = sorted(path.name for path in output.iterdir() if not path.name.startswith("."))
        assert visible in (["checkpoint-1"], ["checkpoint-1", "checkpoint-2"], ["checkpoint-2"])
        for name in visible:
            checkpoint_directory.verify(output / name)
        with Session.start(output_dir=output, resume=True, variables={}) as session:
            resumed = model(0.0)
            step = session.resume(model=resumed, optimizer=optimizer())
        assert step == int(visible[-1].removeprefix("checkpoint-"))
        assert (resumed.weight == float(step)).all()
        assert not list(output.glob(".*")), "the next start clears what was left"
        reached.add(tuple(visible))
    assert len(reached) == 3, "kills before the commit, between commit and rotation, and after"
