"""Render the live view of a ring, and the tables of its benchmark."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gpu_client.cli.core.formats import count, plain, size, sparkline
from gpu_client.cli.core.output import CommandOutput
from gpu_client.ring.tools.status import ProcessRate, RateTrend, ReaderRow, RingStatus, WriterRow

if TYPE_CHECKING:
    from gpu_client.ring.tools.benchmark import BenchmarkRates


_CELLS = (10, 30)
"""Minimum and maximum width of bars and sparklines."""
_TEXT_CELLS = 58
"""Width of the text beside a bar."""
_OTHER_LINES = 15
"""Lines of the view that are not rows of writers or readers."""
_ROWS_AT_LEAST = 4
_LATE_WAIT_SHARE = 0.05
"""Share of waiting time above which a training is starved and shown in yellow."""


def render_status(
    place: str, found: RingStatus, trend: RateTrend, *, lines: int, columns: int, unicode: bool = True
) -> RenderableType:
    """Render a status for a terminal of `lines` and `columns`; count the rows that do not fit.

    `unicode`: use block characters.
    """
    cells = min(max(columns - _TEXT_CELLS, _CELLS[0]), _CELLS[1])
    parts: list[RenderableType] = [_title(place, found), *_head(found, trend, cells, unicode=unicode)]
    room = max(lines - _OTHER_LINES, 2 * _ROWS_AT_LEAST)
    for_readers = min(len(found.readers), max(_ROWS_AT_LEAST, room - len(found.writers)))
    for_writers = min(len(found.writers), max(_ROWS_AT_LEAST, room - for_readers))
    if found.writers:
        parts += [Text(), *_writers(found.writers, trend, for_writers)]
    if found.readers:
        parts += [Text(), *_readers(found.readers, trend, for_readers)]
    return Group(*parts)


def _title(place: str, found: RingStatus) -> Text:
    text = Text(plain(place), "bold", no_wrap=True, overflow="ellipsis")
    return text.append(f"  {found.mode}, manifest {found.manifest:,}", "dim")


def _head(found: RingStatus, trend: RateTrend, cells: int, *, unicode: bool) -> Iterator[Text]:
    def line(name: str, drawn: Text, text: str = "") -> Text:
        whole = Text(f"{name:<9}", "bold", no_wrap=True, overflow="ellipsis")
        whole.append(drawn if len(drawn) >= cells or not text else drawn.append(" " * (cells - len(drawn))))
        return whole.append(f"  {text}" if text else "", "not bold")

    waiting = f", {found.finished:,} waiting" if found.finished else ""
    fill = f"{100 * found.readable / found.cap:.0f} %: {found.readable:,} of {found.cap:,} readable{waiting}"
    yield line("fill", _bar(found.readable / found.cap, cells, unicode=unicode), fill)
    rates = trend.rates
    for name, place, total, more in (
        ("put", 0, found.inserted, f", {size(trend.bytes_per_s)}/s" if trend.bytes_per_s else ""),
        ("read", 1, found.read, ""),
    ):
        values = [pair[place] for pair in rates]
        drawn = Text(sparkline(values, cells) if unicode else "", "not bold green" if place == 0 else "not bold cyan")
        now = f"{values[-1]:,.1f}/s{more}, {total:,} so far" if values else f"{total:,} so far"
        yield line(name, drawn, now)
    if found.reuse is not None:
        yield line("reuse", *_reuse(found.reuse, trend))
    if found.newest_s is not None and found.oldest_s is not None:
        yield line("age", Text(f"{found.newest_s:.1f} to {found.oldest_s:.1f} s", "not bold"))
    yield line("waits", *_waits(trend))
    if found.damaged:
        label = f"{count(len(found.damaged), 'object')}; list them with: baton ring verify"
        yield line("damaged", Text(label, "not bold red"))


def _reuse(in_all: float, trend: RateTrend) -> tuple[Text, str]:
    if trend.reuse is None:
        return Text("no new samples", "not bold yellow"), f"{in_all:.1f} reads per sample in total"
    return Text(f"{trend.reuse:.1f} reads per sample", "not bold"), f"{in_all:.1f} in total"


def _waits(trend: RateTrend) -> tuple[Text, str]:
    readers, writers = trend.readers_waited_share, trend.writers_waited_share
    starved = readers is not None and readers > _LATE_WAIT_SHARE
    label = Text(f"readers {_share(readers) or 'unknown'}", "not bold yellow" if starved else "not bold")
    return label, f"writers {_share(writers) or 'unknown'}"


def _writers(rows: Sequence[WriterRow], trend: RateTrend, room: int) -> list[RenderableType]:
    table = _table(["writer", "", "put/s", "bytes/s", "put", "refused", "waits"])
    shown = sorted(rows, key=lambda row: (not row.at_work, row.name))[:room]
    for row in shown:
        pace = trend.writer(row.name) if row.at_work else None
        table.add_row(
            Text(plain(row.name)), Text(row.state, "red"), _rate(pace),
            "" if pace is None else size(pace.bytes_per_s), f"{row.put:,}",
            Text(f"{row.refused:,}", "red" if row.refused else "dim"), _share(pace.waited_share if pace else None),
        )  # fmt: skip
    return [table, *_rest(len(rows) - len(shown), "writer")]


def _readers(rows: Sequence[ReaderRow], trend: RateTrend, room: int) -> list[RenderableType]:
    table = _table(["reader", "", "read/s", "read", "damaged", "waits"])
    for row in rows[:room]:
        pace = trend.reader(row.name)
        table.add_row(
            Text(plain(row.name)), "", _rate(pace), f"{row.read:,}",
            Text(f"{row.damaged:,}", "red" if row.damaged else "dim"), _share(pace.waited_share if pace else None),
        )  # fmt: skip
    return [table, *_rest(len(rows) - room, "reader")]


def _table(columns: Iterable[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    for place, name in enumerate(columns):
        table.add_column(name, no_wrap=True, overflow="ellipsis", justify="left" if place < 2 else "right")
    return table


def _rest(hidden: int, kind: str) -> list[Text]:
    return [Text(f"and {count(hidden, f'more {kind}')}", "dim")] if hidden > 0 else []


def _rate(pace: ProcessRate | None) -> str:
    return "" if pace is None else f"{pace.per_s:,.1f}"


def _share(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"


def _bar(share: float, cells: int, *, unicode: bool) -> Text:
    full = round(min(max(share, 0.0), 1.0) * cells)
    one, other = ("█", "░") if unicode else ("#", ".")
    return Text(one * full, "not bold green").append(other * (cells - full), "not bold dim")


def show_bench(output: CommandOutput, rates: BenchmarkRates, limits: Mapping[str, float]) -> None:
    """Print the rates of a benchmark as a table."""
    rows = [
        (label, f"{rates.per_s(name):.1f}", f"{rates.per_s(name) * rates.size_bytes / 1e9:.2f}", part)
        for label, name, part in (
            ("put", "put_s", f"{rates.of_raw('put'):.0%}"),
            ("  raw: new file or object", "raw_put_s", ""),
            ("verified get", "get_s", f"{rates.of_raw('get'):.0%}"),
            ("  raw: read and hash", "raw_get_s", ""),
        )
    ]
    output.table(["", "per second", "GB/s", "vs. raw"], rows)
    output.note(
        f"{count(len(rates.turns), 'sample')} of {rates.size_bytes / 2**20:.4g} MiB, one thread. This machine copies "
        f"{limits['copy'] / 1e9:.1f}, hashes {limits['xxh3'] / 1e9:.1f} and sends itself "
        f"{limits['loopback'] / 1e9:.1f} GB/s"
    )


def bench_document(rates: BenchmarkRates, limits: Mapping[str, float]) -> dict[str, object]:
    """Return the rates of a benchmark as JSON values."""
    found: dict[str, object] = {"size_bytes": rates.size_bytes, "samples": len(rates.turns)}
    for name in ("put", "get"):
        found[name] = {
            "per_s": round(rates.per_s(f"{name}_s"), 3),
            "raw_per_s": round(rates.per_s(f"raw_{name}_s"), 3),
            "of_raw": round(rates.of_raw(name), 4),
        }
    return {**found, "machine_bytes_per_s": {name: round(one) for name, one in limits.items()}}
