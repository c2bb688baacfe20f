"""Each mutant of `mutations.toml` still names a line of the product and tests that exist."""

from __future__ import annotations

import pytest

from tests.mutants import ROOT, Mutant, read_mutants


@pytest.mark.parametrize("mutant", read_mutants(), ids=lambda mutant: mutant.promise)
def test_a_mutant_applies_and_its_tests_exist(mutant: Mutant) -> None:
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    assert mutant.applied_to(text) != text
    for test in mutant.tests:
        path, _, name = test.partition("::")
        if path.startswith("tests/"):
            assert (ROOT / path).exists()
            assert not name or f"def {name}(" in (ROOT / path).read_text(encoding="utf-8")


def test_a_text_that_is_not_there_once_is_refused() -> None:
    mutant = Mutant("promise", "file.py", "a = 1", "a = 2", [])
    for text in ("", "a = 1\na = 1\n"):
        with pytest.raises(ValueError, match="not once"):
            mutant.applied_to(text)
