from __future__ import annotations

import pytest

from gpu_client.cli.core.errors import CliError
from gpu_client.cli.core.formats import count, duration, parse_duration, plain, printable, size


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (-3, "0 s"),
        (0, "0 s"),
        (59.4, "59 s"),
        (60, "1 min"),
        (185, "3 min 5 s"),
        (3600, "1 h"),
        (8059, "2 h 14 min"),
        (86_400 * 3 + 3600 * 4 + 59, "3 d 4 h"),
    ],
)
def test_durations(seconds: float, said: str) -> None:
    assert duration(seconds) == said


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), (" 15m ", 900), ("15min", 900), ("12H", 43_200), ("2w", 1_209_600)]
)
def test_durations_that_are_read(text: str, seconds: int) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "1.5h", "-3", "3 months", "h", "1h30m", "9" * 30])
def test_durations_that_are_none(text: str) -> None:
    with pytest.raises(CliError, match="is not a duration"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("count_bytes", "said"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (1_234_567, "1.2 MB"), (999_960, "1.0 MB"), (5e15, "5000.0 TB")],
)
def test_sizes(count_bytes: float, said: str) -> None:
    assert size(count_bytes) == said


def test_counts() -> None:
    assert [count(0, "file"), count(1, "file"), count(1800, "file")] == ["0 files", "1 file", "1,800 files"]


@pytest.mark.parametrize(
    ("foreign", "shown"),
    [
        ("loss 0.3\tstep 5 ü", "loss 0.3\tstep 5 ü"),
        ("\x1b[31mred\x1b[0m", "\x1b[31mred\x1b[0m\x1b[0m"),
        ("\x1b]52;c;ZXZpbA==\x07copied", "]52;c;ZXZpbA==copied"),
        ("\x1b[2Jcleared\x9b2J", "[2Jcleared2J"),
        ("100%\r200%", "100%200%"),
        ("\x1b[2J\rthen \x1b[32mgreen", "[2Jthen \x1b[32mgreen\x1b[0m"),
    ],
)
def test_foreign_text_can_do_nothing_to_a_terminal(foreign: str, shown: str) -> None:
    assert printable(foreign) == shown


def test_plain_text_is_one_line_without_colours() -> None:
    assert plain("a\n\x1b[31mb\x1b[0m\x07\tc") == "a b c"
