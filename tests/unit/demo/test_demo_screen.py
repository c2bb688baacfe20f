"""Test the demo's output, with a terminal and without."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from demo.failure import DemoError
from demo.screen import Screen


def screen(*, terminal: bool) -> tuple[Screen, io.StringIO]:
    output = io.StringIO()
    ticks = iter(range(1000))
    console = Console(file=output, force_terminal=terminal, width=120, legacy_windows=False)
    return Screen(console, clock=lambda: float(next(ticks))), output


def test_without_a_terminal_there_are_plain_lines_at_each_quarter() -> None:
    shown, output = screen(terminal=False)
    with shown.phase("train", "Train", 100) as phase:
        for step in range(0, 101, 5):
            phase.at(step, f"step {step} [0/1]")
        phase.ends_with("complete")
    lines = output.getvalue().splitlines()
    assert [line.split("] ", 1)[1].split() for line in lines] == [
        ["Train", "..."],
        ["Train", "25", "%", "step", "25", "[0/1]"],
        ["Train", "50", "%", "step", "50", "[0/1]"],
        ["Train", "75", "%", "step", "75", "[0/1]"],
        ["Train", "complete"],
    ]
    assert "\x1b" not in output.getvalue()
    assert shown.durations_s["train"] > 0


def test_a_phase_that_fails_is_not_shown_as_done() -> None:
    shown, output = screen(terminal=False)
    with pytest.raises(DemoError), shown.phase("fetch", "Fetch") as phase:
        phase.ends_with("fetched")
        raise DemoError("no")
    assert "fetched" not in output.getvalue()
    assert shown.durations_s == {}


def test_on_a_terminal_a_phase_ends_with_a_mark() -> None:
    shown, output = screen(terminal=True)
    with shown.phase("a", "Whole", 10) as phase:
        phase.at(10, "complete")
    with shown.phase("b", "Cut short", 10) as phase:
        phase.at(4, "killed")
    with shown.phase("c", "Unmeasured") as phase:
        phase.ends_with("ready")
    last = {line.split("\x1b[2K")[-1] for line in output.getvalue().splitlines()}
    for mark, name in (("✓", "Whole"), ("✗", "Cut short"), ("✓", "Unmeasured")):
        assert any(mark in line and name in line for line in last)


def test_long_sentences_are_wrapped_under_their_bullet() -> None:
    shown, output = screen(terminal=False)
    shown.print_point("word [7] " * 40)
    first, *others = output.getvalue().rstrip("\n").split("\n")
    assert first.startswith(" • word [7]")
    assert others
    assert all(line.startswith(("   word", "   [7]")) and len(line) <= 100 and line == line.rstrip() for line in others)
