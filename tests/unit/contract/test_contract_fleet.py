"""docs/fleet.md is true of the document: its example, its table, its refusals."""

from __future__ import annotations

import re
from pathlib import Path

from baton.contract.errors import ErrorCode
from baton.contract.fleets.fleet import FleetSpec
from baton.contract.fleets.money import Budget
from baton.contract.yaml_documents import read_document

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "fleet.md").read_text()


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the table under a heading."""
    table = PAGE.split(f"| {heading} |", 1)[1].split("\n\n", 1)[0]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in table.splitlines()[2:]]


def test_the_example_is_a_fleet() -> None:
    (text,) = re.findall(r"cat > nights.yaml <<'EOF'\n(.*?)EOF", PAGE, re.DOTALL)
    assert FleetSpec.model_validate(read_document(text).value).name == "nights"


def test_the_table_has_every_field_with_its_default() -> None:
    named: dict[str, str] = {}
    for fields, defaults, _ in rows("field"):
        names, values = re.findall(r"`(\w+)`", fields), [one.strip("`") for one in defaults.split(", ")]
        named |= dict(zip(names, values, strict=True))
    known = {name: field.is_required() for name, field in FleetSpec.model_fields.items()}
    assert {name: default == "required" for name, default in named.items()} == known
    for name in ("disk_gib", "min", "max", "idle_timeout_s", "max_hours", "min_vram_gib", "choose", "market"):
        assert named[name] == str(FleetSpec.model_fields[name].default), name
    assert all(f"`{name}`" in PAGE for name in Budget.model_fields)


def test_the_refusals_have_these_statuses() -> None:
    for code, meaning in rows("refusal"):
        assert meaning.endswith(f": {ErrorCode(code.strip('`')).status}"), code
