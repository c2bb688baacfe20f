"""Start IBM's original controller once for all tests of the importers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kits.ibm import trainer_controller


@pytest.fixture(scope="session")
def original() -> Iterator[trainer_controller.Original]:
    """Run IBM's controller; its start takes seconds for the imports of torch and transformers."""
    with trainer_controller.running() as process:
        yield process
