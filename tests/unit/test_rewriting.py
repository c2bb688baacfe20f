"""Test that each worker rewrites its share of the test files."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.kits.runner import rewriting
from tests.kits.runner.rewriting import rewrite_share


def test_the_workers_share_the_files_and_execute_none(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    tests = tmp_path / "tests"
    tests.mkdir()
    monkeypatch.setattr(rewriting, "TESTS", tests)
    (tmp_path / "test_of_others.py").write_text("")
    for number in range(4):
        (tests / f"test_{number}.py").write_text("from __future__ import annotations\n\nraise SystemExit\n")
    (tests / "test_4.py").write_text("assert (")
    written = []
    for worker in ("gw0", "gw1", "gw2"):
        config: Any = SimpleNamespace(
            args=[str(tests), str(tmp_path), str(tests / "test_0.py::test")],
            pluginmanager=request.config.pluginmanager,
            workerinput={"workerid": worker, "workercount": 3},
        )
        rewrite_share(config)
        written.append(len(list(tmp_path.rglob("__pycache__/*-pytest-*.pyc"))))
    assert written == [2, 3, 4]


def test_a_session_without_workers_rewrites_nothing_ahead(tmp_path: Path) -> None:
    (tmp_path / "test_0.py").write_text("from __future__ import annotations\n")
    config: Any = SimpleNamespace(args=[str(tmp_path)])
    rewrite_share(config)
    assert not (tmp_path / "__pycache__").exists()
