from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.agent.job_kit import Stage
from tests.unit.agent.preset_kit import Training


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    stage = Stage(tmp_path, monkeypatch)
    yield stage
    assert all(trainer.status for trainer in stage.trainers), "no trainer outlives its attempt"
    assert not (stage.workspace.slot / "agent-state.json").exists(), "nothing is left to recover from"
    stage.workspace.close()


@pytest.fixture
def training() -> Training:
    return Training()
