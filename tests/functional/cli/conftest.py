"""Fixtures: one local stack for all tests, a logged-in user, a worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.functional.cli.people import Baton, Labour
from tests.kits.stack.stack import Stack


@pytest.fixture(scope="package")
def stack() -> Iterator[Stack]:
    """The control plane; objects pass through its proxy `s3`."""
    with Stack() as running:
        yield running


@pytest.fixture
def baton(
    stack: Stack, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Baton]:
    """A user whose profile `default` has the admin key."""
    environ = {
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "HOME": str(tmp_path),
    }
    made = Baton(environ, capsys, monkeypatch)
    made("login", stack.url, stdin=stack.keys["admin"] + "\n").ok()
    yield made
    said = "\n".join(made.heard)
    secrets = [key.split("_", 2)[2] for key in stack.keys.values()]
    assert not [secret for secret in secrets if secret in said]
    assert "X-Amz-Signature" not in said
    assert "Traceback" not in said


@pytest.fixture
def labour(stack: Stack, tmp_path: Path) -> Labour:
    return Labour(stack.client, tmp_path / "labour")
