"""docs/rules-ibm.md: its examples run, its tables are complete, its refusals are refused."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

from gpu_client.importers.ibm.files import _REFUSED_EVENTS, ACTIONS, EVENTS
from gpu_client.importers.ibm.metrics import CLASSES

PAGE = Path(__file__).resolve().parents[3] / "docs" / "rules-ibm.md"
TEXT = PAGE.read_text(encoding="utf-8")


def test_its_examples_run() -> None:
    failed, tried = doctest.testfile(str(PAGE), module_relative=False, verbose=False)
    assert tried > 6
    assert failed == 0


@pytest.mark.parametrize("name", [*EVENTS, *EVENTS.values(), *_REFUSED_EVENTS, *ACTIONS, "LogControl"])
def test_every_name_is_told(name: str) -> None:
    assert re.search(rf"[`. ]{re.escape(name)}`", TEXT), name


def test_every_class_is_told() -> None:
    told = set(re.findall(r"`([A-Za-z]+)`", TEXT))
    assert set(CLASSES) - {"PerProcessState"} <= told
    assert "`rank` in a text is 0" in TEXT
