"""Test waiting points: bounded, thinned evenly, the newest always kept."""

from __future__ import annotations

from itertools import pairwise

from baton.contract.worker.output import MAX_POINTS
from gpu_client.agent.io.metric_buffer import MAX_POINTS_BYTES, MetricBuffer


class Now:
    def __init__(self) -> None:
        self.at = 1000.0

    def __call__(self) -> float:
        return self.at


def steps(spool: MetricBuffer) -> list[int]:
    return [point.step for point in spool.take()]


def test_what_was_reported_comes_out_in_order_with_its_time() -> None:
    now = Now()
    spool = MetricBuffer(now)
    spool.append(1, {"loss": 0.5})
    now.at = 1000.1239
    spool.append(2, {"loss": "nan"})
    spool.append(2, {"loss": "nan", "eval.loss": 0.25})
    first, second, third = spool.take()
    assert (first.step, first.at, first.metrics) == (1, 1000.0, {"loss": 0.5})
    assert (second.step, second.at, second.metrics) == (2, 1000.124, {"loss": "nan"})
    assert third.metrics == {"loss": "nan", "eval.loss": 0.25}
    assert spool.take() == []


def test_only_news_is_kept() -> None:
    spool = MetricBuffer(Now())
    for _ in range(3):
        spool.append(1, {"loss": 0.5})
    spool.append(2, {"loss": 0.5})
    spool.append(2, {"loss": 0.4})
    assert steps(spool) == [1, 2, 2]
    spool.append(2, {"loss": 0.4})
    assert steps(spool) == [], "also if it was shipped meanwhile"


def test_what_comes_too_fast_is_thinned_evenly_and_never_the_newest() -> None:
    spool = MetricBuffer(Now(), max_points=100)
    for total in (99, 100, 101, 150, 199, 1000, 7777):
        for step in range(1, total + 1):
            spool.append(step, {"loss": step * 0.5})
        found = steps(spool)
        assert found[-1] == total
        assert len(found) <= 100
        gaps = {after - before for before, after in pairwise(found[1:-1])}
        assert len(gaps) <= 1, (total, sorted(gaps))
        assert len(found) >= min(total, 45), total
        spool.append(0, {})
        assert steps(spool) == [0], "the next chunk begins with every point"


def test_rare_metrics_survive_the_thinning() -> None:
    spool = MetricBuffer(Now(), max_points=100)
    for step in range(1, 1001):
        spool.append(step, {"loss": "nan" if step == 333 else 1.0 / step})
        if step % 100 == 0:
            spool.append(step, {"eval.loss": 1.0})
    points = spool.take()
    assert [point.step for point in points if "eval.loss" in point.metrics] == list(range(100, 1001, 100))
    assert [point.step for point in points if point.metrics.get("loss") == "nan"] == [333]
    assert len(points) <= 100


def test_no_memory_grows_where_each_point_differs_from_the_one_before() -> None:
    spool = MetricBuffer(Now(), max_points=100)
    for step in range(1, 10_001):
        spool.append(step, {"a" if step % 2 else "b": 1.0})
    found = steps(spool)
    assert len(found) <= 100
    assert found[-1] == 10_000


def test_large_points_are_bounded_in_bytes() -> None:
    spool = MetricBuffer(Now())
    for step in range(5 * MAX_POINTS):
        spool.append(step, {f"metric_{number:040d}": step / 3 for number in range(64)})
    points = spool.take()
    assert sum(len(point.model_dump_json()) for point in points) <= MAX_POINTS_BYTES + 10_000
    assert points[-1].step == 5 * MAX_POINTS - 1
    assert len(points) > 10
