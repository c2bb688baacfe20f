"""Each row of docs/comparison.md is proved by tests that exist, or refused with a reason."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS.parent / "docs/comparison.md"
ROWS = {
    "Acceptance criteria": 18,
    "Milestones": 10,
    "Dependencies": 6,
    "Architecture": 15,
    "Workflow": 8,
    "Data sets and configuration": 9,
    "Failure and recovery": 11,
    "Development and tests": 5,
    "Monitoring": 9,
    "What others add": 18,
    "Eighteen points": 18,
}
"""Rows of each table: a row that is removed from the page is missed here."""


def test_each_row_names_existing_tests_or_a_reason() -> None:
    found: dict[str, int] = {}
    section = ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        section = line.removeprefix("## ") if line.startswith("## ") else section
        if not line.startswith("| ") or line.startswith(("| feature", "|---")):
            continue
        row, what, proof = (cell.strip() for cell in line.strip("|").split("|"))
        found[section] = found.get(section, 0) + 1
        proofs = re.findall(r"`([\w/]+\.py)::(test_\w+)`", proof)
        assert proof == ", ".join(f"`{file}::{name}`" for file, name in proofs), row
        assert bool(proofs) != what.startswith("refused: "), row
        for file, name in proofs:
            text = (TESTS / file).read_text(encoding="utf-8")
            assert re.search(rf"^def {name}\(", text, re.MULTILINE), f"{row}: {file} has no {name}"
    assert found == ROWS
