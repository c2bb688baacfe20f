"""Draw curves as SVG. The style sheet of the page sets the colors, for light and dark mode. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

from gpu_client.cli.core.formats import number, plain

LOG_FROM = 50.0
"""Ratio of the largest to the smallest value from which positive curves have a log scale."""
_DOTS_BELOW = 60
"""Number of points below which a curve has dots."""
_CHARACTER = 6.6
"""Width of a character in SVG units."""
_LANE = 15.0
MAX_LANES = 9
MAX_LABEL_CHARS = 60

Point = tuple[int, float]


@dataclass(frozen=True)
class Curve:
    """Metric over steps; NaN and infinities are gaps. `name`: CSS class."""

    name: str
    points: Sequence[Point]
    dots: bool = True
    """True to draw dots if the curve has few points."""


@dataclass(frozen=True)
class Mark:
    """Event at a step. `kind`: CSS class. `label`: may be empty. `detail`: tooltip. `to_step`: target of a rollback."""

    kind: str
    step: int
    label: str = ""
    detail: str = ""
    to_step: int | None = None
    value: float | None = None
    """Height of a dot; None for no dot."""


@dataclass(frozen=True)
class Frame:
    """Size of a chart, its marks and axis range."""

    width: float = 960.0
    height: float = 380.0
    ticks: Sequence[int] = ()
    """Steps of checkpoints, marked on the axis."""
    marks: Sequence[Mark] = ()
    first_step: int | None = None
    last_step: int | None = None
    title: str = ""


def to_html(foreign: str, limit: int = 400) -> str:
    """Escape foreign text for HTML and remove control characters."""
    clean = "".join(character if character.isprintable() else " " for character in plain(foreign))
    return escape(clean if len(clean) <= limit else f"{clean[: limit - 1]}…", quote=True)


def thin_points(points: Sequence[Point], columns: int) -> list[Point]:
    """Reduce points to four per pixel column: first, lowest, highest, last. The drawn curve does not change.

    Keeps one NaN or infinity per column, as a gap.
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
    """Mapping of values to SVG coordinates."""

    def __init__(self, low: float, high: float, begin: float, end: float, *, log: bool = False) -> None:
        self.log = log
        self._low, self._high = (math.log10(low), math.log10(high)) if log else (low, high)
        self._begin, self._end = begin, end

    def __call__(self, value: float) -> float:
        at = math.log10(value) if self.log else value
        # The difference of two large numbers can overflow, therefore all terms are halved.
        share = (at / 2 - self._low / 2) / (self._high / 2 - self._low / 2)
        return self._begin + min(max(share, -0.1), 1.1) * (self._end - self._begin)

    def ticks(self) -> list[float]:
        """Return round values within the axis."""
        if not self.log:
            return round_ticks(self._low, self._high, 5)
        begin, end = math.floor(self._low), math.ceil(self._high)
        powers = [10.0**power for power in range(begin, end + 1) if abs(power) < 300]
        every = max(1, math.ceil(len(powers) / 6))
        found = self._within(powers[::every])
        return found if len(found) > 2 else self._within([factor * power for power in powers for factor in (1, 2, 5)])

    def _within(self, values: Iterable[float]) -> list[float]:
        return [value for value in values if self._low <= math.log10(value) <= self._high]


def round_ticks(low: float, high: float, about: int) -> list[float]:
    """Return about `about` round numbers within a range."""
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


def draw_chart(curves: Sequence[Curve], frame: Frame) -> str:
    """Draw curves as SVG, with a note if no value is finite. Marks belong to the first curve."""
    values = [value for curve in curves for _, value in curve.points if math.isfinite(value)]
    steps = [step for curve in curves for step, _ in curve.points] + [mark.step for mark in frame.marks]
    steps += [step for step in (frame.first_step, frame.last_step) if step is not None]
    first, last = (min(steps), max(*steps, min(steps) + 1)) if steps else (0, 1)
    left, right, base = 62.0, frame.width - 14.0, frame.height - 34.0
    x = _Axis(first, last, left, right)
    placed, lanes = _place_labels(frame.marks, x, right)
    top = 12.0 + _LANE * lanes
    y = _vertical(values, top, base)
    body = [
        _label(x(value), base + 18, f"{int(value):,}", "axis", "middle")
        for value in round_ticks(first, last, 8 if frame.width > 500 else 4)
        if value == int(value)
    ]
    if y is not None:
        for value in y.ticks():
            at = y(value)
            body.append(f'<line class="grid" x1="{left:g}" x2="{right:g}" y1="{at:.1f}" y2="{at:.1f}"/>')
            body.append(_label(left - 8, at + 4, number(value), "axis", "end"))
    body.append(f'<line class="base" x1="{left:g}" x2="{right:g}" y1="{base:g}" y2="{base:g}"/>')
    for step in _drop_overlapping(frame.ticks, x):
        body.append(
            f'<path class="ckpt" d="M{x(step):.1f} {base - 9:g}l4.5 9h-9z">'
            f"<title>checkpoint of step {step:,}</title></path>"
        )
    for curve in reversed(curves):
        body += _curve(curve, x, y, columns=int(right - left), top=top)
    if y is None:
        body.append(_label((left + right) / 2, (top + base) / 2, "no finite values", "none", "middle"))
    on = [point for point in curves[0].points if math.isfinite(point[1])] if curves else []
    body += _marks(placed, on, x, y, base)
    name = to_html(frame.title)
    return (
        f'<svg viewBox="0 0 {frame.width:g} {frame.height:g}" role="img" aria-label="{name}">'
        f"<title>{name}</title>{''.join(body)}</svg>"
    )


def uses_log_scale(values: Iterable[float]) -> bool:
    """Return True if values are drawn on a log scale."""
    finite = [value for value in values if math.isfinite(value)]
    return bool(finite) and min(finite) > 0 and max(finite) / min(finite) >= LOG_FROM


def _vertical(values: Sequence[float], top: float, base: float) -> _Axis | None:
    if not values:
        return None
    low, high = min(values), max(values)
    if uses_log_scale(values):
        return _Axis(low / 1.15, min(high * 1.15, 1e308), base, top, log=True)
    pad = (high * 0.06 - low * 0.06) or abs(low) * 0.1 or 1.0
    return _Axis(max(low - pad, -1.7e308), min(high + pad, 1.7e308), base, top)


def _curve(curve: Curve, x: _Axis, y: _Axis | None, *, columns: int, top: float) -> list[str]:
    points = thin_points(curve.points, columns)
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
    for step in _drop_overlapping(odd[:-1], x):
        lines.append(
            f'<path class="odd" d="M{x(step) - 4:.1f} {top + 2:g}l8 8m0 -8l-8 8">'
            f"<title>not finite at step {step:,}</title></path>"
        )
    return lines


def _polyline(kind: str, points: Sequence[Point], x: _Axis, y: _Axis) -> str:
    places = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points)
    return f'<polyline class="{kind}" points="{places}"/>'


def _means(points: Sequence[Point], pieces: int) -> list[Point]:
    """Average the finite values of consecutive pieces. The averages are the center of a dense curve."""
    size = math.ceil(len(points) / pieces)
    found: list[Point] = []
    for begin in range(0, len(points), size):
        finite = [one for one in points[begin : begin + size] if math.isfinite(one[1])]
        if finite:
            mean = math.fsum(value / len(finite) for _, value in finite)
            found.append((finite[len(finite) // 2][0], mean))
    return found


def _drop_overlapping(steps: Iterable[int], x: _Axis, least: float = 3.0) -> list[int]:
    """Drop steps that overlap in the drawing."""
    kept: list[int] = []
    for step in sorted(set(steps)):
        if not kept or x(step) - x(kept[-1]) >= least:
            kept.append(step)
    return kept


class _Placed(NamedTuple):
    """Mark with the lane and side of its label; lane None for no label."""

    mark: Mark
    lane: int | None
    before: bool = False


def _place_labels(marks: Sequence[Mark], x: _Axis, right: float) -> tuple[list[_Placed], int]:
    """Assign labels to lanes without overlap; return the marks and the number of lanes."""
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
    """Draw marks: lines below, then dots and rollback arcs, then labels."""
    lines: list[str] = []
    spots: list[str] = []
    words: list[str] = []
    for mark, lane, before in placed:
        at = x(mark.step)
        begin = 12.0 + (lane or 0) * _LANE
        detail = f"<title>{to_html(mark.detail or mark.label)}</title>"
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
    """Return the value at a step, else at the nearest earlier step, else the first value."""
    return on[max(bisect_right(on, step, key=lambda point: point[0]) - 1, 0)][1]


def _label(x: float, y: float, text: str, kind: str, anchor: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{to_html(text)}</text>'
