"""Workers keep their attempts through outages longer than their leases, although the sweeper runs and others wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from baton.contract.jobs.job import AttemptEnd, JobState
from functions.api.operations.service_probe import PROBED_PATH
from tests.kits.network.proxies import FaultyProxy
from tests.kits.stack.stack import Stack, chain
from tests.kits.stack.workshop import Workshop
from tests.kits.waiting import until

pytestmark = [pytest.mark.processes, pytest.mark.emulator]

STEPS = 280


@pytest.fixture(scope="module")
def api() -> Iterator[FaultyProxy]:
    """The only way to the API, for workers and for the sweeper's probe."""
    proxy = FaultyProxy()
    yield proxy
    proxy.close()


@pytest.fixture(scope="module")
def probing_stack(api: FaultyProxy) -> Iterator[Stack]:
    """A stack whose sweeper runs twice a second and reaches the API as workers do."""
    with Stack(sweep_interval_s=0.5, settings={"BATON_PROBE_URL": f"{api.url}{PROBED_PATH}"}) as stack:
        api.upstream = stack.front
        yield stack


@contextmanager
def throttled(api: FaultyProxy) -> Iterator[int]:
    """Refuse every request; yields the number of sweeps to wait for."""
    with api.failing("", 429):
        # At two sweeps a second they last longer than a lease and its grace.
        yield 16


@contextmanager
def frozen(api: FaultyProxy) -> Iterator[int]:
    """Hold every request; yields the number of sweeps to wait for."""
    with api.holding(""):
        # The time limit of the probe, 5 s, is the time between these sweeps.
        yield 3


@pytest.mark.parametrize("outage", [throttled, frozen], ids=lambda outage: outage.__name__)
def test_live_workers_keep_their_attempts(
    probing_stack: Stack,
    api: FaultyProxy,
    tmp_path: Path,
    outage: Callable[[FaultyProxy], AbstractContextManager[int]],
) -> None:
    """The trainers are the clock: 200 steps of 50 ms are three leases."""
    shop = Workshop(probing_stack, tmp_path)
    try:
        gate = shop.gate(60)
        parameters = {"steps": STEPS, "every": 50, "step_s": 0.05}
        more: dict[str, Any] = {"environment": gate.environment, "heartbeat_interval_s": 1}
        names = ("w1", "w2")
        jobs = [shop.submit("chain.py", parameters, **more) for _ in names]
        agents = [shop.agent(name, url=api.url, max_jobs=1) for name in names]
        for job_id in jobs:
            probing_stack.wait_for_commit(job_id)
        until(lambda: all(agent.last_step() == gate.step for agent in agents), what="both trainings at the gate")
        idle = shop.agent("idle", url=api.url)
        asked = len(api.requests("GET /work"))
        until(lambda: len(api.requests("GET /work")) >= asked + 2, what=f"a claim of {idle.pid}")
        probed = len(api.requests(PROBED_PATH))
        with outage(api) as sweeps:
            gate.set(STEPS - 10)
            until(lambda: all(agent.last_step() >= 60 + 200 for agent in agents), what="trainings that go on")
            until(lambda: len(api.requests(PROBED_PATH)) >= probed + sweeps, what="sweeps during the outage")
        until(lambda: all("control plane is back" in agent.log() for agent in agents), what="renewed leases")
        probes = len(api.requests(PROBED_PATH))
        until(lambda: len(api.requests(PROBED_PATH)) >= probes + 5, what="five sweeps")
        for job_id in jobs:
            (attempt,) = probing_stack.attempts(job_id)
            assert (attempt.end, probing_stack.job(job_id).state) == (None, JobState.RUNNING)
            assert "attempt.interrupted" not in [event.type for event in probing_stack.events(job_id)]
        gate.open()
        for job_id in jobs:
            probing_stack.wait_for(job_id, JobState.COMPLETE)
            assert [one.end for one in probing_stack.attempts(job_id)] == [AttemptEnd.COMPLETE]
            assert probing_stack.artifact(job_id) == chain(STEPS)
    finally:
        shop.close()
