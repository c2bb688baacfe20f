from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_client.checkpoints.restore import restore_plan
from tests.unit.checkpoints.fake_cloud import FakeCloud
from tests.unit.checkpoints.made_checkpoints import put
from tests.unit.checkpoints.restore_kit import made
from tests.unit.transport.conftest import delays, transfer
from tests.unit.transport.scripted_server import ScriptedServer

__all__ = ["cloud", "delays", "transfer"]


@pytest.fixture
def cloud() -> Iterator[FakeCloud]:
    with ScriptedServer() as store:
        yield FakeCloud(store)


@pytest.fixture
def cloud_100_200(cloud: FakeCloud) -> FakeCloud:
    """A cloud with checkpoints of steps 100 and 200."""
    for step in (100, 200):
        put(cloud, made(step))
    return cloud


@pytest.fixture
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand bytes a request."""
    monkeypatch.setattr(restore_plan, "MAX_RANGE_BYTES", 1000)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "output"
