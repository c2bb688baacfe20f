"""Fixtures of the engines' conformance suite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
from engines_kit import HASTE, Crew, RelayMember, SocketMember

from gpu_client.elastic.engines.engine import Engine, Peer
from gpu_client.elastic.engines.gloo_engine import GlooEngine
from gpu_client.elastic.engines.wire.identity import NodeIdentity
from tests.kits.elastic.relay_store import RelayStore
from tests.kits.network.ports import free_port

CrewMaker = Callable[[int], Crew]


def gloo_members(size: int) -> tuple[list[Callable[[], Engine]], list[Peer]]:
    """Return makers of engines that meet at a free port of the first member, and their peers."""
    peers = [Peer(f"{rank}.1.{rank:08x}", (f"127.0.0.1:{free_port()}",)) for rank in range(size)]
    return [GlooEngine] * size, peers


def wire_members(size: int, codec: str = "fp32", *, encrypted: bool = True):
    """Return makers of engines on free ports."""
    ports = [free_port() for _ in range(size)]
    identities = [NodeIdentity() if encrypted else None for _ in ports]
    peers = [
        Peer(f"{rank}.1.{rank:08x}", (f"127.0.0.1:{port}",), identity.certificate if identity else "")
        for rank, (port, identity) in enumerate(zip(ports, identities, strict=True))
    ]
    members = zip(ports, identities, strict=True)
    return [partial(SocketMember, port, peers, codec, identity) for port, identity in members], peers


MEMBERS = {"gloo": gloo_members, "wire": wire_members}


@pytest.fixture
def relay_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[RelayStore]:
    """Run an object store for hasty relayed members in this process."""
    for owner, name, value in HASTE:
        monkeypatch.setattr(owner, name, value)
    store = RelayStore()
    yield store
    store.close()


@pytest.fixture(params=[*MEMBERS, "relay"])
def crews(request: pytest.FixtureRequest, relay_store: RelayStore) -> Iterator[CrewMaker]:
    """Make groups of each engine in turn, with exact values, and close the groups."""
    made: list[Crew] = []

    def make(size: int) -> Crew:
        if request.param == "relay":
            peers = [Peer(f"{rank}.1.{rank:08x}") for rank in range(size)]
            made.append(Crew([RelayMember(relay_store.call, peer.node, "fp32") for peer in peers], peers))
        else:
            makers, peers = MEMBERS[request.param](size)
            made.append(Crew([maker() for maker in makers], peers))
        return made[-1]

    yield make
    for crew in made:
        crew.close()
