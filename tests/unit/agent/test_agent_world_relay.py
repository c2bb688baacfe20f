"""World calls from a training process through the agent to the control plane, over the real socket."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from baton.contract.elastic.data import DataGrant, DataProgress, DataRequest
from baton.contract.elastic.relay import RelayAnswer, RelayRequest
from baton.contract.elastic.world import (
    EpochProposal,
    JoinRequest,
    NodeProgram,
    RoundReport,
    WorldReport,
    WorldSeat,
    WorldView,
)
from gpu_client.agent.control.world_relay import MAX_CALL_BYTES, WorldRelay, describe_world
from gpu_client.elastic.errors import (
    DataMismatchError,
    ElasticSetupError,
    NoMajorityError,
    NotAMemberError,
    WorldChangedError,
    WorldMismatchError,
    WorldUnavailableError,
)
from gpu_client.elastic.membership.agent_world import AgentWorldCalls, NodeSeat
from gpu_client.transport.errors import ApiError, Conflict, Unreachable

NODE = "3.1.9f86d081"
PROGRAM = NodeProgram(torch="2.13.0", engine="wire", codec="int8", parameters=7, model_sha256="0" * 64)
LEASED = DataGrant(leases=[[14, 4096]])
RELAYED = RelayAnswer(downloads=["https://store/0"], life_s=900)
VIEW = WorldView(job="j", state="training", epoch=4, round=12, min=2, max=8, nodes=[])


class RecordingClient:
    """Client that records each call with its lease, and answers with `answer`."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, str, object]] = []
        self.answer: WorldView | Exception = VIEW

    def _record(self, name: str, job_id: str, lease_token: str, body: object = None) -> WorldView:
        self.calls.append((name, job_id, lease_token, body))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def world(self, job_id: str, lease_token: str) -> WorldView:
        return self._record("view", job_id, lease_token)

    def join_world(self, job_id: str, lease_token: str, request: JoinRequest) -> WorldView:
        return self._record("join", job_id, lease_token, request)

    def propose_epoch(self, job_id: str, lease_token: str, proposal: EpochProposal) -> WorldView:
        return self._record("propose", job_id, lease_token, proposal)

    def relay_world(self, job_id: str, lease_token: str, request: RelayRequest) -> RelayAnswer:
        self.calls.append(("relay", job_id, lease_token, request))
        return RELAYED

    def lease_shards(self, job_id: str, lease_token: str, request: DataRequest) -> DataGrant:
        self.calls.append(("lease", job_id, lease_token, request))
        return LEASED

    def report_world(self, job_id: str, lease_token: str, report: WorldReport) -> WorldView:
        return self._record("report", job_id, lease_token, report)


@pytest.fixture
def client() -> RecordingClient:
    return RecordingClient()


@pytest.fixture
def relay(client: RecordingClient) -> Iterator[WorldRelay]:
    with WorldRelay(client, "seat-job", "lease-token") as relay:
        yield relay


def test_each_call_reaches_the_control_plane_with_the_lease(client: RecordingClient, relay: WorldRelay) -> None:
    calls = AgentWorldCalls(str(relay.path))
    join = JoinRequest(node=NODE, addresses=["203.0.113.7:47100"], round=12, program=PROGRAM)
    proposal = EpochProposal(node=NODE, epoch=4, members=[NODE], round=12)
    report = WorldReport(node=NODE, epoch=4, rounds=[RoundReport(round=12, epoch=4, contributors=3, round_s=61.2)])
    relayed = RelayRequest(node=NODE, calls=True)
    assert [calls.join(join), calls.view(), calls.propose(proposal), calls.report(report)] == [VIEW] * 4
    assert calls.relay(relayed) == RELAYED
    wanted = DataRequest(node=NODE, plan_sha256="9f" * 32, trained=DataProgress(finished=[[0, 14]]), want=1)
    assert calls.lease(wanted) == LEASED
    assert client.calls == [
        ("join", "seat-job", "lease-token", join),
        ("view", "seat-job", "lease-token", None),
        ("propose", "seat-job", "lease-token", proposal),
        ("report", "seat-job", "lease-token", report),
        ("relay", "seat-job", "lease-token", relayed),
        ("lease", "seat-job", "lease-token", wanted),
    ]


def test_a_burst_of_calls_waits_for_a_busy_agent(relay: WorldRelay, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each relayed peer has a dozen of streams, whose threads all call; a refusal would look like an outage."""
    serve, is_free = relay._server.process_request, threading.Event()

    def serve_later(*request: Any) -> None:
        assert is_free.wait(60)
        serve(*request)

    monkeypatch.setattr(relay._server, "process_request", serve_later)
    with contextlib.ExitStack() as opened:
        opened.callback(is_free.set)
        callers = [opened.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(200)]
        for one in callers:
            one.settimeout(60)
            one.connect(str(relay.path))
            one.sendall(b'{"call": "view"}\n')
        is_free.set()
        assert {json.loads(one.makefile("rb").readline())["status"] for one in callers} == {200}


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (Conflict(code="world_changed", status=409, message="epoch 5"), WorldChangedError),
        (Conflict(code="no_majority", status=409, message="1 of 3"), NoMajorityError),
        (Conflict(code="world_mismatch", status=409, message="head.weight has shape [2]"), WorldMismatchError),
        (Conflict(code="data_mismatch", status=409, message="another order"), DataMismatchError),
        (Conflict(code="not_a_member", status=409, message="not a member"), NotAMemberError),
        (ApiError(code="lease_expired", status=409, message="expired"), WorldUnavailableError),
        (Unreachable("no answer"), WorldUnavailableError),
    ],
)
def test_refusals_keep_their_reason(
    client: RecordingClient, relay: WorldRelay, answer: Exception, error: type[Exception]
) -> None:
    client.answer = answer
    with pytest.raises(error) as raised:
        AgentWorldCalls(str(relay.path)).view()
    assert type(raised.value) is error
    assert getattr(answer, "message", str(answer)) in str(raised.value)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"no json\n", "name one of join, lease, propose, relay, report, view"),
        (b'{"call": "delete"}\n', "name one of"),
        (b'{"call": "join", "body": {"node": "x"}}\n', "node: String should match"),
        (b'{"call": "propose"}\n', "Input should be a valid dictionary"),
        (b"[" * 100_000 + b"\n", "name one of"),
        (b"x" * (MAX_CALL_BYTES + 1), "more than 262144 bytes"),
    ],
)
def test_an_invalid_call_reaches_nobody(client: RecordingClient, relay: WorldRelay, line: bytes, problem: str) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(60)
        connection.connect(str(relay.path))
        connection.sendall(line)
        answer = json.loads(connection.makefile("rb").readline())
    assert (answer["status"], answer["code"]) == (422, "invalid_value")
    assert problem in answer["message"]
    assert client.calls == []


def test_a_process_that_dies_during_a_call_leaves_no_traceback(
    client: RecordingClient, relay: WorldRelay, capfd: pytest.CaptureFixture[str]
) -> None:
    for _ in range(20):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(relay.path))
            # The answers to these calls stay unread, so the close resets the connection.
            connection.sendall(b'{"call": "view"}\n' * 20)
    relay.close()
    assert capfd.readouterr().err == ""


def test_an_agent_that_has_ended_is_unavailable(client: RecordingClient) -> None:
    relay = WorldRelay(client, "seat-job", "lease-token")
    relay.close()
    with pytest.raises(WorldUnavailableError):
        AgentWorldCalls(str(relay.path)).view()


def test_a_node_learns_its_seat_and_addresses(relay: WorldRelay) -> None:
    seat = WorldSeat(job="146683a1", seat=3, min=2, max=8)
    text = describe_world(
        seat, 5, relay, port=0, addresses="203.0.113.7:40112, trainer.example", api_url="http://127.0.0.1:8787"
    )
    found = NodeSeat.read({"BATON_WORLD": text})
    assert found is not None
    assert (found.job, found.seat, found.attempt, found.min, found.max) == ("146683a1", 3, 5, 2, 8)
    assert found.addresses_at(51234) == ["203.0.113.7:40112", "trainer.example:51234"]
    assert found.new_node().startswith("3.5.")


def test_the_advertised_address_is_the_one_that_reaches_the_control_plane(relay: WorldRelay) -> None:
    seat = WorldSeat(job="146683a1", seat=0, min=1, max=1)
    text = describe_world(seat, 1, relay, port=47100, addresses="", api_url="http://127.0.0.1:8787")
    assert json.loads(text)["addresses"] == ["127.0.0.1:47100"]


@pytest.mark.parametrize(
    ("environ", "own", "port", "listed"),
    [
        ({"PUBLIC_IPADDR": "203.0.113.7", "VAST_TCP_PORT_47100": "40112"}, "", 47100, "203.0.113.7:40112"),
        ({"RUNPOD_PUBLIC_IP": "203.0.113.8", "RUNPOD_TCP_PORT_47100": "10031"}, "", 47100, "203.0.113.8:10031"),
        ({"RUNPOD_PUBLIC_IP": "2001:db8::7", "RUNPOD_TCP_PORT_47100": "10031"}, "", 47100, "[2001:db8::7]:10031"),
        # The user's own address counts; a provider without a mapping names none.
        ({"PUBLIC_IPADDR": "203.0.113.7", "VAST_TCP_PORT_47100": "40112"}, "a.example:1", 0, "a.example:1"),
        ({"PUBLIC_IPADDR": "203.0.113.7", "VAST_TCP_PORT_22": "40111"}, "", 0, "127.0.0.1:0"),
        ({"PUBLIC_IPADDR": "203.0.113.7", "VAST_TCP_PORT_47100": "70000"}, "", 0, "127.0.0.1:0"),
        ({"PUBLIC_IPADDR": "", "VAST_TCP_PORT_47100": "40112"}, "", 0, "127.0.0.1:0"),
    ],
)
def test_the_address_that_a_provider_maps_is_advertised(
    relay: WorldRelay, environ: dict[str, str], own: str, port: int, listed: str
) -> None:
    seat = WorldSeat(job="146683a1", seat=0, min=1, max=1)
    text = describe_world(seat, 1, relay, port=0, addresses=own, api_url="http://127.0.0.1:8787", environ=environ)
    assert (json.loads(text)["port"], json.loads(text)["addresses"]) == (port, [listed])
    other = describe_world(seat, 1, relay, port=9, addresses="", api_url="http://127.0.0.1:8787", environ=environ)
    assert json.loads(other)["port"] == 9, "a mapping to another port than the agent's leads nowhere"


def test_a_process_outside_of_an_elastic_job_has_no_seat() -> None:
    assert NodeSeat.read({}) is None
    with pytest.raises(ElasticSetupError, match="BATON_WORLD cannot be read"):
        NodeSeat.read({"BATON_WORLD": "{"})
