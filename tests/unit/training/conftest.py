"""Fixtures that start sessions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from listening_agent import ListeningAgent

from baton import Session


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread, because tiny tensors gain nothing from several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Session]]:
    """Return a function that starts sessions in tmp_path/output; the fixture closes them."""
    opened: list[Session] = []

    def begin(
        agent: ListeningAgent | None = None, *, keep_last: int = 2, resume: bool = False, **extra: str
    ) -> Session:
        variables = {"BATON_OUTPUT_DIR": str(tmp_path / "output"), **extra}
        if agent is not None:
            variables |= {"BATON_JOB_ID": "job-1", "BATON_CHANNEL": agent.path}
        session = Session.start(variables=variables, keep_last=keep_last, resume=resume)
        opened.append(session)
        return session

    yield begin
    for session in reversed(opened):
        session.close()
