"""Connect the trainer's end of the channel to the agent's end."""

import os
import sys
from pathlib import Path

from gpu_client.agent.control.channel_messages import CheckpointNotice, TrainingProgress
from gpu_client.agent.control.channel_server import ChannelServer
from gpu_client.agent.process.supervisor import start_trainer
from gpu_client.training.channel import AgentChannel
from gpu_client.training.protocol import TrainerDirective
from tests.kits.waiting import until

ROOT = Path(__file__).resolve().parents[3]
WAIT_S = 60


def test_messages_arrive_both_ways(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint-10"
    checkpoint.mkdir()
    received: list[TrainerDirective] = []
    with ChannelServer(tmp_path) as server:
        channel = AgentChannel(str(server.path), received.append)
        try:
            until(server.hellos, WAIT_S)
            channel.report(500, 500, {"loss": 0.5, "nan": float("nan")})
            told = TrainingProgress(500, 500, {"loss": 0.5}, nonfinite={"nan": "nan"})
            until(lambda: server.progress() == told, WAIT_S)
            assert channel.checkpoint_written(10, str(checkpoint), {"loss": 0.25})
            notices = until(server.take_checkpoints, WAIT_S)
            assert notices == [CheckpointNotice(10, checkpoint.resolve(), {"loss": 0.25})]
            assert server.request_checkpoint() == 1
            assert server.request_stop("release", checkpoint=True) == 1
            until(lambda: len(received) == 2, WAIT_S)
            assert received == [TrainerDirective("checkpoint"), TrainerDirective("stop", "release", True)]
        finally:
            channel.close()
        until(lambda: not server.hellos(), WAIT_S)
        assert server.errors() == {}


def test_a_process_that_hangs_prints_where(tmp_path: Path) -> None:
    script = """
import os, time
from gpu_client.training.channel import AgentChannel

def wait_for_a_lock_that_nobody_releases() -> None:
    time.sleep(60)

channel = AgentChannel(os.environ["BATON_CHANNEL"], print)
wait_for_a_lock_that_nobody_releases()
"""
    with ChannelServer(tmp_path) as server:
        environment = {**os.environ, "BATON_CHANNEL": str(server.path), "PYTHONPATH": str(ROOT)}
        trainer = start_trainer([sys.executable, "-c", script], environment, tmp_path)
        try:
            until(server.hellos, WAIT_S, what="the hello of the process")
            assert server.request_stacks() == 1
            until(
                lambda: any("wait_for_a_lock" in line for line in trainer.output.last_lines()),
                WAIT_S,
                what="the stacks of the process",
            )
        finally:
            trainer.stop(0)
