"""One local stack for all end-to-end tests; for each test a queue of its own and an eye on what it leaves behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.contract.jobs.job import JobState
from tests.kits.stack.stack import Stack
from tests.kits.stack.workshop import Workshop


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    """The local stack, as a user starts it."""
    with Stack() as running:
        yield running


@pytest.fixture
def shop(stack: Stack, tmp_path: Path) -> Iterator[Workshop]:
    """This test's workshop. Afterwards no process of it may be left, and no key or token in any log."""
    workshop = Workshop(stack, tmp_path)
    try:
        yield workshop
    finally:
        workshop.close()
        for job in stack.client.jobs(queue=workshop.queue).jobs:
            if job.state not in (JobState.COMPLETE, JobState.FAILED, JobState.CANCELED):
                stack.client.stop(job.id)
    for agent in workshop.agents:
        log = agent.log()
        assert stack.keys["worker"].split("_", 2)[2] not in log, "the API key's secret is in the agent's log"
        assert "X-Amz-Signature" not in log, "a presigned URL is in the agent's log"
        # The trainer's own tracebacks are echoed behind a bar.
        assert "\nTraceback" not in log, log[-4000:]
