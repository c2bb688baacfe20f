"""Tables fit a terminal; tables in pipes are complete for programs."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable

import pytest
from rich.cells import cell_len

from gpu_client.cli.core.output import CUT, FOLDED, WHOLE, CommandOutput, TableColumn

COLUMNS = (
    TableColumn("id", WHOLE),
    TableColumn("job", CUT),
    TableColumn("note", FOLDED),
    TableColumn("step", WHOLE, right=True),
)
ID = "146683a1"
LONG = "a job with a name that says all that there is to be said about it, and then some more, to be sure"
ROWS = [(ID, LONG, "", "7"), ("2b9f0c11", "日本語の仕事" * 9, "", "1200")]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Terminal]:
    def of_width(columns: int) -> Terminal:
        shown = Terminal()
        monkeypatch.setattr(sys, "stdout", shown)
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.delenv("NO_COLOR", raising=False)
        return shown

    return of_width


@pytest.mark.parametrize("width", [60, 80, 140])
def test_a_row_is_one_line_on_a_terminal(width: int, terminal: Callable[[int], Terminal]) -> None:
    shown = terminal(width)
    CommandOutput().table(COLUMNS, ROWS)
    lines = shown.getvalue().splitlines()
    assert [line.split()[0] for line in lines[1:]] == [ID, "2b9f0c11"]
    assert [line.split()[-1] for line in lines[1:]] == ["7", "1200"]
    assert max(map(cell_len, lines[1:])) <= width
    assert ("…" in lines[1]) == (width < 140)
    assert "note" not in lines[0], "a column in which nothing is said takes no room"


def test_what_folds_is_all_there(terminal: Callable[[int], Terminal]) -> None:
    shown = terminal(80)
    CommandOutput().table(COLUMNS, [(ID, "x", LONG, "7")])
    lines = shown.getvalue().splitlines()
    assert len(lines) > 2
    assert [word for word in " ".join(lines[1:]).split() if word not in (ID, "x", "7")] == LONG.split()


def test_a_pipe_gets_whole_rows_without_blanks_at_their_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    piped = io.StringIO()
    monkeypatch.setattr(sys, "stdout", piped)
    CommandOutput().table(COLUMNS, [(ID, LONG * 5, LONG * 5, ""), ("2b9f0c11", "short", "", "")])
    lines = piped.getvalue().split("\n")
    assert len(lines) == 4
    assert lines[1] == f"{ID}  {LONG * 5}  {LONG * 5}"
    assert lines[2].split() == ["2b9f0c11", "short"]
    assert [line for line in lines if line != line.rstrip()] == []


def test_nothing_is_no_table_and_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    piped = io.StringIO()
    monkeypatch.setattr(sys, "stdout", piped)
    CommandOutput().table(COLUMNS, [])
    for pairs in ([], [("lost", "")]):
        CommandOutput().fields(pairs)
    assert piped.getvalue() == ""


@pytest.mark.parametrize("plain", [True, False])
def test_colours_only_where_they_are_wanted(
    plain: bool, terminal: Callable[[int], Terminal], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = terminal(80)
    if plain:
        monkeypatch.setenv("NO_COLOR", "1")
    output = CommandOutput()
    output.table(("id", "state"), [(ID, "failed")])
    output.line("\x1b[31mred\x1b[0m")
    assert ("\x1b[31m" in shown.getvalue()) != plain


def test_long_sentences_break_between_words(terminal: Callable[[int], Terminal]) -> None:
    shown = terminal(60)
    output = CommandOutput()
    output.paragraph(LONG)
    output.items([LONG])
    lines = shown.getvalue().splitlines()
    assert " ".join(lines[:2]) == LONG
    assert lines[2].startswith("  - a job with")
    assert lines[3].startswith("    ")
    assert max(map(len, lines)) <= 60


@pytest.mark.parametrize(
    ("terminal_name", "program", "worded"),
    [("xterm-256color", "", True), ("linux", "", False), ("dumb", "", False), ("xterm", "Apple_Terminal", False)],
)
def test_a_link_is_a_word_where_the_terminal_knows_such_and_an_address_elsewhere(
    terminal_name: str, program: str, worded: bool, terminal: Callable[[int], Terminal], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = terminal(40)
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setenv("TERM", terminal_name)
    monkeypatch.setenv("TERM_PROGRAM", program)
    url = "https://store.example/" + "x" * 300
    CommandOutput().link("step 5: ", "step-5\x1b[2J.png", url, "(1 B)")
    text = shown.getvalue()
    assert ("\x1b]8;" in text) is worded
    assert url in text, "in one piece, however narrow the terminal is"
    assert "\x1b[2J" not in text
    seen = re.sub(r"\x1b\]8;[^\x1b]*\x1b\\|\x1b\[[0-9;]*m", "", text)
    assert seen == "step 5: step-5[2J.png (1 B)" + ("" if worded else f" {url}") + "\n"
