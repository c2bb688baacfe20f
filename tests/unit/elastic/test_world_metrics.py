"""The metrics of a round: reduced over its contributors, equal at all nodes, and reported by each of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from gpu_client.elastic.rounds.member_status import MemberStatus
from gpu_client.elastic.rounds.world_metrics import choose_metrics, measure_link, measure_round, reduce_metrics
from tests.kits.elastic.threads import ThreadedCluster, run_together

A, B, C = "0.1.aaaaaaaa", "1.1.bbbbbbbb", "2.1.cccccccc"


def status(node: str, **metrics: float) -> MemberStatus:
    return MemberStatus(node, 4, 99, ready=True, metrics=metrics)


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("loss", (2.0, 5.0), 4.0),
        ("loss", (0.1, 0.1), 0.1),
        ("loss", (2.0, math.nan), math.nan),
        ("loss", (2.0, math.inf), math.inf),
        ("gpu.temp", (60.0, 80.0), 80.0),
        ("data.wait", (1.0, 3.0), 3.0),
        ("world.link_mbit_s", (90.0, 30.0), 30.0),
        ("gpu.temp", (math.nan, 80.0), math.nan),
        ("mine", (1.0, 4.0), 3.0),
    ],
)
def test_a_metric_is_reduced_over_the_contributors_by_its_kind(
    name: str, values: tuple[float, float], expected: float
) -> None:
    statuses = [status(A, **{name: values[0]}), status(B, **{name: values[1]}), status(C, **{name: 1000.0})]
    found = reduce_metrics(statuses, {A: 10, B: 20})
    assert found == {name: pytest.approx(expected, nan_ok=True)}


def test_a_declared_reduction_and_a_missing_value_count() -> None:
    statuses = [status(A, skipped=2.0, loss=1.0), status(B, skipped=3.0)]
    assert reduce_metrics(statuses, {A: 1, B: 9}, {"skipped": "sum"}) == {"loss": 1.0, "skipped": 5.0}


def test_nodes_send_numbers_that_others_need() -> None:
    class Broken:
        def __float__(self) -> float:
            raise RuntimeError

    reported: dict[str, Any] = {"loss": 2, "eval_loss": 3.5, "train/f1-macro": 1.0, "other": 4.0, "grad_norm": Broken()}
    chosen = choose_metrics(reported, frozenset({"train.f1_macro", "grad_norm"}))
    assert chosen == {"loss": 2.0, "eval.loss": 3.5, "train.f1_macro": 1.0}


def test_a_loss_with_a_gradient_is_read_without_a_warning() -> None:
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        assert choose_metrics({"loss": torch.tensor(2.0, requires_grad=True)}) == {"loss": 2.0}
    finally:
        torch.set_warn_always(before)


def test_a_round_is_measured() -> None:
    assert measure_round(3, 2, 500, round_s=10.0, reduced={"loss": 1.5, "mine": 1.0}) == {
        "world.round": 3.0,
        "world.nodes": 2.0,
        "world.round_s": 10.0,
        "world.tokens_per_s": 50.0,
        "world.loss": 1.5,
    }
    assert measure_link(5_000_000, 2.0) == {"world.sent_bytes": 5e6, "world.link_mbit_s": pytest.approx(20.0)}
    assert measure_link(0, 2.0) == {"world.sent_bytes": 0.0}


def test_statuses_bear_metrics_of_any_value() -> None:
    before = status(A, loss=math.nan, grad_norm=math.inf)
    after = MemberStatus.decode(before.encode())
    assert math.isnan(after.metrics["loss"])
    assert after.metrics["grad_norm"] == math.inf


def test_all_nodes_know_the_mean_loss_of_the_world() -> None:
    with ThreadedCluster(2) as cluster:
        nodes = [cluster.add(inner_steps=2) for _ in range(2)]
        assert nodes[0].outer.data_metrics() == {}
        for loss, one in zip((1.0, 4.0), nodes, strict=True):
            one.outer.note_metrics({"loss": loss, "other": 7.0})

        def train(place: int) -> None:
            nodes[place].outer.start()
            for _ in range(2):
                nodes[place].step(tokens=1 + place)

        run_together(lambda: train(0), lambda: train(1))
        found = [one.outer.data_metrics() for one in nodes]
        assert [one["world.loss"] for one in found] == [3.0, 3.0]
        assert [(one["world.round"], one["world.nodes"]) for one in found] == [(1.0, 2.0)] * 2
        assert all(0 <= one["world.stall"] <= 100 and one["world.round_s"] > 0 for one in found)
