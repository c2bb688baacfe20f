"""The trainer's end and the agent's end of the channel speak the same language."""

import time
from collections.abc import Callable
from pathlib import Path

from gpu_client.agent.channel_server import ChannelServer, CheckpointNotice, Progress
from gpu_client.training.channel import Channel, Directive


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def test_messages_arrive_both_ways(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint-10"
    checkpoint.mkdir()
    received: list[Directive] = []
    with ChannelServer(tmp_path) as server:
        channel = Channel(str(server.path), received.append)
        try:
            until(server.hellos)
            channel.report(500, 500, {"loss": 0.5, "nan": float("nan")})
            until(lambda: server.progress() == Progress(500, 500, {"loss": 0.5}))
            assert channel.checkpoint_written(10, str(checkpoint), {"loss": 0.25})
            notices: list[CheckpointNotice] = []
            deadline = time.monotonic() + 5
            while not notices and time.monotonic() < deadline:
                notices = server.take_checkpoints()
            assert notices == [CheckpointNotice(10, checkpoint.resolve(), {"loss": 0.25})]
            assert server.request_checkpoint() == 1
            assert server.request_stop("release", checkpoint=True) == 1
            until(lambda: len(received) == 2)
            assert received == [Directive("checkpoint"), Directive("stop", "release", True)]
        finally:
            channel.close()
        until(lambda: not server.hellos())
        assert server.errors() == {}
