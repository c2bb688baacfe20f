"""Commands about an elastic job: `world`, `show`, `watch`, `explain`, `logs`, `metrics`, `events`."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.contract.elastic.world import EpochProposal, JoinRequest, NodeProgram, NodeReport, RoundReport, WorldReport
from baton.contract.worker.calls import HeartbeatRequest, WorkItem
from baton.contract.worker.output import LogChunk, ReportedPoint
from tests.functional.cli.people import Baton, Labour, submit
from tests.kits.clouds.emulator import unique

pytestmark = [pytest.mark.emulator, pytest.mark.processes]
PROGRAM = NodeProgram(torch="2.13.0", engine="wire", codec="int8", parameters=119_296, model_sha256="9f" * 32)


class Nodes:
    """Workers that hold the seats of one job, by seat."""

    def __init__(self, labour: Labour) -> None:
        self.labour = labour
        self.client = labour.client
        self.items: dict[int, WorkItem] = {}

    def claim(self, count: int) -> None:
        for _ in range(count):
            item = self.labour.claim(machine_id=unique("m"))
            assert item.world is not None
            self.items[item.world.seat] = item

    def name(self, seat: int) -> str:
        return f"{seat}.{self.items[seat].epoch}.0000000{seat}"

    def join(self, seat: int, *, ready: bool = True) -> None:
        item = self.items[seat]
        request = JoinRequest(node=self.name(seat), ready=ready, program=PROGRAM)
        self.client.join_world(item.id, item.lease_token, request)

    def propose(self, seat: int, epoch: int, *members: int) -> None:
        item = self.items[seat]
        names = [self.name(one) for one in members]
        proposal = EpochProposal(node=self.name(seat), epoch=epoch, members=names, round=12)
        self.client.propose_epoch(item.id, item.lease_token, proposal)

    def report(self, seat: int, epoch: int) -> None:
        item = self.items[seat]
        times = {"reduce_s": 2.0, "sent_bytes": 15_000_000}
        rounds = [
            RoundReport(round=10 + at, epoch=epoch, contributors=2, tokens=51_200, **times, round_s=30.0 * at)
            for at in (1, 2)
        ]
        nodes = [NodeReport(node=self.name(seat), state="training", tokens=25_600, link_mbit_s=480)]
        body = WorldReport(node=self.name(seat), epoch=epoch, rounds=rounds, nodes=nodes)
        self.client.report_world(item.id, item.lease_token, body)


def test_a_life(baton: Baton, labour: Labour, tmp_path: Path) -> None:
    job_id = submit(baton, labour, tmp_path, nodes={"min": 2, "max": 3})
    assert "No node has joined." in baton("world", job_id).ok().err
    said = baton("explain", job_id).ok().out
    assert "The job is waiting: 0 of 2 nodes have joined. The job has been claimable for" in said
    nodes = Nodes(labour)
    nodes.claim(1)
    (first,) = nodes.items
    nodes.join(first)
    said = " ".join(baton("explain", job_id).ok().out.split())
    assert "The job runs and is waiting: 1 of 2 nodes has joined. Workers hold 1 of 3 seats" in said
    assert "Each node needs a worker. Start 1 more:" in said
    nodes.claim(2)
    second, third = sorted(set(nodes.items) - {first})
    nodes.join(second)
    nodes.propose(first, 0, first, second)
    nodes.join(third, ready=False)
    nodes.report(first, 1)
    client = labour.client
    for seat, item in nodes.items.items():
        client.heartbeat(item.id, item.lease_token, HeartbeatRequest(step=12, metrics={"loss": 0.25}))
        chunk = LogChunk(first_line=0, lines=[f"line of {seat}"], points=[ReportedPoint(step=seat + 1, at=1)])
        client.send_logs(item.id, item.lease_token, chunk)
    shown = baton("world", job_id).ok().out
    rows = [line.split() for line in shown.splitlines()]
    assert ["round", "12"] in rows and any(row[:3] == ["state", "training:", "2"] for row in rows)
    assert "codec int8" in shown and "last: 1 min, 2 s of it reduce, 2 contributors, 51,200 tokens" in shown
    table = {row[0]: row[1:] for row in rows if row and row[0].isdigit()}
    assert table[str(first)][0] == "training" and table[str(first)][2:5] == ["25,600", "100%", "480"]
    assert table[str(third)][:2] == ["joining,", "fetches"]
    for words in (("show", job_id, "--json"), ("--json", job_id), (job_id, "--json")):
        assert baton("world", *words).ok().json["epoch"] == 1
    shown = baton("show", job_id).ok().out
    assert "2 of 3 nodes, 1 joining, round 12; begins with 2" in shown and f"node {first}, 1" in shown
    assert "2 nodes: running, 2 of 3 nodes, 1 joining, round 12, step 12" in baton("explain", job_id).ok().out
    everything = baton("logs", job_id).ok().out.splitlines()
    assert sorted(everything) == sorted(f"[{seat}] line of {seat}" for seat in nodes.items)
    assert baton("logs", job_id, "--node", second).ok().out == f"line of {second}\n"
    assert {line["node"] for line in baton("logs", job_id, "--json").ok().lines} == set(nodes.items)
    points = baton("metrics", job_id, "--node", second, "--jsonl").ok().lines
    assert [one["step"] for one in points] == [second + 1]
    assert "world.joined" in baton("events", job_id).ok().out
    baton("world", "exclude", job_id, third).failed(3, f"Node {third} is no member of epoch 1")
    assert f"Epoch 2 begins with 1 node: {first}." in baton("world", "exclude", job_id, second).ok().out
    baton("logs", job_id, "--node", 9).failed(3, "has no node 9", "The nodes are 0 to 2.")
    other = submit(baton, labour, tmp_path)
    baton("world", other).failed(3, "has no nodes")
    labour.item = nodes.items[first]
    baton.session_options = {"sleep": lambda _seconds: labour.complete({})}
    ended = baton("watch", job_id)
    assert ended.code == 0 and "complete, step 12" in ended.out
    assert "round 12, 853 tokens/s, a node sent 15.0 MB at 60 Mbit/s" in " ".join(ended.err.split())
    assert "nodes" in ended.err and "joined: 2 nodes, round 12" in ended.err
