"""Worlds as text: nodes, rounds, events, and what a waiting or running elastic job says of its nodes."""

from __future__ import annotations

from typing import Any

import pytest

from baton.contract.elastic.world import NodeView, RoundReport, WorldView
from baton.contract.jobs.history import EventView
from baton.contract.jobs.job import AttemptEnd, JobState, Progress
from gpu_client.cli.jobs.explain import JobFacts, explain
from gpu_client.cli.jobs.summary import headline, summarize
from gpu_client.cli.world import view
from tests.unit.cli.cli_kit import ID, NOW, a_job, an_attempt

NODES = {"min": 2, "max": 4}


def node(seat: int, **more: Any) -> NodeView:
    values = {"node": f"{seat}.1.00000000", "seat": seat, "member": True, "machine_id": f"m-{seat}", "joined_at": NOW}
    return NodeView.model_validate({**values, **more})


def world(*nodes: NodeView, **more: Any) -> WorldView:
    values = {"job": ID, "state": "training", "epoch": 5, "round": 1200, "nodes": nodes}
    return WorldView.model_validate({**values, **NODES, **more})


def round_(number: int, **more: Any) -> RoundReport:
    return RoundReport.model_validate({"round": number, "epoch": 5, "contributors": 3, "tokens": 51_200, **more})


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (node(1), "member"),
        (node(1, state="training"), "training"),
        (node(1, state="training", lease_live=False), "training, lease lost"),
        (node(1, state="training", relay=True), "training, relay"),
        (node(1, member=False), "joining"),
        (node(1, member=False, ready=False), "joining, fetches the state"),
    ],
)
def test_states(one: NodeView, said: str) -> None:
    assert view.describe_state(one) == said


def test_rows() -> None:
    member = node(3, state="training", tokens=12_800, link_mbit_s=480.4)
    slower = node(1, state="training", tokens=6_400)
    joining = node(0, member=False, joined_at=None, round=1199)
    assert view.node_rows(world(member, slower, joining), NOW + 180) == [
        ["3", "training", "m-3", "12,800", "67%", "480", "", "3 min ago"],
        ["1", "training", "m-1", "6,400", "33%", "", "", "3 min ago"],
        ["0", "joining", "m-0", "", "", "", "1,199", ""],
    ]


def test_the_nodes_of_an_ended_training_have_lost_no_lease() -> None:
    ended = node(3, state="training", lease_live=False)
    assert view.node_rows(world(ended, state="ended"), NOW + 180) == [
        ["3", "ended", "m-3", "", "", "", "", "3 min ago"]
    ]


def test_rounds_are_a_line_of_bars() -> None:
    rounds = [round_(at, round_s=at * 10.0, reduce_s=2.0, repaired=at % 2) for at in range(1, 5)]
    said = "last: 40 s, 2 s of it reduce, 3 contributors, 51,200 tokens, 2 buckets reduced again in 4 rounds"
    assert view.describe_rounds(rounds, unicode=True) == f"▃▅▇█ {said}"
    assert view.describe_rounds(rounds, unicode=False) == said
    assert view.describe_rounds([], unicode=True) == ""


def test_short_texts() -> None:
    assert view.watch_text(world(node(1), node(2, member=False))) == "1 of 4 nodes, 1 joining, round 1,200"
    assert view.watch_text(world(node(1, member=False), state="forming")) == "waiting: 1 of 2 nodes has joined"
    assert view.watch_text(world(state="forming")) == "waiting: 0 of 2 nodes have joined"
    assert dict(view.world_fields(world(node(1)), unicode=True))["state"] == "training: 1 of 4 nodes; begins with 2"
    rounds = [round_(1, round_s=9.0), round_(2, round_s=60.0, reduce_s=2.0, sent_bytes=15_000_000)]
    assert view.describe_rates(world(rounds=rounds)) == ", 853 tokens/s, a node sent 15.0 MB at 60 Mbit/s"
    assert view.describe_rates(world(rounds=rounds[:1])) == ", 5,689 tokens/s"
    assert view.describe_rates(world(rounds=[round_(0)])) == view.describe_rates(world()) == ""
    told = world(node(1), advice="The reduces take 50% of the time.")
    assert dict(view.world_fields(told, unicode=True))["advice"] == "The reduces take 50% of the time."
    assert dict(view.world_fields(world(epoch=0, state="forming"), unicode=True))["round"] == ""


@pytest.mark.parametrize(
    ("type_", "data", "said"),
    [
        ("world.joined", {"joined": [2], "members": [0, 1, 2], "round": 12}, "node 2 joined: 3 nodes, round 12"),
        ("world.joined", {"joined": [0, 1], "members": [0, 1], "round": 0}, "nodes 0, 1 joined: 2 nodes, round 0"),
        (
            "world.lost",
            {"lost": [{"seat": 1, "cause": "silent"}, {"seat": 2}], "members": [0], "round": 12},
            "nodes 1 (silent), 2 lost: 1 node, round 12",
        ),
        ("world.repaired", {"round": 12, "repaired": 1}, "round 12: 1 bucket reduced again"),
    ],
)
def test_events(type_: str, data: dict[str, Any], said: str) -> None:
    values = {"seq": 1, "type": type_, "at": NOW, "epoch": 1, "data": data, "event_type": type_, "timestamp": NOW}
    assert view.event_line(EventView.model_validate(values)) == said


def test_the_running_time_of_all_nodes() -> None:
    """A running node counts until its last report; the job's counters have the ended attempts."""
    progress = Progress(step=7, reported_at=NOW - 400)
    attempts = [
        an_attempt(1, AttemptEnd.RELEASED, seat=0),
        an_attempt(2, seat=0, progress=progress),
        an_attempt(1, seat=1, progress=progress),
        an_attempt(1, seat=2),
    ]
    job = a_job(JobState.RUNNING, nodes=NODES, counters={"attempts": 4, "runtime_s": 100}, epoch=4, progress=progress)
    found = summarize(job, attempts[-1], 3.6, nodes=attempts)
    assert (found.runtime_s, found.cost, found.step, found.eta_s) == (300, 0.3, 7, None)
    assert headline(found).startswith("running, step 7, 4 attempts, ran 5 min")


def test_a_running_elastic_job_is_explained_by_its_nodes() -> None:
    job = a_job(JobState.RUNNING, nodes=NODES, epoch=3, counters={"attempts": 3, "failures": 2, "runtime_s": 90})
    attempts = [an_attempt(1, AttemptEnd.FAILED, seat=1), an_attempt(2, seat=1, resumed_step=40)]
    found = explain(JobFacts(now=NOW, job=job, attempts=attempts, world=world(node(1), node(2))))
    assert found.answer.startswith("The job runs on 2 nodes: running, 2 of 4 nodes, round 1,200")
    assert found.history[1] == "node 1, attempt 2 on m-2, from step 40: runs"
    assert found.budgets == ["2 failures; 12 of all nodes without a checkpoint are allowed"]


def test_a_forming_elastic_job_names_what_is_missing() -> None:
    job = a_job(JobState.RUNNING, nodes=NODES, epoch=2, queue="night")
    attempts = [an_attempt(1, seat=0), an_attempt(1, seat=3, machine_id="m-9")]
    forming = world(node(0, member=False), state="forming")
    found = explain(JobFacts(now=NOW, job=job, attempts=attempts, world=forming))
    assert found.answer == (
        "The job runs and is waiting: 1 of 2 nodes has joined. Workers hold 2 of 4 seats (m-1, m-9); a node joins when "
        "its script calls session.elastic."
    )
    assert found.advice == ["To see what the nodes do: baton logs ID"]
    found = explain(JobFacts(now=NOW, job=job, attempts=attempts[:1], world=forming))
    assert found.advice[0].startswith("Each node needs a worker. Start 1 more: ") and "QUEUE=night" in found.advice[0]
    pending = explain(JobFacts(now=NOW, job=a_job(nodes=NODES), world=world(state="forming")))
    assert pending.answer.startswith("The job is waiting: 0 of 2 nodes have joined. The job has been claimable for")


def test_alerts_of_presets_name_the_node() -> None:
    def event(seq: int, type_: str, seat: int) -> EventView:
        data = {"rule": "preset-stuck", "message": "no step for 14 min", "step": 7, "seat": seat}
        values = {"seq": seq, "type": type_, "at": NOW, "epoch": seq, "data": data, "event_type": "", "timestamp": NOW}
        return EventView.model_validate(values)

    events = [event(1, "rule.fired", 0), event(2, "rule.fired", 2), event(3, "rule.cleared", 0)]
    job = a_job(JobState.RUNNING, nodes=NODES, epoch=9)
    found = explain(JobFacts(now=NOW, job=job, events=events, world=world(node(0), node(2))))
    assert found.alerts == ["node 2: preset-stuck: no step for 14 min (at step 7)"]
