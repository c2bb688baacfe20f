"""Two members meet if one of them reaches the other, whichever it is."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from conftest import wire_members
from engines_kit import TIMEOUT_S, Crew

from gpu_client.elastic.engines.engine import EpochGroup, Peer
from gpu_client.elastic.engines.wire import mesh
from gpu_client.elastic.errors import PeerLostError
from tests.kits.network.ports import free_port


def crew_of(size: int, hidden: Sequence[int] = ()) -> Crew:
    """Return wire members; no peer reaches the advertised addresses of the hidden ones."""
    makers, peers = wire_members(size)
    seen = [
        Peer(one.node, (f"127.0.0.1:{free_port()}",), one.certificate) if rank in hidden else one
        for rank, one in enumerate(peers)
    ]
    return Crew([maker() for maker in makers], seen)


def assert_exchange(crew: Crew) -> None:
    expected = [b"%d" % rank for rank in range(len(crew.peers))]
    found = crew.together(lambda rank, engine: engine.exchange(b"%d" % rank, TIMEOUT_S))
    assert found == [expected] * len(crew.peers), found


@pytest.mark.parametrize("hidden", [0, 1, 2])
def test_a_member_behind_a_nat_meets_members_with_addresses(hidden: int) -> None:
    crew = crew_of(3, [hidden])
    for _ in range(2):
        crew.open()
        assert_exchange(crew)
    crew.close()


def test_members_that_call_each_other_at_once_share_one_connection_for_each_lane(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mesh, "HEAD_START_S", 0.0)
    crew = crew_of(3)
    for _ in range(8):
        crew.open()
        assert_exchange(crew)
        links = [engine._mesh.links for engine in crew.engines]  # type: ignore[attr-defined]
        for rank, own in enumerate(links):
            assert all(len(link.lanes) == 6 and link.caller == links[link.rank][rank].caller for link in own.values())
    crew.close()


def test_two_members_behind_nats_are_lost_to_each_other_at_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each member learns of the other's refusal before the limit.
    monkeypatch.setattr(mesh, "HEAD_START_S", 0.0)
    crew = crew_of(2, [0, 1])
    groups = [EpochGroup(1, crew.peers, rank) for rank in range(2)]
    found = crew.together(lambda rank, engine: engine.open(groups[rank], 5.0))
    for rank, error in enumerate(found):
        assert isinstance(error, PeerLostError)
        assert (error.nodes, error.cause) == ((crew.peers[1 - rank].node,), "refused")
    crew.close()


def test_a_member_that_was_reached_before_and_refuses_is_lost_at_once() -> None:
    crew = crew_of(2)
    crew.open()
    crew.engines[0].close()
    crew.engines[0].listener.close()  # type: ignore[attr-defined]
    began = time.monotonic()
    with pytest.raises(PeerLostError) as caught:
        crew.engines[1].open(EpochGroup(2, crew.peers, 1), 60.0)
    assert (caught.value.nodes, caught.value.cause) == ((crew.peers[0].node,), "refused")
    assert time.monotonic() - began < 50
    crew.close()
