"""Test that the draws of Hypothesis depend on the test alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st


def drawn() -> list[tuple[int, str]]:
    """Return what a derandomized test draws."""
    examples: list[tuple[int, str]] = []

    @settings(max_examples=300, derandomize=True, database=None, phases=[Phase.generate])
    @given(st.integers(), st.text())
    def note(number: int, text: str) -> None:
        examples.append((number, text))

    note()
    return examples


def test_modules_that_were_loaded_meanwhile_change_no_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = drawn()
    (tmp_path / "neighbor.py").write_text("VALUES = [774411, 774412, 774413, 'a neighbor of the test']\n")
    monkeypatch.syspath_prepend(tmp_path)
    import neighbor

    assert drawn() == before
    assert not {number for number, _ in before} & set(neighbor.VALUES)
