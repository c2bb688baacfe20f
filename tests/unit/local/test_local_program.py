"""The command line of the local stack."""

from __future__ import annotations

import pytest

from functions.local.program import main


@pytest.mark.parametrize("text", ["5", "{}", "per_day_usd: 5", '{"per_day_usd": 0}'])
def test_a_budget_of_all_fleets_that_is_none_ends_before_anything_starts(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--fleet-budget", text])
    assert 'Write JSON such as {"per_day_usd": 5}' in capsys.readouterr().err
