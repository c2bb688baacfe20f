"""The sweeper's function: work within its time, and metrics although Lambda ends the function."""

from __future__ import annotations

import io
import json
from itertools import count
from typing import Any

import pytest

from baton.contract.elastic.nodes import NodesSpec
from functions.api.operations import sweeper as sweeping
from functions.api.operations.cloudwatch_metrics import CloudWatchMetrics
from functions.api.operations.sweeper import sweep
from functions.domain.jobs import transitions
from functions.domain.records import Spec
from functions.domain.worlds.seat_ids import seat_id
from functions.domain.worlds.seats import with_seats
from functions.handlers import sweeper
from tests.conformance.store_kit import NOW, claim, submission, submit
from tests.kits.api.fakes import FakeClock
from tests.kits.api.harness import Api
from tests.kits.clouds.store_sets import memory_cloud


class Invocation:
    """Context of a Lambda call with `seconds` left, and one second less after each question."""

    def __init__(self, seconds: float) -> None:
        self.left_s = seconds

    def get_remaining_time_in_millis(self) -> int:
        self.left_s -= 1
        return int(self.left_s * 1000)


@pytest.fixture
def log(api: Api, monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Put the sweeper on the API's stores, and return its lines for CloudWatch."""
    log = io.StringIO()
    monkeypatch.setattr(sweeper, "context", api.context)
    monkeypatch.setattr(sweeper, "metrics", CloudWatchMetrics("prod", log, api.clock))
    return log


def metrics_in(log: io.StringIO) -> dict[str, Any]:
    return {name: value for line in log.getvalue().splitlines() for name, value in json.loads(line).items()}


def test_a_fleet_that_is_lost_at_once_is_given_back_in_one_sweep() -> None:
    cloud = memory_cloud()
    for _ in range(1100):
        claim(cloud, submit(cloud))
    swept = sweep(cloud.jobs, cloud.leases, FakeClock(NOW + 10_000))
    assert (swept.reclaimed, swept.left, swept.more) == (1100, 0, False)
    assert len(cloud.members("ready")) == 1100


def test_the_sweeper_goes_on_until_its_time_is_over(api: Api, log: io.StringIO) -> None:
    helds = [api.claim() for _ in range(5) if api.submit()]
    api.clock.advance(1000)
    first = sweeper.handler({}, Invocation(18))
    assert (first["reclaimed"], first["more"]) == (3, True)
    second = sweeper.handler({}, Invocation(55))
    assert (second["reclaimed"], second["more"]) == (2, False)
    assert all(api.job(held.id)["state"] == "pending" for held in helds)


def test_metrics_are_written_although_lambda_ends_the_sweeper(
    api: Api, log: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.submit()
    api.claim()
    api.submit(queue="elsewhere")
    api.clock.advance(1000)

    def ended(change: object) -> None:
        raise SystemExit("Task timed out after 55.00 seconds")

    monkeypatch.setattr(api.context.jobs, "apply", ended)
    with pytest.raises(SystemExit):
        sweeper.handler({}, Invocation(55))
    told = metrics_in(log)
    assert (told["QueueAge"], told["HeartbeatLag"]) == (1000, 1000 - 90)


@pytest.mark.parametrize(("most", "seconds", "sweeps"), [(5, 100, 4), (500, 100, 1), (5, 7.5, 18)])
def test_no_elastic_job_waits_behind_older_ones(
    most: int, seconds: float, sweeps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest jobs run on and stay unsettled; a function has died after the cancel of each younger job."""
    monkeypatch.setattr(sweeping, "MAX_ELASTIC_JOBS", most)
    cloud = memory_cloud()
    changes = [with_seats(submission(spec=Spec(command=["train"], nodes=NodesSpec(max=1)))) for _ in range(12)]
    for change in changes:
        cloud.jobs.apply(change)
    ids = cloud.jobs.unsettled(limit=99)
    for job_id in ids[6:]:
        job = cloud.jobs.get(job_id)
        assert job is not None
        cloud.jobs.apply(transitions.cancel(job, None, message="", now=NOW))
    clock = FakeClock(NOW)
    for _ in range(sweeps):
        sweep(cloud.jobs, cloud.leases, clock, time_left_s=count(seconds, -1).__next__)
        clock.advance(60)
    assert cloud.jobs.unsettled(limit=99) == ids[:6]
    seats = cloud.jobs.get_many([seat_id(job_id, 0) for job_id in ids])
    assert [seat.state.terminal for seat in seats] == [False] * 6 + [True] * 6
