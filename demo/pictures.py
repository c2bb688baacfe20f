"""The two pictures of the report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine, LayoutEngine
from matplotlib.ticker import FuncFormatter, MaxNLocator

from demo.follow import Point, equal_losses
from demo.measure import Readings
from demo.saving import Saving, share_of
from demo.summary import Interruption

INK = "#22252b"
FAINT = "#6f7680"
UNDISTURBED = "#c9ced6"
ATTEMPTS = ("#2f6fb3", "#d9822b")
KILL = "#c0392b"
GREEN = "#2e8b57"
BAND = "#f6ead9"
ACTIVITIES = {
    "productive_s": ("new steps", "#2f6fb3"),
    "repeated_s": ("repeated steps", "#d9822b"),
    "stalled_s": ("taking checkpoints", KILL),
    "transferring_s": ("waiting for bytes", "#9aa3ad"),
    "idle_s": ("starting, ending", "#d5d9de"),
}
DPI = 160


def draw_loss(points: Sequence[Point], undisturbed: Sequence[Point], cut: Interruption, steps: int, path: Path) -> None:
    """Loss against step, by attempt, over the undisturbed run; the kill marked, the repeated steps shaded."""
    figure, axes = _figure(9.0, 5.5)
    repeated = max(cut.killed_at_step - cut.resumed_from_step, 0)
    axes.axvspan(cut.resumed_from_step, cut.killed_at_step, color=BAND, linewidth=0, zorder=0)
    smooth = sorted(undisturbed, key=lambda point: point.step)
    axes.plot(
        [point.step for point in smooth], [point.loss for point in smooth],
        color=UNDISTURBED, linewidth=5, solid_capstyle="round", label="the same job, undisturbed", zorder=1,
    )  # fmt: skip
    for epoch, (colour, label) in enumerate(
        zip(ATTEMPTS, ("attempt 1, killed", "attempt 2, on another machine"), strict=True), start=1
    ):
        own = [point for point in points if point.epoch == epoch]
        axes.plot(
            [point.step for point in own], [point.loss for point in own],
            color=colour, linewidth=1.3, marker="o", markersize=4.5, label=label, zorder=2 + epoch,
        )  # fmt: skip
    axes.axvline(cut.killed_at_step, color=KILL, linewidth=1.4, zorder=2)
    axes.set_yscale("log")
    axes.set_xlim(0, steps * 1.01)
    axes.set_ylim(top=axes.get_ylim()[1] * 1.6)
    axes.set_xlabel("training step", color=INK)
    axes.set_ylabel("cross-entropy loss of the batch (nats, log scale)", color=INK)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    for step, offset, side, colour, text in (
        (cut.killed_at_step, 8, "left", KILL,
         f"SIGKILL at step {cut.killed_at_step},\nnext step {cut.first_new_step_s:.0f} s later"),
        (cut.resumed_from_step, -8, "right", ATTEMPTS[1],
         f"resumed from {cut.resumed_from_step},\n{repeated} steps repeated"),
    ):  # fmt: skip
        axes.annotate(
            text, (step, 1), xycoords=axes.get_xaxis_transform(), xytext=(offset, -4), textcoords="offset points",
            color=colour, va="top", ha=side, fontsize=10,
        )  # fmt: skip
    axes.legend(loc="upper right", frameon=False, labelcolor=INK, fontsize=10, borderaxespad=0.2)
    explanation = "Each dot is the loss of one batch."
    equal, common = equal_losses(points, undisturbed)
    if common:
        where = f"all {common}" if equal == common else f"only {equal} of {common}"
        explanation += f" At {where} steps that both runs reported, the losses are exactly equal."
    title(axes, "Killed, resumed on another machine, and back on the same curve", explanation)
    figure.savefig(path)


def draw_time(saving: Saving, path: Path) -> None:
    """Where the time of each attempt went, a bar each."""
    figure, axes = _figure(9.0, 3.4)
    names = list(saving.attempts)
    begins = [0.0] * len(names)
    for field, (label, colour) in ACTIVITIES.items():
        widths = [getattr(one, field) for one in saving.attempts.values()]
        axes.barh(names, widths, left=begins, height=0.55, color=colour, label=label)
        begins = [begin + width for begin, width in zip(begins, widths, strict=True)]
    for name, end, one in zip(names, begins, saving.attempts.values(), strict=True):
        share = f"{100 * share_of(one):.0f} %"
        axes.annotate(share, (end, name), xytext=(5, 0), textcoords="offset points", va="center", color=INK)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlim(0, max(begins, default=1.0) * 1.08)
    axes.set_xlabel("seconds, as the worker last reported them", color=INK)
    axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.22), ncols=len(ACTIVITIES), frameon=False, labelcolor=INK)
    title(axes, "Where the time went", f"Behind each bar: goodput, the share of new steps. {saving.checkpoints_text}")
    figure.savefig(path)


def draw_predictions(readings: Readings, path: Path, *, columns: int = 12, rows: int = 6) -> None:
    """A grid of held-out digits with what the model read; the misread ones first and framed."""
    shown = choose(readings, columns * rows)
    figure = sheet(columns * 0.82, rows * 1.04 + 0.95)
    grid = figure.subplots(rows, columns, squeeze=False, gridspec_kw={"wspace": 0.25, "hspace": 0.42})
    figure.subplots_adjust(left=0.03, right=0.97, bottom=0.04, top=1 - 0.95 / figure.get_figheight())
    wrong = set(readings.wrong.tolist())
    for axes in grid.flat:
        axes.set_axis_off()
    for axes, index in zip(grid.flat, shown, strict=False):
        _digit(axes, readings, index, misread=index in wrong)
    whole = len(readings.predicted)
    figure.text(
        0.03, 0.965, f"{whole - len(wrong)} of {whole} digits it has never seen are read correctly "
        f"({100 * readings.accuracy:.1f} %)", color=INK, fontsize=14, fontweight="bold", va="top",
    )  # fmt: skip
    figure.text(0.03, 0.965 - 0.30 / figure.get_figheight(), _legend(len(wrong), len(shown)), color=FAINT, va="top")
    figure.savefig(path)


def choose(readings: Readings, places: int) -> list[int]:
    """Which held-out digits to show: the misread ones (up to half of the places), then others, evenly spread."""
    wrong: list[int] = readings.wrong.tolist()[: places // 2]
    misread = set(readings.wrong.tolist())
    right = [index for index in range(len(readings.predicted)) if index not in misread]
    free = min(places - len(wrong), len(right))
    spread = np.linspace(0, len(right) - 1, free).round().astype(int).tolist() if free else []
    return [*wrong, *(right[place] for place in spread)]


def _legend(wrong: int, shown: int) -> str:
    if not wrong:
        return f"{shown} of them; below each what the model read"
    first = "the misread one comes first" if wrong == 1 else f"the {wrong} misread ones come first"
    return f"{shown} of them; below each what the model read; {first}"


def _digit(axes: Axes, readings: Readings, index: int, *, misread: bool) -> None:
    axes.set_axis_on()
    axes.imshow(readings.digits.images[index], cmap="gray_r", vmin=0, vmax=255, interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_color(KILL if misread else "#dfe3e8")
        spine.set_linewidth(2.0 if misread else 0.8)
    label = f"{readings.predicted[index]}"
    if misread:
        label += f", is {readings.digits.labels[index]}"
    axes.set_xlabel(label, color=KILL if misread else INK, fontsize=10, labelpad=3)


def sheet(width_in: float, height_in: float, layout: LayoutEngine | None = None) -> Figure:
    """An empty picture, of a size in inches."""
    figure = Figure(figsize=(width_in, height_in), dpi=DPI, facecolor="white", layout=layout)
    FigureCanvasAgg(figure)
    return figure


def _figure(width_in: float, height_in: float) -> tuple[Figure, Axes]:
    figure = sheet(width_in, height_in, ConstrainedLayoutEngine())
    axes = figure.subplots()
    style(axes)
    return figure, axes


def style(axes: Axes) -> None:
    """As little ink as it takes."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)
    axes.tick_params(colors=INK, which="both")
    axes.grid(visible=True, axis="y", color="#eceff2", linewidth=0.8)
    axes.set_axisbelow(True)


def title(axes: Axes, text: str, explanation: str) -> None:
    """What the picture shows, and a line that explains it."""
    axes.set_title(text, loc="left", color=INK, fontsize=14, fontweight="bold", pad=30)
    axes.annotate(
        explanation, (0, 1), xycoords="axes fraction", xytext=(0, 14), textcoords="offset points",
        color=FAINT, fontsize=10,
    )  # fmt: skip
