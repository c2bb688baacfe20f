"""Fixtures of the end-to-end tests: one local stack, a queue for each test, and a check of the test's leftovers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.contract.jobs.job import JobState
from tests.kits.stack.stack import Stack
from tests.kits.stack.workshop import Workshop


@pytest.fixture(scope="package")
def stack() -> Iterator[Stack]:
    """Run the local stack as a user starts it, with a budget of all fleets together."""
    with Stack(settings={"BATON_FLEET_BUDGET": '{"per_month_usd": 500}'}) as running:
        yield running


@pytest.fixture
def shop(stack: Stack, tmp_path: Path) -> Iterator[Workshop]:
    """Yield the test's workshop; afterwards no process may be left, and no key or token in any log."""
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
