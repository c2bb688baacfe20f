"""What the tests of IBM's files share: the original, once for a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kits.ibm import trainer_controller


@pytest.fixture(scope="session")
def original() -> Iterator[trainer_controller.Original]:
    """Starting it takes seconds: it imports torch and transformers."""
    with trainer_controller.running() as process:
        yield process
