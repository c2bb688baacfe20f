"""What the tests of IBM's files share: the original, once for a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import ibm_original


@pytest.fixture(scope="session")
def original() -> Iterator[ibm_original.Original]:
    """Starting it takes seconds: it imports torch and transformers."""
    with ibm_original.running() as process:
        yield process
