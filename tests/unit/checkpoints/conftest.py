from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.checkpoints.fake_cloud import FakeCloud
from tests.unit.transport.conftest import delays, transfer
from tests.unit.transport.scripted_server import ScriptedServer

__all__ = ["cloud", "delays", "transfer"]


@pytest.fixture
def cloud() -> Iterator[FakeCloud]:
    with ScriptedServer() as store:
        yield FakeCloud(store)
