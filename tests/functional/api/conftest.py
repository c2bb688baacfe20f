"""The API on the twins in memory, fresh for every test."""

from __future__ import annotations

import pytest

from tests.kits.api.harness import Api, memory_api


@pytest.fixture
def api() -> Api:
    return memory_api()
