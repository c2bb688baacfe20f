"""Draw the demos' charts in one style."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from demo.jobs import TrainedStep

INK = "#22252b"
FAINT = "#6f7680"
PALE = "#c9ced6"
BLUE = "#2f6fb3"
ORANGE = "#d9822b"
RED = "#c0392b"
GREEN = "#2e8b57"
VIOLET = "#7b4fa3"
SAND = "#f6ead9"
"""Background of a span."""
DPI = 160


def sheet(width_in: float, height_in: float, *, h_pad: float | None = None) -> Figure:
    """Make an empty figure, sizes in inches. `h_pad`: let matplotlib lay out the axes, so far apart."""
    layout = None if h_pad is None else ConstrainedLayoutEngine(h_pad=h_pad)
    figure = Figure(figsize=(width_in, height_in), dpi=DPI, facecolor="white", layout=layout)
    FigureCanvasAgg(figure)
    return figure


def panels(
    width_in: float, height_in: float, heights: Sequence[float] = (1,), *, shared_x: bool = False
) -> tuple[Figure, list[Axes]]:
    """Make a figure of styled axes, one below the other, with these relative heights."""
    figure = sheet(width_in, height_in, h_pad=0.15 if len(heights) > 1 else 0.04)
    grid = figure.subplots(len(heights), sharex=shared_x, squeeze=False, gridspec_kw={"height_ratios": heights})
    every = [style(axes) for axes in grid.flat]
    return figure, every


def style(axes: Axes) -> Axes:
    """Reduce the axes to two faint spines and a horizontal grid."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)
    axes.tick_params(colors=INK, which="both")
    axes.grid(visible=True, axis="y", color="#eceff2", linewidth=0.8)
    axes.set_axisbelow(True)
    return axes


def title(axes: Axes, text: str, explanation: str) -> None:
    """Write a title and a line that explains the chart."""
    axes.set_title(text, loc="left", color=INK, fontsize=14, fontweight="bold", pad=30)
    axes.annotate(
        explanation, (0, 1), xycoords="axes fraction", xytext=(0, 14), textcoords="offset points",
        color=FAINT, fontsize=10,
    )  # fmt: skip


def legend(axes: Axes, **more: Any) -> None:
    """Add the legend, at the upper right unless `more` has another `loc`."""
    fixed: dict[str, Any] = {"loc": "upper right", "borderaxespad": 0.2, "edgecolor": "none", "framealpha": 0.9}
    axes.legend(labelcolor=INK, fontsize=10, **{**fixed, **more})


def curve(axes: Axes, xs: Iterable[float], ys: Iterable[float], colour: str, **more: Any) -> None:
    """Draw a line; `more` are matplotlib's properties."""
    axes.plot(list(xs), list(ys), **{"color": colour, "linewidth": 1.4, "zorder": 3, **more})


def losses(axes: Axes, steps: Iterable[TrainedStep], colour: str, label: str, **more: Any) -> None:
    """Draw the finite losses of `steps`, a dot each."""
    shown = [one for one in steps if math.isfinite(one.loss)]
    dots: dict[str, Any] = {"linewidth": 1.2, "marker": "o", "markersize": 2.5}
    curve(axes, [one.step for one in shown], [one.loss for one in shown], colour, label=label, **{**dots, **more})


def losses_behind(axes: Axes, steps: Iterable[TrainedStep], label: str) -> None:
    """Draw the losses of a job for comparison: broad and pale, behind the others."""
    losses(axes, steps, PALE, label, linewidth=5, marker=None, solid_capstyle="round", zorder=1)


def loss_scale(axes: Axes, last_step: float, *, room: float) -> None:
    """Scale drawn losses by logarithm, with room for text above: the upper limit times `room`."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(numticks=7))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.set_ylabel("loss of the batch (nats, log scale)", color=INK)
    axes.set_xlabel("training step", color=INK)
    axes.set_xlim(0, last_step * 1.01)
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * room)


def loss_at(steps: Iterable[TrainedStep], step: int) -> float:
    """Return the loss of the step, or of the newest one before that can be drawn."""
    return next((one.loss for one in reversed(list(steps)) if math.isfinite(one.loss) and one.step <= step), 1.0)


def dot(axes: Axes, x: float, y: float, colour: str) -> None:
    """Mark a point."""
    curve(axes, [x], [y], colour, marker="o", markersize=8, markeredgecolor="white", zorder=6)


def note(axes: Axes, x: float, height: float, text: str, colour: str, *, before: bool = False) -> None:
    """Write text behind (or before) `x`; `height` is 0 at the bottom, 1 at the top."""
    axes.annotate(
        text, (x, height), xycoords=axes.get_xaxis_transform(), xytext=(-8 if before else 8, 0),
        textcoords="offset points", color=colour, va="top", ha="right" if before else "left", fontsize=10,
    )  # fmt: skip
