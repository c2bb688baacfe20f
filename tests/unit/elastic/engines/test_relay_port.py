"""A relay port remembers a channel only while the channel is open or announced."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from baton.contract.elastic.relay import RelayAnswer, RelayCaller, RelayRequest
from gpu_client.elastic.engines.engine import Peer
from gpu_client.elastic.engines.relay import relay_port
from gpu_client.elastic.engines.relay.relay_connection import RelayConnection
from gpu_client.elastic.engines.relay.relay_port import RelayPort
from tests.kits.waiting import until

OWN, PEER = "0.1.0000000a", Peer("1.1.0000000b")


class Calls:
    """Control plane that announces channels. `asked`: number of questions for calls."""

    def __init__(self) -> None:
        self.announced: Sequence[RelayCaller] = ()
        self.asked = 0

    def __call__(self, request: RelayRequest) -> RelayAnswer:
        assert request.calls
        self.asked += 1
        return RelayAnswer(calls=[*self.announced], life_s=60)

    def pass_twice(self) -> None:
        """Wait until the port has used an answer to a later question."""
        seen = self.asked
        until(lambda: self.asked >= seen + 3, what="further questions for calls")


@pytest.fixture
def calls() -> Calls:
    return Calls()


@pytest.fixture
def port(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> Iterator[RelayPort]:
    for name in ("IDLE_POLL_S", "BUSY_POLL_S"):
        monkeypatch.setattr(relay_port, name, 0.01)
    one = RelayPort(calls, OWN, {})
    yield one
    one.close()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[RelayConnection]:
    """Return the served connections; each one ends at once, as without a first frame in time."""
    found: list[RelayConnection] = []

    def receive(connection: RelayConnection, *_: object) -> None:
        found.append(connection)
        raise TimeoutError("the peer sends no data")

    monkeypatch.setattr(RelayConnection, "receive", receive)
    return found


def test_a_dialed_channel_is_forgotten_after_its_end(port: RelayPort, calls: Calls) -> None:
    kept, *ended = [port.dial(PEER) for _ in range(5)]
    calls.pass_twice()
    assert len(port._known) == 5, "the answer of the peer would be a call from the peer"
    for one in ended:
        one.close()
    until(lambda: len(port._known) == 1, what="the end of the closed channels")
    kept.close()
    until(lambda: not port._known, what="the end of the last channel")


def test_an_announced_channel_is_served_once(port: RelayPort, calls: Calls, served: list[RelayConnection]) -> None:
    calls.announced = [RelayCaller(node=PEER.node, channel=f"{number:08x}") for number in range(3)]
    until(lambda: len(served) == 3, what="three served calls")
    calls.pass_twice()
    assert len(served) == 3, "an announced channel was served again"
    calls.announced = ()
    until(lambda: not port._known, what="the end of the served channels")


def test_the_answer_on_a_dialed_channel_is_no_call(
    port: RelayPort, calls: Calls, served: list[RelayConnection]
) -> None:
    connection = port.dial(PEER)
    calls.announced = [RelayCaller(node=PEER.node, channel=channel) for _, channel in port._known]
    calls.pass_twice()
    connection.close()
    calls.pass_twice()
    assert not served


def test_a_channel_that_opens_during_a_question_is_kept(
    port: RelayPort, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    dialed: list[RelayConnection] = []
    answer: Callable[[Calls, RelayRequest], RelayAnswer] = Calls.__call__

    def dial_meanwhile(own: Calls, request: RelayRequest) -> RelayAnswer:
        if not dialed:
            caller = threading.Thread(target=lambda: dialed.append(port.dial(PEER)))
            caller.start()
            caller.join()
        return answer(own, request)

    monkeypatch.setattr(Calls, "__call__", dial_meanwhile)
    until(lambda: dialed, what="a channel that opens during a question")
    calls.pass_twice()
    assert len(port._known) == 1
    dialed[0].close()
