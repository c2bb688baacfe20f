"""Nodes that share the shards of one data set: one dies, then all of them, and no counted batch is trained again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest

from baton.contract.elastic.data import DataProgress
from baton.contract.elastic.nodes import NodesSpec
from baton.contract.elastic.spans import has_number
from baton.contract.jobs.job import JobState, JobSubmit
from baton.contract.jobs.policy import Policy
from functions.domain.worlds.seat_ids import seat_ids
from tests.kits.elastic.node_processes import NodeProcesses
from tests.kits.stack.workshop import Workshop
from tests.kits.waiting import until

pytestmark = [pytest.mark.processes, pytest.mark.emulator]

SHARDS, BATCHES, WAIT_S = 12, 3, 180
ALL = {(shard, batch) for shard in range(SHARDS) for batch in range(BATCHES)}
SCRIPT = Path(__file__).parents[1] / "kits/elastic/shard_node.py"


class Step(NamedTuple):
    """Batch that a node has begun after so many rounds; the next round contains the batch."""

    batch: tuple[int, int]
    round: int


def read_steps(folder: Path, nodes: str = "*") -> list[Step]:
    """Read the steps of nodes; the last line of a killed node may be incomplete."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(folder.glob(nodes))]
    rows = [line.split() for text in texts for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [Step((int(row[0]), int(row[1])), int(row[2])) for row in rows]


def read_counted(folder: Path, saved: int) -> set[tuple[int, int]]:
    """Return the batches that the checkpoint of a round contains: a late node's batches count in a later round."""
    texts = [path.read_text(encoding="utf-8") for path in folder.parent.glob(f"{folder.name}.*")]
    lines = [json.loads(line) for text in texts for line in text.splitlines()]
    (found,) = [one for one in lines if one["round"] == saved]
    data = [DataProgress.model_validate_json(found[name]) for name in ("trained", "pending")]
    return {
        (shard, batch)
        for shard, batch in ALL
        if any(has_number(one.finished, shard) or batch < one.offset_of(shard) for one in data)
    }


def params(folder: Path) -> dict[str, object]:
    folder.mkdir()
    return {"shards": SHARDS, "batches": BATCHES, "batch_s": 0.1, "folder": str(folder)}


def test_the_shards_of_a_killed_node_return_and_no_other_batch_is_trained_twice(tmp_path: Path) -> None:
    folder = tmp_path / "steps"
    with NodeProcesses(tmp_path, 2, 2, "tests.kits.elastic.shard_node", params(folder)) as job:
        lost, stays = job.start_all((0, 1))
        until(lambda: len(read_steps(folder, "0.*")) >= 7, WAIT_S, what="batches of the node that dies", every_s=0.05)
        lost.kill()
        lost.wait(WAIT_S)
        job.end_attempt(lost)
        assert stays.wait(WAIT_S) == 0, stays.log[-3000:]
    own, others = ([one.batch for one in read_steps(folder, name)] for name in ("0.*", "1.*"))
    assert set(own) | set(others) == ALL
    assert len(set(others)) == len(others)
    repeated = [one for one in own if one in others]
    # The dead node has contributed four batches at least; of the rest, the tail since its last contribution returns.
    assert repeated == own[len(own) - len(repeated) :]
    assert len(repeated) <= len(own) - 4


def test_after_the_loss_of_all_machines_the_data_is_that_of_the_checkpoint(tmp_path: Path, shop: Workshop) -> None:
    stack, folder = shop.stack, tmp_path / "steps"
    job = JobSubmit(
        command=["python", str(SCRIPT)],
        parameters=params(folder),
        nodes=NodesSpec(min=2, max=2),
        queue=shop.queue,
        policy=Policy(heartbeat_interval_s=2, backoff_s=0, avoid_machine_s=0),
    )
    job_id = stack.client.submit(job).id
    agents = [shop.agent(f"first-{number}") for number in range(2)]
    stack.wait_for_commit(job_id, 2)
    for agent in agents:
        agent.kill_group()
    for seat in seat_ids(job_id, 2):
        stack.expire_lease(seat)
    stack.wait_for(job_id, JobState.PENDING)
    saved, before = stack.job(job_id).checkpoint_step or 0, read_steps(folder)
    first = {path.name for path in folder.iterdir()}
    for number in range(2):
        shop.agent(f"second-{number}")
    ended = stack.wait_for(job_id, JobState.COMPLETE, JobState.FAILED, timeout_s=WAIT_S)
    assert ended.state is JobState.COMPLETE, ended.reason
    again = [one.batch for path in folder.iterdir() if path.name not in first for one in read_steps(folder, path.name)]
    counted = read_counted(folder, saved)
    assert counted and counted <= {one.batch for one in before}
    assert sorted(again) == sorted(ALL - counted)
