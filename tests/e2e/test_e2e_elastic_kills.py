"""Nodes of an elastic training killed and frozen at random moments, as processes with real connections."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from demo.elastic.train import END
from tests.kits.elastic.node_processes import NodeProcesses
from tests.kits.runner.fork_server import fork_context
from tests.kits.waiting import until

pytestmark = pytest.mark.processes

EXAMPLE, TRAINING = "demo.elastic.train", "gpu_client.training.byte_transformer"
CONTEXT = fork_context(EXAMPLE, TRAINING)
SEATS = (0, 1, 2)
FAULTS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL)
SMALL = {"inner_steps": 8, "batch_size": 4, "context": 32, "width": 32, "layers": 1}
CHANGE_S = 180


def wait_for_members(job: NodeProcesses, members: int, above_epoch: int) -> int:
    """Wait until a later epoch has so many members; return the epoch."""

    def found() -> int:
        view = job.view()
        return view.epoch if view.epoch > above_epoch and len(view.members) == members else 0

    epoch: int = until(found, CHANGE_S, what=f"{members} members after epoch {above_epoch}", every_s=0.05)
    return epoch


def read_traces(folder: Path) -> list[dict[str, Any]]:
    """Read the steps of all processes; the last line of a killed process may be incomplete."""
    texts = [path.read_text(encoding="utf-8") for path in folder.glob("trace-*.jsonl")]
    lines = [json.loads(line) for text in texts for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return sorted(lines, key=lambda one: one["at"])


def test_survivors_of_faults_at_random_moments_repeat_no_round_and_end_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEMO_FOLDER", str(tmp_path))
    chance = random.Random(20_261_127)
    with NodeProcesses(tmp_path, 3, 3, EXAMPLE, {**SMALL, "rounds": 10**6}, context=CONTEXT) as job:
        nodes = {node.seat: node for node in job.start_all(SEATS)}
        epoch = wait_for_members(job, 3, 0)
        for fault in FAULTS:
            seat = chance.choice(SEATS)
            until(lambda: chance.random() < 0.1, CHANGE_S, what="a random moment", every_s=0.05)
            nodes[seat].kill(fault)
            epoch = wait_for_members(job, 2, epoch)
            if fault is signal.SIGSTOP:
                nodes[seat].kill(signal.SIGCONT)
            else:
                job.end_attempt(nodes[seat])
                nodes[seat] = job.start(seat)
            epoch = wait_for_members(job, 3, epoch)

        def common_round() -> int:
            """Return the newest round once the last joiner has caught up; a round takes 50 ms."""
            newest = {".".join(one["node"].split(".")[:2]): one["round"] for one in read_traces(tmp_path)}
            rounds = [newest.get(f"{node.seat}.{node.attempt}", 0) for node in nodes.values()]
            return max(rounds) if max(rounds) - min(rounds) <= 2 else 0

        newest = until(common_round, CHANGE_S, what="a round that all nodes have")
        (tmp_path / f"{END}.new").write_text(str(newest + 20), encoding="utf-8")
        (tmp_path / f"{END}.new").rename(tmp_path / END)
        for node in nodes.values():
            assert node.wait(CHANGE_S) == 0, node.log[-3000:]
    traces = read_traces(tmp_path)
    ends = {one["node"]: one["sha256"] for one in traces if "sha256" in one}
    assert {node.partition(".")[0] for node in ends} == {"0", "1", "2"}
    assert len(set(ends.values())) == 1, ends
    for node in {one["node"] for one in traces}:
        rounds = [one["round"] for one in traces if one["node"] == node]
        assert rounds == sorted(rounds), node


def test_nodes_of_a_trusted_network_reduce_by_gloo(tmp_path: Path) -> None:
    parameters = {**SMALL, "rounds": 3, "engine": "gloo"}
    with NodeProcesses(tmp_path, 2, 2, TRAINING, parameters, context=CONTEXT) as job:
        nodes = job.start_all(SEATS[:2])
        assert [node.wait(CHANGE_S) for node in nodes] == [0, 0], nodes[0].log[-3000:]
        first, second = ((node.output / "model.safetensors").read_bytes() for node in nodes)
        assert first == second
        program = job.view().program
        assert program is not None
        assert (program.engine, program.codec) == ("gloo", "fp32")
