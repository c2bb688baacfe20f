"""The client and Lambda decide alike: the same cases in a process with torch and in one that has nothing of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.kits.rules.verdicts import COUNT


def said(module: str, path: Path) -> list[str]:
    ran = subprocess.run([sys.executable, "-m", module, str(path)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def test_ten_thousand_cases_are_decided_alike(tmp_path: Path) -> None:
    path = tmp_path / "cases"
    here = said("tests.kits.rules.cases", path)
    foreign, *there = said("tests.kits.rules.verdicts", path)
    assert foreign == "[]", "nothing was loaded that Lambda does not have"
    cases = [line for line in there if line[0].isdigit()]
    assert len(cases) == COUNT and len(there) > COUNT + 20, "rules and refusals"
    assert [pair for pair in zip(here, there, strict=True) if pair[0] != pair[1]] == []
    for word, least in (("'fired'", 500), ("'cleared'", 50), ("'error'", 100), ("'pending'", 50), ("group_", 200)):
        assert sum(word in line for line in cases) > least, f"{word}: else this would prove little"


def test_what_lambda_does_not_have_cannot_be_imported_there() -> None:
    program = (
        "import sys; from tests.kits.rules.verdicts import Refusal; sys.meta_path.insert(0, Refusal()); import numpy"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.returncode == 1 and "numpy is not to be had in Lambda" in ran.stderr
