"""The bench of elastic trainings compares equal work, and judges bytes and errors by their targets."""

from __future__ import annotations

import pytest

from bench.elastic import codec_speed, reductions


@pytest.mark.processes
def test_members_take_turns_with_all_engines() -> None:
    figures = reductions.on_loopback(2, rounds=2, values=200_000)
    averages = [figure for figure in figures if figure.name.startswith("average")]
    contenders = reductions.list_contenders()
    assert [len(figure.rounds) for figure in averages] == [2] * len(contenders)
    assert [len(figure.ratios) for figure in averages] == [0 if one.startswith("gloo") else 2 for one in contenders]
    assert [figure.met for figure in figures if figure.unit == "B"] == [True, True]


def test_errors_and_speeds_have_one_figure_for_each_codec() -> None:
    errors = {figure.name.split()[-1]: figure.judged for figure in codec_speed.error(200_000)}
    assert errors["fp32"] < 1e-6 < errors["bf16"] < errors["int8"] < 0.015 < errors["int4"]
    assert len(codec_speed.speed(1, 200_000)) == len(errors)
