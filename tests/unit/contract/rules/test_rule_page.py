"""docs/rules.md: its examples run, its tables are complete."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

from baton.contract.rules.document.actions import ACTIONS
from baton.contract.rules.document.loader import _RULE_KEYS, load
from baton.contract.rules.document.rule import EVENTS
from baton.contract.rules.language.function_signatures import NAMES
from baton.contract.rules.limits import LIMITS
from baton.contract.rules.metrics import BUILT_IN

PAGE = Path(__file__).resolve().parents[4] / "docs" / "rules.md"
TEXT = PAGE.read_text(encoding="utf-8")
DOCUMENTS = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize("document", DOCUMENTS, ids=range(len(DOCUMENTS)))
def test_its_documents_are_accepted(document: str) -> None:
    loaded = load(document)
    assert (loaded.faults, loaded.warnings) == ([], [])


def test_its_examples_run() -> None:
    failed, tried = doctest.testfile(str(PAGE), module_relative=False, verbose=False)
    assert tried >= 8
    assert failed == 0


@pytest.mark.parametrize("name", [*NAMES, *ACTIONS, *BUILT_IN, *EVENTS, *_RULE_KEYS])
def test_every_name_is_told(name: str) -> None:
    assert re.search(rf"`{re.escape(name)}[`(]", TEXT), name


def test_limits_are_told() -> None:
    for number in (
        LIMITS.text_chars,
        LIMITS.nodes,
        LIMITS.depth,
        LIMITS.window_points,
        LIMITS.median_points,
        LIMITS.duration_points,
    ):
        assert f"{number:,}" in TEXT
