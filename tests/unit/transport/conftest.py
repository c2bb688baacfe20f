from __future__ import annotations

import ssl
from collections.abc import Iterator

import pytest

from gpu_client.transport.net.connections import Connections
from gpu_client.transport.transfer.manager import Transfer
from tests.kits.network.certificates import throwaway_certificate
from tests.unit.transport.relay_kit import part_of, relay, store, time, worker  # noqa: F401 - fixtures
from tests.unit.transport.scripted_server import ScriptedServer


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as running:
        yield running


@pytest.fixture(scope="session")
def tls(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Contexts of a server on 127.0.0.1 and of its client."""
    pem = throwaway_certificate(tmp_path_factory.mktemp("tls") / "both.pem")
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(pem)
    return server, ssl.create_default_context(cafile=str(pem))


@pytest.fixture
def delays() -> list[float]:
    """Pauses that were asked for instead of slept."""
    return []


@pytest.fixture
def transfer(delays: list[float]) -> Iterator[Transfer]:
    made = Transfer(
        workers=3,
        connections=Connections(connect_timeout_s=20, stall_timeout_s=60),
        pause=lambda _, delay_s: delays.append(delay_s),
        draw=lambda: 1.0,
    )
    yield made
    made.close()
