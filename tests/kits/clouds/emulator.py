"""Emulated cloud for tests: one ministack for the session.

`tests/conftest.py` imports the fixture by name. Tests that share it give their tables and buckets names of their own
(`unique`); tests that kill it start an `Emulator` of their own.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from functions.local.emulator import Emulator

CREDENTIALS = {"region_name": "us-east-1", "aws_access_key_id": "test", "aws_secret_access_key": "test"}
"""Arguments of each client of an emulated cloud."""


@pytest.fixture(scope="session")
def emulator() -> Iterator[Emulator]:
    """Run an emulator that keeps its state in memory."""
    with Emulator() as running:
        yield running


def unique(prefix: str) -> str:
    """Make a unique name for a table or bucket."""
    return f"{prefix}-{uuid.uuid4().hex[:12]}"
