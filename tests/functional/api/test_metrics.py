"""CloudWatch metrics: ends of attempts, queue age, heartbeat lag, and no other metric."""

from __future__ import annotations

import io
import json
import threading
from typing import Any

import pytest

from baton.contract.jobs.job import FailureClass
from functions.api.operations.cloudwatch_metrics import DIMENSION, NAMESPACE, UNITS, CloudWatchMetrics, count_ends
from functions.domain.jobs.transaction import Transaction
from functions.handlers.wiring import MeasuredJobStore
from tests.kits.api.fakes import FakeClock
from tests.kits.api.harness import Api

NOW = 1_790_000_000


class Ends:
    """Recorder of the ends that `count_ends` finds in an API's writes."""

    def __init__(self, api: Api, patch: pytest.MonkeyPatch) -> None:
        self.told: list[dict[str, int]] = []
        apply = api.context.jobs.apply

        def noted(change: Transaction) -> None:
            apply(change)
            self.told.append(count_ends(change))

        patch.setattr(api.context.jobs, "apply", noted)

    def take(self) -> list[dict[str, int]]:
        """Return the counts since the last call, without empty ones."""
        taken, self.told = [told for told in self.told if told], []
        return taken


@pytest.fixture
def ends(api: Api, monkeypatch: pytest.MonkeyPatch) -> Ends:
    return Ends(api, monkeypatch)


def held(api: Api, **job: Any) -> Any:
    api.submit(**job)
    return api.claim()


def test_an_attempt_that_completes(api: Api, ends: Ends) -> None:
    worker = held(api)
    worker.heartbeat(step=1).ok()
    worker.commit(100).ok()
    worker.complete().ok()
    assert ends.take() == [{"AttemptsCompleted": 1}]
    worker.complete().ok()
    assert ends.take() == [], "a repeat ends nothing"


MISHAPS = [kind for kind in FailureClass if kind is not FailureClass.STOPPED_BY_RULE]


@pytest.mark.parametrize("kind", MISHAPS)
def test_failures_and_faults_of_the_machine_are_told_apart(api: Api, ends: Ends, kind: FailureClass) -> None:
    held(api).fail(failure_class=kind.value).ok()
    assert ends.take() == [{"NodeFaults" if kind.node_fault else "AttemptsFailed": 1}]


def test_what_a_rule_has_ended_is_no_failed_attempt(api: Api, ends: Ends) -> None:
    held(api).fail(failure_class="stopped_by_rule").ok()
    assert ends.take() == [{"JobsFailed": 1}]


def test_a_job_that_failed_for_good(api: Api, ends: Ends) -> None:
    held(api, policy={"max_failures": 1}).fail(failure_class="script_error").ok()
    assert ends.take() == [{"AttemptsFailed": 1, "JobsFailed": 1}]


def test_a_dead_attempt_is_told(api: Api, ends: Ends) -> None:
    held(api)
    api.clock.advance(1000)
    api.sweep()
    assert ends.take() == [{"DeadAttempts": 1}]


def test_what_a_user_or_a_worker_wants_is_neither_dead_nor_failed(api: Api, ends: Ends) -> None:
    worker = held(api)
    worker.release().ok()
    worker = api.claim()
    api.post(f"/job/{worker.id}/stop").ok()
    assert ends.take() == []


def test_the_sweep_tells_how_late_the_oldest_lease_is_and_how_long_jobs_wait(api: Api) -> None:
    swept = api.sweep()
    assert (swept.heartbeat_lag_s, swept.queue_age_s) == (0, 0)
    worker = held(api)
    api.submit(queue="elsewhere")
    expires_at = worker.heartbeat().ok()["lease_expires_at"]
    api.clock.advance(expires_at - api.clock.now() + 40)
    swept = api.sweep()
    assert swept.heartbeat_lag_s == 40
    assert swept.queue_age_s == expires_at + 40 - NOW
    api.clock.advance(60)
    assert api.sweep().heartbeat_lag_s == 0


def test_a_damaged_item_keeps_the_sweep_from_nothing(
    api: Api, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    held(api)
    api.clock.advance(1000)

    def damaged(*, limit: int) -> int:
        raise ValueError

    monkeypatch.setattr(api.context.jobs, "longest_waiting", damaged)
    swept = api.sweep()
    assert (swept.reclaimed, swept.queue_age_s) == (1, 0)
    assert "the age of the queue is unknown" in caplog.text


def test_a_line_is_an_embedded_metric_of_the_stage() -> None:
    stream = io.StringIO()
    CloudWatchMetrics("prod", stream, FakeClock(NOW)).put({"QueueAge": 61, "HeartbeatLag": 0, "DeadAttempts": 2})
    (line,) = stream.getvalue().splitlines()
    told = json.loads(line)
    (directive,) = told["_aws"]["CloudWatchMetrics"]
    assert told["_aws"]["Timestamp"] == NOW * 1000
    assert (directive["Namespace"], directive["Dimensions"]) == (NAMESPACE, [[DIMENSION]])
    assert directive["Metrics"] == [
        {"Name": "QueueAge", "Unit": "Seconds"},
        {"Name": "DeadAttempts", "Unit": "Count"},
    ]
    assert {name: told[name] for name in (DIMENSION, "QueueAge", "DeadAttempts")} == {
        DIMENSION: "prod",
        "QueueAge": 61,
        "DeadAttempts": 2,
    }
    assert "HeartbeatLag" not in told


@pytest.mark.parametrize(("stage", "values"), [("prod", {"QueueAge": 0}), ("prod", {}), (None, {"QueueAge": 5})])
def test_nothing_is_written_where_there_is_nothing_to_tell(stage: str | None, values: dict[str, int]) -> None:
    stream = io.StringIO()
    CloudWatchMetrics(stage, stream, FakeClock(NOW)).put(values)
    assert stream.getvalue() == ""


def test_a_metric_without_a_unit_is_a_mistake() -> None:
    with pytest.raises(KeyError):
        CloudWatchMetrics("prod", io.StringIO(), FakeClock(NOW)).put({"Queue_Age": 1})


class _Client:
    """A DynamoDB that accepts or refuses."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def transact_write_items(self, **_: Any) -> None:
        if self.error is not None:
            raise self.error


def test_only_a_change_that_was_written_is_told(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    changes: list[Transaction] = []
    client, stream = _Client(), io.StringIO()
    jobs = MeasuredJobStore(client, "t-", CloudWatchMetrics("prod", stream, FakeClock(NOW)))
    monkeypatch.setattr(api.context.jobs, "apply", _both(api.context.jobs.apply, changes))
    held(api).complete().ok()
    for change in changes:
        jobs.apply(change)
    assert [json.loads(line)["AttemptsCompleted"] for line in stream.getvalue().splitlines()] == [1]
    client.error = RuntimeError("refused")
    with pytest.raises(RuntimeError):
        jobs.apply(changes[-1])
    assert len(stream.getvalue().splitlines()) == 1


def test_lines_of_threads_do_not_mix() -> None:
    stream = io.StringIO()
    metrics = CloudWatchMetrics("prod", stream, FakeClock(NOW))
    threads = [threading.Thread(target=lambda: [metrics.put(dict.fromkeys(UNITS, 1)) for _ in range(50)]) for _ in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(set(UNITS) < set(json.loads(line)) for line in stream.getvalue().splitlines())


def _both(apply: Any, changes: list[Transaction]) -> Any:
    def noted(change: Transaction) -> None:
        apply(change)
        changes.append(change)

    return noted
