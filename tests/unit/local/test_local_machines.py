"""A control plane without state gives its machines back at its end, and nobody else's."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from functions.local.machines import end_machines
from tests.conformance.drivers.driven_vast import VastDriven
from tests.conformance.drivers.driver_kit import PREFIX, create

FOREIGN = "dep20000-nights-1"


@pytest.fixture
def provider(tmp_path: Path) -> Iterator[VastDriven]:
    made = VastDriven(tmp_path)
    for token in (f"{PREFIX}nights-1", f"{PREFIX}nights-2", FOREIGN):
        create(made, token)
    yield made
    made.close()


def test_own_machines_end_at_the_pace_of_the_provider_and_others_stay(provider: VastDriven) -> None:
    provider.fake.intervals_s.update(destroy=3.0)
    provider.fake.inject("500", "GET /api/v1/instances/", count=3)
    provider.fake.ignored_destroys = 1
    end_machines({"vast": provider.driver}, PREFIX, pause=provider.clock.advance)
    assert provider.existing() == [FOREIGN]
    assert not [call for call in provider.fake.calls if call.method == "DELETE" and FOREIGN in call.path]
    provider.fake.intervals_s.clear()


def test_a_provider_that_refuses_is_left_after_some_rounds(
    provider: VastDriven, caplog: pytest.LogCaptureFixture
) -> None:
    keys, provider.fake.keys = provider.fake.keys, {}
    with caplog.at_level(logging.ERROR):
        end_machines({"vast": provider.driver}, PREFIX, pause=provider.clock.advance)
    provider.fake.keys = keys
    assert f"machines at vast may still run; `{PREFIX}...`" in caplog.text
    assert len(provider.existing()) == 3
