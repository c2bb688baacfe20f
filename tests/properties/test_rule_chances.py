"""Rules and streams in bulk through the whole controller: nothing is raised into the loop. The bench takes 100,000."""

from __future__ import annotations

import logging

import pytest

from tests.kits.rules.random_rules import run

SEED, RULES = 2026, 3000


def test_no_rule_and_no_stream_crashes_a_training(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    found = run(SEED, RULES)
    assert found.crashes == []
    assert found.rules == RULES
    # it is no test if hardly any rule is sound, or hardly any fires
    assert 0.3 < found.refused / found.rules < 0.8
    assert found.fired > RULES / 50
