"""Curves as SVG for a page: plain text, colours by the page's classes, so that it is right in light and dark. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

from gpu_client.cli.core.formats import number, plain

LOG_FROM = 50.0
"""A curve whose largest value is so many times its smallest one, all of them positive, is drawn on a log scale."""
_DOTS_BELOW = 60
"""So few points are drawn as dots too."""
_CHARACTER = 6.6
"""Width of a small letter, in the picture's units."""
_LANE = 15.0
MAX_LANES = 9
MAX_LABEL_CHARS = 60

Point = tuple[int, float]


@dataclass(frozen=True)
class Curve:
    """A metric over steps; what is not finite is a gap. `name` is the CSS class."""

    name: str
    points: Sequence[Point]
    dots: bool = True
    """Whether few points are dots too."""


@dataclass(frozen=True)
class Mark:
    """Something that happened at a step. `kind` is the CSS class; `label` may be empty; `detail` is shown on hovering.

    `to_step`: where the training went back to.
    """

    kind: str
    step: int
    label: str = ""
    detail: str = ""
    to_step: int | None = None
    value: float | None = None
    """Where it is a dot too; on no curve without it."""


@dataclass(frozen=True)
class Frame:
    """Size of a picture, and what else is in it."""

    width: float = 960.0
    height: float = 380.0
    ticks: Sequence[int] = ()
    """Steps marked on the axis: checkpoints."""
    marks: Sequence[Mark] = ()
    first_step: int | None = None
    last_step: int | None = None
    title: str = ""


def text_of(foreign: str, limit: int = 400) -> str:
    """Foreign text as part of a page: nothing in it is markup, nothing a control character."""
    clean = "".join(character if character.isprintable() else " " for character in plain(foreign))
    return escape(clean if len(clean) <= limit else f"{clean[: limit - 1]}…", quote=True)


def thinned(points: Sequence[Point], columns: int) -> list[Point]:
    """At most four points for each column: the first, the lowest, the highest, the last. The curve looks the same.

    What is not finite stays as one gap for each column that has some.
    """
    if len(points) <= 4 * columns:
        return list(points)
    low, high = points[0][0], points[-1][0]
    width = max(high - low, 1) / columns
    kept: list[Point] = []
    column: list[tuple[int, Point]] = []
    at = 0

    def close() -> None:
        if not column:
            return
        finite = [one for one in column if math.isfinite(one[1][1])]
        chosen = {column[0][0]: column[0][1], column[-1][0]: column[-1][1]}
        if finite:
            for one in (min(finite, key=lambda one: one[1][1]), max(finite, key=lambda one: one[1][1])):
                chosen[one[0]] = one[1]
        odd = next((one for one in column if not math.isfinite(one[1][1])), None)
        if odd is not None:
            chosen[odd[0]] = odd[1]
        kept.extend(chosen[place] for place in sorted(chosen))
        column.clear()

    for place, point in enumerate(points):
        now = min(int((point[0] - low) / width), columns - 1)
        if now != at:
            close()
            at = now
        column.append((place, point))
    close()
    return kept


class _Axis:
    """From values to places."""

    def __init__(self, low: float, high: float, begin: float, end: float, *, log: bool = False) -> None:
        self.log = log
        self._low, self._high = (math.log10(low), math.log10(high)) if log else (low, high)
        self._begin, self._end = begin, end

    def __call__(self, value: float) -> float:
        at = math.log10(value) if self.log else value
        # Halves: the difference of two large numbers need not be finite.
        share = (at / 2 - self._low / 2) / (self._high / 2 - self._low / 2)
        return self._begin + min(max(share, -0.1), 1.1) * (self._end - self._begin)

    def ticks(self) -> list[float]:
        """Round values on it."""
        if not self.log:
            return nice_ticks(self._low, self._high, 5)
        begin, end = math.floor(self._low), math.ceil(self._high)
        powers = [10.0**power for power in range(begin, end + 1) if abs(power) < 300]
        every = max(1, math.ceil(len(powers) / 6))
        found = self._within(powers[::every])
        return found if len(found) > 2 else self._within([factor * power for power in powers for factor in (1, 2, 5)])

    def _within(self, values: Iterable[float]) -> list[float]:
        return [value for value in values if self._low <= math.log10(value) <= self._high]


def nice_ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers within a range, some `about` of them."""
    span = high - low
    if not math.isfinite(span) or span <= 0:
        return [low] if low == high else [low, high]
    raw = span / max(about, 1)
    size = 10.0 ** math.floor(math.log10(raw)) if raw > 0 else 0.0
    if size == 0.0:
        return [low, high]
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    found = [(first + count) * step for count in range(4 * about + 2)]
    return [value for value in found if value <= high + step * 1e-6]


def drawn(curves: Sequence[Curve], frame: Frame) -> str:
    """The picture as SVG; one without any finite value says so. Marks stand on the first curve."""
    values = [value for curve in curves for _, value in curve.points if math.isfinite(value)]
    steps = [step for curve in curves for step, _ in curve.points] + [mark.step for mark in frame.marks]
    steps += [step for step in (frame.first_step, frame.last_step) if step is not None]
    first, last = (min(steps), max(*steps, min(steps) + 1)) if steps else (0, 1)
    left, right, base = 62.0, frame.width - 14.0, frame.height - 34.0
    x = _Axis(first, last, left, right)
    placed, lanes = _placed(frame.marks, x, right)
    top = 12.0 + _LANE * lanes
    y = _vertical(values, top, base)
    body = [
        _label(x(value), base + 18, f"{int(value):,}", "axis", "middle")
        for value in nice_ticks(first, last, 8 if frame.width > 500 else 4)
        if value == int(value)
    ]
    if y is not None:
        for value in y.ticks():
            at = y(value)
            body.append(f'<line class="grid" x1="{left:g}" x2="{right:g}" y1="{at:.1f}" y2="{at:.1f}"/>')
            body.append(_label(left - 8, at + 4, number(value), "axis", "end"))
    body.append(f'<line class="base" x1="{left:g}" x2="{right:g}" y1="{base:g}" y2="{base:g}"/>')
    for step in _apart(frame.ticks, x):
        body.append(
            f'<path class="ckpt" d="M{x(step):.1f} {base - 9:g}l4.5 9h-9z">'
            f"<title>checkpoint of step {step:,}</title></path>"
        )
    for curve in reversed(curves):
        body += _curve(curve, x, y, columns=int(right - left), top=top)
    if y is None:
        body.append(_label((left + right) / 2, (top + base) / 2, "nothing finite was reported", "none", "middle"))
    on = [point for point in curves[0].points if math.isfinite(point[1])] if curves else []
    body += _marks(placed, on, x, y, base)
    name = text_of(frame.title)
    return (
        f'<svg viewBox="0 0 {frame.width:g} {frame.height:g}" role="img" aria-label="{name}">'
        f"<title>{name}</title>{''.join(body)}</svg>"
    )


def is_log(values: Iterable[float]) -> bool:
    """Whether they are drawn on a log scale."""
    finite = [value for value in values if math.isfinite(value)]
    return bool(finite) and min(finite) > 0 and max(finite) / min(finite) >= LOG_FROM


def _vertical(values: Sequence[float], top: float, base: float) -> _Axis | None:
    if not values:
        return None
    low, high = min(values), max(values)
    if is_log(values):
        return _Axis(low / 1.15, min(high * 1.15, 1e308), base, top, log=True)
    pad = (high * 0.06 - low * 0.06) or abs(low) * 0.1 or 1.0
    return _Axis(max(low - pad, -1.7e308), min(high + pad, 1.7e308), base, top)


def _curve(curve: Curve, x: _Axis, y: _Axis | None, *, columns: int, top: float) -> list[str]:
    points = thinned(curve.points, columns)
    drawn_runs, alone, odd = [], [], []
    run: list[Point] = []
    for step, value in [*points, (0, math.nan)]:
        if math.isfinite(value):
            run.append((step, value))
            continue
        odd.append(step)
        if len(run) > 1:
            drawn_runs.append(run)
        else:
            alone += run
        run = []
    lines: list[str] = []
    if y is not None:
        dense = len(curve.points) > 2 * columns
        for one in drawn_runs:
            lines.append(_polyline(f"{curve.name} dim" if dense else curve.name, one, x, y))
        if dense:
            lines.append(_polyline(f"{curve.name} mean", _means(curve.points, columns // 4), x, y))
        few = len(points) < _DOTS_BELOW and curve.dots
        dots = [one for one in points if math.isfinite(one[1])] if few else alone
        for step, value in dots:
            lines.append(f'<circle class="{curve.name} dot" cx="{x(step):.1f}" cy="{y(value):.1f}" r="2.6"/>')
    for step in _apart(odd[:-1], x):
        lines.append(
            f'<path class="odd" d="M{x(step) - 4:.1f} {top + 2:g}l8 8m0 -8l-8 8">'
            f"<title>not finite at step {step:,}</title></path>"
        )
    return lines


def _polyline(kind: str, points: Sequence[Point], x: _Axis, y: _Axis) -> str:
    places = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points)
    return f'<polyline class="{kind}" points="{places}"/>'


def _means(points: Sequence[Point], pieces: int) -> list[Point]:
    """Of finite values, piece by piece: where a curve is a band, its middle."""
    size = math.ceil(len(points) / pieces)
    found: list[Point] = []
    for begin in range(0, len(points), size):
        finite = [one for one in points[begin : begin + size] if math.isfinite(one[1])]
        if finite:
            mean = math.fsum(value / len(finite) for _, value in finite)
            found.append((finite[len(finite) // 2][0], mean))
    return found


def _apart(steps: Iterable[int], x: _Axis, least: float = 3.0) -> list[int]:
    """Those that can be told apart."""
    kept: list[int] = []
    for step in sorted(set(steps)):
        if not kept or x(step) - x(kept[-1]) >= least:
            kept.append(step)
    return kept


class _Placed(NamedTuple):
    """A mark, the height of its label, and on which side of the line that stands; no label where none fits."""

    mark: Mark
    lane: int | None
    before: bool = False


def _placed(marks: Sequence[Mark], x: _Axis, right: float) -> tuple[list[_Placed], int]:
    """Labels in lanes, so that none covers another, and how many lanes."""
    lanes: list[list[tuple[float, float]]] = []
    placed: list[_Placed] = []
    for mark in sorted(marks, key=lambda mark: mark.step):
        if not mark.label:
            placed.append(_Placed(mark, None))
            continue
        wide, at = _CHARACTER * len(_short(mark.label)) + 10, x(mark.step)
        before = at + wide > right
        extent = (at - wide, at) if before else (at, at + wide)
        free = (place for place, taken in enumerate(lanes) if all(extent[1] < a or extent[0] > b for a, b in taken))
        lane = next(free, len(lanes))
        if lane == MAX_LANES:
            placed.append(_Placed(mark, None))
            continue
        if lane == len(lanes):
            lanes.append([])
        lanes[lane].append(extent)
        placed.append(_Placed(mark, lane, before))
    return placed, len(lanes)


def _short(label: str) -> str:
    return label if len(label) <= MAX_LABEL_CHARS else f"{label[: MAX_LABEL_CHARS - 1]}…"


def _marks(placed: Sequence[_Placed], on: Sequence[Point], x: _Axis, y: _Axis | None, base: float) -> list[str]:
    """Lines, on them dots and ways back, on these labels."""
    lines: list[str] = []
    spots: list[str] = []
    words: list[str] = []
    for mark, lane, before in placed:
        at = x(mark.step)
        begin = 12.0 + (lane or 0) * _LANE
        detail = f"<title>{text_of(mark.detail or mark.label)}</title>"
        lines.append(
            f'<line class="{mark.kind} stem" x1="{at:.1f}" x2="{at:.1f}" y1="{begin - 8:g}" y2="{base:g}">'
            f"{detail}</line>"
        )
        if y is not None and mark.value is not None:
            height = y(mark.value)
            if mark.to_step is not None and on:
                spots.append(_arc(at, height, x(mark.to_step), y(value_at(on, mark.to_step)), mark.kind))
            spots.append(f'<circle class="{mark.kind} spot" cx="{at:.1f}" cy="{height:.1f}" r="5">{detail}</circle>')
        if lane is not None:
            anchor = "end" if before else "start"
            words.append(_label(at + (-5 if before else 5), begin + 2, _short(mark.label), f"{mark.kind} word", anchor))
    return [*lines, *spots, *words]


def _arc(from_x: float, from_y: float, to_x: float, to_y: float, kind: str) -> str:
    bend_x, bend_y = (from_x + to_x) / 2, min(from_y, to_y) - 26
    return (
        f'<path class="{kind} arc" d="M{from_x:.1f} {from_y:.1f}Q{bend_x:.1f} {bend_y:.1f} {to_x:.1f} {to_y:.1f}"'
        ' marker-end="url(#tip)"/>'
    )


def value_at(on: Sequence[Point], step: int) -> float:
    """At the step, or the nearest before it, or else the first."""
    return on[max(bisect_right(on, step, key=lambda point: point[0]) - 1, 0)][1]


def _label(x: float, y: float, text: str, kind: str, anchor: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text_of(text)}</text>'
