"""Fixture: the API on the in-memory twins, new for every test."""

from __future__ import annotations

import pytest

from tests.kits.api.harness import Api, memory_api


@pytest.fixture
def api() -> Api:
    return memory_api()
