"""The live view of a ring: content and fit to the terminal size."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from gpu_client.cli.core.formats import sparkline
from gpu_client.cli.core.output import CommandOutput
from gpu_client.cli.ring.commands import show_status
from gpu_client.cli.ring.view import render_status
from gpu_client.ring.tools.status import RateTrend, ReaderRow, RingStatus, WriterRow

EMPTY = RingStatus(0.0, 512, "rolling", 0, 0, 0, 0, 0, None, None, 0, 0, {})


def at(second: int, *, writers: int = 4, waits_s: float = 0.0) -> RingStatus:
    """Ten samples a second, each read twelve times."""
    rows = [WriterRow(f"w{n}", n != 2, 10 * second, 40_960 * second, 0, 0.25 * second) for n in range(writers)]
    readers = [ReaderRow("train", 120 * second, waits_s * second, 0, [second])]
    inserted = 10 * second
    return replace(
        EMPTY, at=1000.0 + second, manifest=4 * second, readable=min(inserted, 512), inserted=inserted,
        finished=3, read=120 * second, oldest_s=9.25, newest_s=0.3, writers=rows, readers=readers,
    )  # fmt: skip


def shown(*looks: RingStatus, lines: int = 40, columns: int = 100, unicode: bool = True) -> list[str]:
    trend = RateTrend()
    for look in looks:
        trend.add(look)
    console = Console(file=io.StringIO(), width=columns, height=lines, force_terminal=True, color_system=None)
    console.print(render_status("/mnt/ring", looks[-1], trend, lines=lines, columns=columns, unicode=unicode))
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_everything_that_matters_is_in_it() -> None:
    text_value = shown(*(at(second) for second in range(1, 30)))
    assert text_value[:8] == [
        "/mnt/ring  rolling, manifest 116",
        "fill     █████████████████░░░░░░░░░░░░░  57 %: 290 of 512 readable, 3 waiting",
        "put      ████████████████████████████    10.0/s, 122.9 kB/s, 290 so far",
        "read     ████████████████████████████    120.0/s, 3,480 so far",
        "reuse    12.0 reads per sample           12.0 in total",
        "age      0.3 to 9.2 s",
        "waits    readers 0 %                     writers 25 %",
        "",
    ]
    assert [line.split() for line in text_value[8:14]] == [
        ["writer", "put/s", "bytes/s", "put", "refused", "waits"],
        ["w0", "10.0", "41.0", "kB", "290", "0", "25", "%"],
        ["w1", "10.0", "41.0", "kB", "290", "0", "25", "%"],
        ["w3", "10.0", "41.0", "kB", "290", "0", "25", "%"],
        ["w2", "dead", "290", "0"],
        [],
    ]
    assert text_value[15].split() == ["train", "120.0", "3,480", "0", "0", "%"]


def test_dead_and_silent_writers_are_in_no_sum_of_the_status(capsys: pytest.CaptureFixture[str]) -> None:
    dead, silent, active = (WriterRow(name, name != "dead", 10, 0, 0, 0.0) for name in ("dead", "silent", "active"))
    show_status(CommandOutput(), replace(at(1), writers=[dead, replace(silent, silent_s=9.0), active]), None)
    out = capsys.readouterr().out
    assert "1 active, which put 10; 2 inactive" in out
    states = {name: rest for name, *rest in (line.split() for line in out.splitlines() if line)}
    assert states["dead"][0] == "dead" and states["silent"][:4] == ["silent", "for", "9", "s"]


def test_a_ring_in_which_nothing_is() -> None:
    text_value = shown(EMPTY)
    assert text_value == [
        "/mnt/ring  rolling, manifest 0",
        "fill     ░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░  0 %: 0 of 512 readable",
        "put                                      0 so far",
        "read                                     0 so far",
        "waits    readers unknown                 writers unknown",
    ]


def test_nothing_new_for_long_is_told() -> None:
    stopped = at(5)
    text_value = shown(stopped, *(replace(stopped, at=1005.0 + more, read=600 + 10 * more) for more in range(1, 40)))
    assert text_value[4] == "reuse    no new samples                  19.8 reads per sample in total"


def test_rows_that_do_not_fit_are_counted() -> None:
    looks = [at(second, writers=64) for second in (1, 2)]
    text_value = shown(*looks, lines=24)
    assert len(text_value) < 24
    assert "and 56 more writers" in text_value
    assert sum(line.startswith("w") and "25 %" in line for line in text_value) == 9, "eight of them, and all together"
    assert any(line.startswith("train") for line in text_value)


def test_a_narrow_terminal_without_blocks_loses_no_name() -> None:
    text_value = shown(*(at(second) for second in (1, 2, 3)), columns=50, unicode=False)
    assert [line.split()[0] for line in text_value[1:7]] == ["fill", "put", "read", "reuse", "age", "waits"]
    assert max(map(len, text_value)) <= 50
    assert "".join(text_value).replace("…", "").isascii()


def test_foreign_names_do_nothing_to_the_terminal() -> None:
    row = WriterRow("\x1b[2Jevil\n", True, 1, 1, 0, 0.0)
    text_value = shown(replace(at(1), writers=[row]))
    assert not any("\x1b" in line for line in text_value)


def test_curves_are_of_the_newest_values() -> None:
    assert sparkline([], 4) == ""
    assert sparkline([0, 0], 4) == "▁▁"
    assert sparkline([100, 1, 2, 4, 8], 4) == "▂▃▅█"
    assert sparkline([-5, 8], 4) == "▁█"
