"""Rounds of an elastic training as `baton world plan` computes them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from gpu_client.cli.main import main
from gpu_client.cli.world.planning import plan_rounds


def test_a_round_costs_the_bytes_and_seconds_of_the_fact_sheet() -> None:
    """Compare with section 7.5 of the measurements: 1 B parameters, 8 nodes, 100 Mbit/s, at 90 % of the link."""
    plans = {one.codec: one for one in plan_rounds(1e9, 8, 100, 1.0)}
    seconds = {codec: one.reduce_s * 0.9 for codec, one in plans.items()}
    assert seconds == pytest.approx({"fp32": 560, "bf16": 280, "int8": 141, "int4": 74}, rel=0.01)
    assert plans["int8"].sent_bytes == pytest.approx(1.757e9, rel=1e-3)


def test_inner_steps_follow_from_the_duration_of_a_step() -> None:
    (int8,) = (one for one in plan_rounds(1e6, 2, 8 / 0.9, 0.5) if one.codec == "int8")
    assert int8.reduce_s == pytest.approx(1.004, rel=1e-3)
    assert (int8.blocking_steps, int8.overlapped_steps) == (39, 3)


def test_the_command_lists_every_codec(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["world", "plan", "--params", "1e9", "--uplink", "100", "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)
    assert [one["codec"] for one in plans] == ["fp32", "bf16", "int8", "int4"]
    assert plans[2]["overlapped_steps"] == 196


def test_the_page_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parents[3] / "docs" / "elastic.md"
    found = re.search(r"^\$ baton (world plan .*)\n((?:.+\n)+)```", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert found
    assert main(found[1].split()) == 0
    assert capsys.readouterr().out == found[2]


@pytest.mark.parametrize("value", ["nan", "inf", "0", "-1"])
def test_a_size_that_is_no_number_is_refused(capsys: pytest.CaptureFixture[str], value: str) -> None:
    assert main(["world", "plan", "--params", value, "--uplink", "100"]) == 2
    assert "--params" in capsys.readouterr().err
