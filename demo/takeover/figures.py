"""Draw the three charts of the takeover: losses, predictions, time."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from demo import charts
from demo.charts import BLUE, FAINT, INK, ORANGE, RED, SAND
from demo.digits import Readings
from demo.takeover.results import TakeoverResults, equal_losses, share_of

ACTIVITIES = {
    "productive_s": ("new steps", BLUE),
    "repeated_s": ("repeated steps", ORANGE),
    "stalled_s": ("taking checkpoints", RED),
    "transferring_s": ("waiting for bytes", "#9aa3ad"),
    "idle_s": ("starting, ending", "#d5d9de"),
}


def draw(results: TakeoverResults) -> dict[str, Figure]:
    """Draw all three charts, by file name."""
    return {"loss.png": loss(results), "predictions.png": predictions(results.readings), "time.png": time(results)}


def loss(results: TakeoverResults) -> Figure:
    """Draw loss against step, by attempt, over the undisturbed run; mark the kill, shade the repeated steps."""
    figure, (axes,) = charts.panels(9.0, 5.5)
    cut, interrupted, undisturbed = results.interruption, results.interrupted, results.undisturbed
    axes.axvspan(cut.resumed_from_step, cut.killed_at_step, color=SAND, linewidth=0, zorder=0)
    charts.losses_behind(axes, undisturbed.steps, "the same job, undisturbed")
    charts.losses(axes, interrupted.of_attempt(1), BLUE, "attempt 1, killed")
    charts.losses(axes, interrupted.of_attempt(2), ORANGE, "attempt 2, on another machine", zorder=4)
    axes.axvline(cut.killed_at_step, color=RED, linewidth=1.4, zorder=2)
    charts.loss_scale(axes, results.steps_wanted, room=1.6)
    killed = f"SIGKILL at step {cut.killed_at_step},\nnext step {cut.first_new_step_s:.0f} s later"
    resumed = f"resumed from {cut.resumed_from_step},\n{cut.steps_repeated} steps repeated"
    charts.note(axes, cut.killed_at_step, 0.99, killed, RED)
    charts.note(axes, cut.resumed_from_step, 0.99, resumed, ORANGE, before=True)
    charts.legend(axes)
    same, common = equal_losses(interrupted.steps, undisturbed.steps)
    where = f"all {common}" if same == common else f"only {same} of {common}"
    explanation = (
        f"Each dot is the loss of one batch. At {where} steps that both runs reported, the losses are exactly equal."
    )
    charts.title(axes, "Killed, resumed on another machine, and back on the same curve", explanation)
    return figure


def time(results: TakeoverResults) -> Figure:
    """Draw a bar for each attempt: where its time went."""
    figure, (axes,) = charts.panels(9.0, 3.4)
    goodputs = results.goodputs
    names = list(goodputs)
    begins = [0.0] * len(names)
    for field, (label, colour) in ACTIVITIES.items():
        widths = [getattr(one, field) for one in goodputs.values()]
        axes.barh(names, widths, left=begins, height=0.55, color=colour, label=label)
        begins = [begin + width for begin, width in zip(begins, widths, strict=True)]
    for name, end, one in zip(names, begins, goodputs.values(), strict=True):
        axes.annotate(
            f"{100 * share_of(one):.0f} %",
            (end, name),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            color=INK,
        )
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlim(0, max(begins, default=1.0) * 1.08)
    axes.set_xlabel("seconds, as the worker last reported them", color=INK)
    charts.legend(axes, loc="upper center", bbox_to_anchor=(0.45, -0.22), ncols=len(ACTIVITIES), borderaxespad=0.5)
    checkpoints = f"{results.total.checkpoints_committed} checkpoints stopped the training for "
    explanation = (
        f"Behind each bar: goodput, the share of new steps. {checkpoints}{1000 * results.stall_s:.1f} ms each."
    )
    charts.title(axes, "Where the time went", explanation)
    return figure


def predictions(readings: Readings, *, columns: int = 12, rows: int = 6) -> Figure:
    """Draw a grid of held-out digits with the label that the model read; misread digits come first, framed."""
    shown = choose(readings, columns * rows)
    figure = charts.sheet(columns * 0.82, rows * 1.04 + 0.95)
    grid = figure.subplots(rows, columns, squeeze=False, gridspec_kw={"wspace": 0.25, "hspace": 0.42})
    figure.subplots_adjust(left=0.03, right=0.97, bottom=0.04, top=1 - 0.95 / figure.get_figheight())
    wrong, whole = set(readings.wrong.tolist()), len(readings.predicted)
    for axes in grid.flat:
        axes.set_axis_off()
    for axes, index in zip(grid.flat, shown, strict=False):
        _digit(axes, readings, index, misread=index in wrong)
    figure.text(
        0.03, 0.965, f"{whole - len(wrong)} of {whole} digits it has never seen are read correctly "
        f"({100 * readings.accuracy:.1f} %)", color=INK, fontsize=14, fontweight="bold", va="top",
    )  # fmt: skip
    first = {0: "", 1: "; the misread one comes first"}.get(len(wrong), f"; the {len(wrong)} misread ones come first")
    explanation = f"{len(shown)} of them; below each the label that the model read{first}"
    figure.text(0.03, 0.965 - 0.30 / figure.get_figheight(), explanation, color=FAINT, va="top")
    return figure


def choose(readings: Readings, places: int) -> list[int]:
    """Choose the digits to show: the misread ones (for up to half of the places), then others, evenly spread."""
    misread: list[int] = readings.wrong.tolist()
    wrong = misread[: places // 2]
    right = [index for index in range(len(readings.predicted)) if index not in misread]
    free = min(places - len(wrong), len(right))
    spread = np.linspace(0, len(right) - 1, free).round().astype(int).tolist() if free else []
    return [*wrong, *(right[place] for place in spread)]


def _digit(axes: Axes, readings: Readings, index: int, *, misread: bool) -> None:
    axes.set_axis_on()
    axes.imshow(readings.digits.images[index], cmap="gray_r", vmin=0, vmax=255, interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_color(RED if misread else "#dfe3e8")
        spine.set_linewidth(2.0 if misread else 0.8)
    label = f"{readings.predicted[index]}" + (f", is {readings.digits.labels[index]}" if misread else "")
    axes.set_xlabel(label, color=RED if misread else INK, fontsize=10, labelpad=3)
