"""Checkpoints staged in shared memory, under real kills: what the agent stores is whole, and ends in the same bits."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch
from staging_agent import StagingAgent
from training_runs import Run, flat, run_ranks, same_bytes

from gpu_client.training.checkpoint import checkpoint_directory

pytestmark = pytest.mark.processes

STEPS = 1200


def test_killed_at_random_moments_it_ends_with_the_same_bits(tmp_path: Path) -> None:
    """The steps' time, the kills and the time that storing takes are all random."""
    Run("staged", tmp_path / "through", {"steps": STEPS, "every": STEPS}).finish()
    chance = random.Random(7)
    killed, stored, kills, saved = tmp_path / "killed", tmp_path / "stored", 0, []
    for attempt in range(60):
        with StagingAgent(tmp_path / str(attempt), stored, chance) as agent:
            run = Run("staged", killed, {"steps": STEPS}, **agent.environment)
            run.wait_for(lambda progress=agent.channel.progress: progress() is not None)
            until = time.monotonic() + chance.random() * 0.1
            while run.running and (kills >= 25 or time.monotonic() < until):
                agent.channel.wait(0.005)
                agent.gather()
            if run.running:
                kills += run.kill()
            agent.finish()
            saved += agent.committer.committed_steps
            newest = agent.newest()
            if newest is not None:
                assert checkpoint_directory.verify(newest).step == int(newest.name)
        if not run.running and (killed / "model.safetensors").exists():
            break
    run.finish()
    assert kills >= 8 and len(saved) > kills / 2
    assert saved == sorted(set(saved)), "no attempt began before what the last one had stored"
    for name in ("model.safetensors", "moments.safetensors"):
        assert same_bytes(tmp_path / "through", killed, name)


def test_several_processes_stage_their_pieces_side_by_side(tmp_path: Path) -> None:
    run_ranks("sharded", tmp_path / "through")
    stored = tmp_path / "stored"
    with StagingAgent(tmp_path / "0", stored, random.Random(7)) as agent:
        printed = run_ranks("sharded", tmp_path / "stopped", 2, agent.environment, stop_at=13)
        place = str(agent.arena / "checkpoint")
        # The agent takes the first checkpoint only after the run: the one before the stop has to go to disk.
        assert [f"rank {rank} at 10: {place}" in text for rank, text in enumerate(printed)] == [True, True]
        assert ["checkpoint-14" in text for text in printed] == [True, True]
        agent.finish()
        assert agent.committer.committed_steps == [10]
    last = {"BATON_JOB_ID": "job-1", "BATON_RESUME_FROM": str(stored / "10")}
    run_ranks("sharded", tmp_path / "again", 2, last)
    ends = [torch.load(tmp_path / name / "whole.pt", weights_only=True) for name in ("through", "again")]
    assert flat(ends[0]) == flat(ends[1])
