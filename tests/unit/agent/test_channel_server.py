"""Test the agent's end of the channel against good, broken and hostile trainers."""

import contextlib
import json
import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_client.agent.control import channel_messages, channel_server
from gpu_client.agent.control.channel_messages import CheckpointNotice, Hello, TrainingProgress
from gpu_client.agent.control.channel_server import ChannelServer
from tests.kits.clock import Clock
from tests.kits.waiting import soon


@pytest.fixture
def clock() -> Clock:
    return Clock(0.0)


@pytest.fixture
def server(tmp_path: Path, clock: Clock) -> Iterator[ChannelServer]:
    (tmp_path / "output" / "checkpoint-10").mkdir(parents=True)
    with ChannelServer(tmp_path / "output", clock) as server:
        yield server


@contextlib.contextmanager
def trainer(server: ChannelServer) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(server.path))  # Blocking: it waits while the server has others to accept.
        connection.settimeout(60)
        yield connection


def line(**message: object) -> bytes:
    return json.dumps(message).encode() + b"\n"


def read_line(connection: socket.socket) -> dict[str, object]:
    data = b""
    while not data.endswith(b"\n"):
        piece = connection.recv(1)
        assert piece, "the server has hung up"
        data += piece
    message: dict[str, object] = json.loads(data)
    return message


def expects(server: ChannelServer, progress: TrainingProgress) -> None:
    """Assert that the server receives this progress."""
    soon(lambda: server.progress() == progress)


def works(server: ChannelServer, step: int) -> None:
    """Assert that the server serves a new trainer."""
    with trainer(server) as connection:
        connection.sendall(line(type="progress", step=step, total=None, metrics={}))
        soon(lambda: server.progress() == TrainingProgress(step, None, {}))


def test_the_socket_is_private(server: ChannelServer) -> None:
    assert stat.S_IMODE(server.path.parent.stat().st_mode) == 0o700
    assert len(os.fsencode(server.path)) < 104


def test_a_session(server: ChannelServer, tmp_path: Path) -> None:
    path = tmp_path / "output" / "checkpoint-10"
    with trainer(server) as connection:
        connection.sendall(line(type="hello", pid=42, protocol=1))
        soon(lambda: server.hellos() == [Hello(42, 1)])
        message = line(type="progress", step=9, total=500, metrics={"loss": 0.5, "bad": "x"})
        connection.sendall(message[:20])
        connection.sendall(message[20:] + line(type="checkpoint", step=10, path=str(path), metrics={"loss": 1}))
        soon(lambda: server.progress() == TrainingProgress(9, 500, {"loss": 0.5}))
        connection.sendall(line(type="progress", step=10, total=500, metrics={}))
        soon(lambda: server.progress() == TrainingProgress(10, 500, {}))
        assert server.take_checkpoints() == [CheckpointNotice(10, path.resolve(), {"loss": 1.0})]
        assert server.take_checkpoints() == []
        assert server.request_checkpoint() == 1
        assert read_line(connection) == {"type": "directive", "directive": "checkpoint"}
        assert server.request_stop("pause", checkpoint=True) == 1
        expected = {"type": "directive", "directive": "stop", "reason": "pause", "checkpoint": True}
        assert read_line(connection) == expected
    soon(lambda: server.hellos() == [])
    assert server.progress() is not None  # What is known stays known.
    assert server.errors() == {}


def test_every_rank_gets_the_directive(server: ChannelServer) -> None:
    with contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(trainer(server)) for _ in range(4)]
        for pid, rank in enumerate(ranks):
            rank.sendall(line(type="hello", pid=pid, protocol=1))
        soon(lambda: len(server.hellos()) == 4)
        assert server.request_checkpoint() == 4
        assert all(read_line(rank)["directive"] == "checkpoint" for rank in ranks)


def test_a_stop_reaches_a_trainer_that_connects_later_a_checkpoint_request_does_not(server: ChannelServer) -> None:
    assert server.request_checkpoint() == 0
    assert server.request_stop("cancel", checkpoint=False) == 0
    with trainer(server) as connection:
        assert read_line(connection)["directive"] == "stop"
        connection.settimeout(0.05)
        with pytest.raises(TimeoutError):
            connection.recv(1)


def test_when_the_step_last_moved(server: ChannelServer, clock: Clock) -> None:
    assert server.advanced_at() is None
    with trainer(server) as connection:
        for at_s, step, loss in ((10.0, 1, 0.9), (20.0, 1, 0.8), (30.0, 2, 0.7)):
            clock.now = at_s
            connection.sendall(line(type="progress", step=step, total=5, metrics={"loss": loss}))
            expects(server, TrainingProgress(step, 5, {"loss": loss}))
            assert server.advanced_at() == (10.0 if step == 1 else 30.0)


def test_what_is_made_between_two_steps_is_progress_when_there_is_more_of_it(
    server: ChannelServer, clock: Clock
) -> None:
    """Generating class images looked like a hang: the step stays 0."""
    told = [(10.0, 1), (20.0, 2), (30.0, 2), (40.0, None), (50.0, 2), (60.0, 3)]
    with trainer(server) as connection:
        for at_s, done in told:
            clock.now = at_s
            phase = None if done is None else {"name": "class_images", "done": done, "total": 9}
            connection.sendall(line(type="progress", step=0, total=5, metrics={"at": at_s}, phase=phase))
            expects(server, TrainingProgress(0, 5, {"at": at_s}, None if done is None else ("class_images", done)))
            assert server.advanced_at() == min(at_s, 20.0) if at_s < 60 else 60.0
        clock.now = 70.0
        connection.sendall(line(type="progress", step=0, total=5, phase={"name": "latents", "done": 3, "total": 9}))
        expects(server, TrainingProgress(0, 5, {}, ("latents", 3)))
        assert server.advanced_at() == 70.0


def test_waiting_for_news(server: ChannelServer) -> None:
    assert not server.wait(0)
    with trainer(server) as connection:
        connection.sendall(line(type="hello", pid=1, protocol=1))
        assert server.wait(60)
    assert not server.wait(0)


BAD_LINES = [
    (b"\xff\xfe\x00garbage\n", "malformed"),
    (b"{\n", "malformed"),
    (b"[]\n", "malformed"),
    (b"null\n", "malformed"),
    (b"[" * 60_000 + b"\n", "malformed"),
    (b'{"type": "progress", "step": ' + b"9" * 5000 + b"}\n", "malformed"),
    (line(type="dance"), "malformed"),
    (line(kind="hello"), "malformed"),
    (line(type=["hello"]), "malformed"),
    (line(type="progress"), "invalid"),
    (line(type="progress", step=-1), "invalid"),
    (line(type="progress", step=1.5), "invalid"),
    (line(type="progress", step=True), "invalid"),
    (line(type="progress", step=10**15), "invalid"),
    (line(type="progress", step=1, total="many"), "invalid"),
    (line(type="progress", step=1, phase="images"), "invalid"),
    (line(type="progress", step=1, phase={"name": 1, "done": 1}), "invalid"),
    (line(type="progress", step=1, phase={"name": "images", "done": "one"}), "invalid"),
    (line(type="hello", pid="1", protocol=1), "invalid"),
    (line(type="checkpoint", step=1), "invalid"),
    (line(type="checkpoint", step=1, path="relative/checkpoint-1"), "invalid"),
    (line(type="checkpoint", step=1, path="/etc"), "invalid"),
    (line(type="checkpoint", step=1, path="/x\0y"), "invalid"),
    (line(type="checkpoint", step=1, path="/\ud800"), "invalid"),
    (line(type="checkpoint", step=1, path="/" + "x" * 5000), "invalid"),
    (b"x" * 200_000 + b"\n", "oversized"),
    (b"x" * channel_server.MAX_LINE_BYTES + b"\n", "oversized"),
]


@pytest.mark.parametrize(("bad", "kind"), BAD_LINES, ids=[f"{kind}-{bad[:40]!r}" for bad, kind in BAD_LINES])
def test_a_bad_line_costs_only_itself(server: ChannelServer, bad: bytes, kind: str) -> None:
    with trainer(server) as connection:
        connection.sendall(bad + b"\n \n" + line(type="progress", step=5, total=None, metrics={}))
        soon(lambda: server.progress() == TrainingProgress(5, None, {}))
    assert server.errors() == {kind: 1}
    assert server.take_checkpoints() == []
    works(server, 6)


def test_checkpoints_outside_the_output_directory_are_refused(server: ChannelServer, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (tmp_path / "output" / "checkpoint-66").symlink_to(secret)
    with trainer(server) as connection:
        for path in ("output/checkpoint-66", "output/../secret", "output", "secret"):
            connection.sendall(line(type="checkpoint", step=1, path=f"{tmp_path}/{path}", metrics={}))
        soon(lambda: server.errors() == {"invalid": 4})
    assert server.take_checkpoints() == []


def test_an_endless_line_is_not_kept_in_memory(server: ChannelServer) -> None:
    with trainer(server) as connection:
        for _ in range(64):
            connection.sendall(b"y" * 65536)
        connection.sendall(b"\n" + line(type="progress", step=3, total=None, metrics={}))
        soon(lambda: server.progress() == TrainingProgress(3, None, {}))
    assert server.errors() == {"oversized": 1}


def test_peers_that_vanish(server: ChannelServer) -> None:
    for _ in range(20):
        with trainer(server) as connection:
            connection.sendall(b'{"type": "hel')
    with trainer(server) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    server.request_checkpoint()
    works(server, 1)


def test_a_peer_that_never_reads_does_not_block_the_agent(server: ChannelServer) -> None:
    with trainer(server) as deaf, trainer(server) as healthy:
        for connection in (deaf, healthy):
            connection.sendall(line(type="hello", pid=1, protocol=1))
        soon(lambda: len(server.hellos()) == 2)
        for _ in range(20_000):
            if server.request_checkpoint() < 2:
                break
            assert read_line(healthy)["directive"] == "checkpoint"
        assert server.errors()["unread"] >= 1
        healthy.sendall(line(type="progress", step=8, total=None, metrics={}))
        soon(lambda: server.progress() == TrainingProgress(8, None, {}))


def test_too_many_connections(server: ChannelServer) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(channel_server.MAX_CONNECTIONS + 5):
            stack.enter_context(trainer(server))
        soon(lambda: server.errors().get("connections") == 5)
    works(server, 2)


def test_a_flood_of_notices_is_bounded(server: ChannelServer, tmp_path: Path) -> None:
    path = str(tmp_path / "output" / "checkpoint-10")
    count = channel_server.MAX_WAITING_CHECKPOINTS + 50
    with trainer(server) as connection:
        for step in range(count):
            connection.sendall(line(type="checkpoint", step=step, path=path, metrics={}))
        connection.sendall(line(type="progress", step=7, total=None, metrics={}))
        soon(lambda: server.progress() is not None)
    notices = server.take_checkpoints()
    assert len(notices) == channel_server.MAX_WAITING_CHECKPOINTS
    assert notices[-1].step == count - 1


def test_closing(tmp_path: Path) -> None:
    (tmp_path / "output").mkdir()
    server = ChannelServer(tmp_path / "output")
    with trainer(server) as connection:
        connection.sendall(line(type="hello", pid=1, protocol=1))
        soon(server.hellos)
        server.close()
        server.close()
        assert connection.recv(10) == b""
    assert not server.path.parent.exists()
    assert server.request_checkpoint() == 0


def test_a_long_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(long))
    with ChannelServer(tmp_path) as server:
        works(server, 4)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)
hostile = st.fixed_dictionaries(
    {"type": st.sampled_from(["hello", "progress", "checkpoint", "x"]) | json_values},
    optional=dict.fromkeys(("pid", "protocol", "step", "total", "path", "metrics"), json_values),
)


@given(st.binary() | st.one_of(hostile, json_values).map(lambda value: json.dumps(value).encode()))
def test_parsing_raises_nothing_but_protocol_errors(data: bytes) -> None:
    with contextlib.suppress(channel_messages.ProtocolError):
        channel_messages.parse(data, Path("/output"))


def test_finished_files_are_heard_of_and_only_those_of_the_output_directory(tmp_path: Path) -> None:
    output, arena = tmp_path / "output", tmp_path / "arena"
    (output / "validation").mkdir(parents=True)
    arena.mkdir()
    (output / "link.png").symlink_to(tmp_path / "secret.png")
    good = output / "validation" / "step-1.png"
    with ChannelServer(output, arena=arena) as server, trainer(server) as connection:
        for path in (arena / "x.png", output / ".." / "secret.png", output / "link.png", output, good):
            connection.sendall(line(type="artifact", path=str(path)))
        connection.sendall(
            line(type="artifact") + line(type="artifact", path=7) + line(type="hello", pid=1, protocol=1)
        )
        soon(server.hellos)
        assert server.take_artifacts() == [good]
        assert server.take_artifacts() == []
        assert server.take_checkpoints() == []
        assert server.errors() == {"invalid": 6}


def test_files_that_nobody_takes_are_bounded(server: ChannelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    count = channel_server.MAX_WAITING_ARTIFACTS + 5
    output = server._places[0]
    with trainer(server) as connection:
        for number in range(count):
            connection.sendall(line(type="artifact", path=str(output / f"{number}.png")))
        connection.sendall(line(type="hello", pid=1, protocol=1))
        soon(server.hellos)
    taken = server.take_artifacts()
    assert len(taken) == channel_server.MAX_WAITING_ARTIFACTS and taken[-1].name == f"{count - 1}.png"
