"""Fixtures of the browser tests: one browser, a context for each test, and pages that report their faults."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest

from tests.e2e.console.chromium import launched
from tests.e2e.console.desk import Desk
from tests.e2e.console.scenes import Scene
from tests.kits.stack.stack import Stack
from tests.kits.waiting import PATIENCE_S


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    """Run one Chromium for all files of a process."""
    with launched() as running:
        from playwright.sync_api import expect

        # A page asks every 15 s if nothing changes.
        expect.set_options(timeout=PATIENCE_S * 1000)
        yield running


@pytest.fixture
def desk(browser: Any, stack: Stack) -> Iterator[Desk]:
    """Yield a reader's browser; afterwards no page may have met a fault of its script or of its policy."""
    used = Desk(browser, stack)
    try:
        yield used
    finally:
        used.close()
    assert used.faults == []


@pytest.fixture(scope="package")
def signed_in(browser: Any, stack: Stack) -> Iterator[Desk]:
    """Sign in one browser for all tests of a process that only visit places."""
    used = Desk(browser, stack)
    used.sign_in("/")
    yield used
    used.close()


@pytest.fixture
def reader(signed_in: Desk) -> Iterator[Desk]:
    """Yield a browser whose one page visits places, without routes, clocks and further sessions of a test."""
    signed_in.requests.clear()
    yield signed_in
    assert signed_in.faults == []


@pytest.fixture
def scene(stack: Stack) -> Scene:
    """Return a queue of the test's own."""
    return Scene(stack, f"q-{uuid4().hex[:8]}")
