from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpu_client.transport.connections import Connections
from gpu_client.transport.transfer import Transfer
from tests.unit.transport.scripted_server import ScriptedServer


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as running:
        yield running


@pytest.fixture
def delays() -> list[float]:
    """Pauses that were asked for instead of slept."""
    return []


@pytest.fixture
def transfer(delays: list[float]) -> Iterator[Transfer]:
    made = Transfer(
        workers=3,
        connections=Connections(connect_timeout_s=5, stall_timeout_s=5),
        pause=lambda _, delay_s: delays.append(delay_s),
        draw=lambda: 1.0,
    )
    yield made
    made.close()
