"""Figures of a report: rounds, median, worst, the baseline of the same run, the target. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from statistics import median
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Line of the report; smaller values are better in every figure.

    `rounds`: one value per round, in `unit`. `baseline`: values of the contender `baseline_name` in the same rounds.
    `at_most`: the target of the median ratio to the baseline, or of the median without a baseline; None for a figure
    without a target. A `counted` figure is exact: its worst round must meet the target; with
    `p95`, the 95th percentile must.
    """

    name: str
    unit: str
    rounds: Sequence[float]
    baseline_name: str | None = None
    baseline: Sequence[float] = ()
    at_most: float | None = None
    counted: bool = False
    p95: bool = False
    details: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.rounds:
            raise ValueError(f"{self.name}: no round was measured")
        if (self.baseline_name is None) != (not self.baseline):
            raise ValueError(f"{self.name}: a baseline has a name and values")
        if self.baseline and len(self.baseline) != len(self.rounds):
            raise ValueError(f"{self.name}: {len(self.rounds)} rounds, but {len(self.baseline)} of the baseline")

    @property
    def ratios(self) -> list[float]:
        """Divide value by baseline, round by round; empty without a baseline."""
        return [value / base for value, base in zip(self.rounds, self.baseline, strict=False)]

    @property
    def judged(self) -> float:
        """Compute the number that is compared with the target."""
        values = sorted(self.ratios or self.rounds)
        if self.p95:
            return values[ceil(0.95 * len(values)) - 1]
        return values[-1] if self.counted else median(values)

    @property
    def statistic(self) -> str:
        """Return the name of the statistic that is compared."""
        return "p95" if self.p95 else "worst" if self.counted else "median"

    @property
    def met(self) -> bool | None:
        """Compare with the target; None without a target."""
        return None if self.at_most is None else self.judged <= self.at_most

    def as_dict(self) -> dict[str, Any]:
        """Convert for the JSON report."""
        record: dict[str, Any] = {"name": self.name, "unit": self.unit, **_summary(self.rounds)}
        if self.baseline_name is not None:
            record["baseline"] = {"name": self.baseline_name, **_summary(self.baseline)}
            record["ratio"] = _summary(self.ratios)
        if self.at_most is not None:
            of = "ratio" if self.baseline else "value"
            record["target"] = {"of": of, "statistic": self.statistic, "at_most": self.at_most}
        record["met"] = self.met
        record["details"] = dict(self.details)
        return record


def _summary(values: Sequence[float]) -> dict[str, Any]:
    return {
        "rounds": [round(value, 6) for value in values],
        "median": round(median(values), 6),
        "worst": round(max(values), 6),
    }


def table(figures: Sequence[Figure]) -> str:
    """Format the report for a terminal."""
    head = ("figure", "rounds", "median", "worst", "baseline", "ratio", "worst", "target", "met")
    rows = [head, *(_row(figure) for figure in figures)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column in (0, 4, 8) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _row(figure: Figure) -> tuple[str, ...]:
    base, ratio, worst_ratio = "", "", ""
    if figure.baseline:
        base = f"{_number(median(figure.baseline))} {figure.unit} {figure.baseline_name}"
        ratio, worst_ratio = f"{median(figure.ratios):.3f}", f"{max(figure.ratios):.3f}"
    target = "" if figure.at_most is None else f"{'p95 ' if figure.p95 else ''}<= {figure.at_most:g}"
    met = {None: "", True: "yes", False: "NO"}[figure.met]
    value, worst = f"{_number(median(figure.rounds))} {figure.unit}", _number(max(figure.rounds))
    return (figure.name, str(len(figure.rounds)), value, worst, base, ratio, worst_ratio, target, met)


def _number(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
