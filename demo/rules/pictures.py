"""The picture of the report: the loss of each job over its steps, and on it what rules and commands did."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from demo.pictures import ATTEMPTS, BAND, GREEN, INK, KILL, UNDISTURBED, sheet, style, title
from demo.rules.account import Trained
from demo.rules.summary import Diverged, Live, Result, Spiked

VIOLET = "#7b4fa3"
SIZE_IN = (10.0, 13.0)


def figure_of(result: Result) -> Figure:
    """One below the other: stopped, rolled back, steered."""
    figure = sheet(*SIZE_IN, ConstrainedLayoutEngine(h_pad=0.16))
    stopped, rolled_back, steered = figure.subplots(3, 1)
    for axes in (stopped, rolled_back, steered):
        style(axes)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(numticks=7))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        axes.set_ylabel("loss of the batch (nats, log scale)", color=INK)
    steered.set_xlabel("training step", color=INK)
    _stopped(stopped, result.diverged)
    _rolled_back(rolled_back, result.spiked)
    _steered(steered, result.live)
    return figure


def _stopped(axes: Axes, diverged: Diverged) -> None:
    steps, fired = diverged.account.steps, diverged.account.firings[-1]
    wanted = diverged.steps_wanted
    axes.axvspan(fired.step, wanted, color=BAND, linewidth=0, zorder=0)
    _curve(axes, steps, ATTEMPTS[0], "attempt 1, stopped")
    axes.set_xlim(0, wanted * 1.01)
    _leave_room(axes, above=3)
    _mark(axes, fired.step, _loss_at(steps, fired.step), KILL)
    axes.axvline(fired.step, color=KILL, linewidth=1.4, zorder=2)
    _say(axes, fired.step, 0.97, f"rule {fired.rule} fired at step {fired.step}: {fired.because}\njob failed at once",
         KILL)  # fmt: skip
    share = 100 * diverged.steps_saved / wanted
    axes.annotate(
        f"{diverged.steps_saved} steps, {share:.0f} % of the job, were not burned",
        ((fired.step + wanted) / 2, 0.4), xycoords=axes.get_xaxis_transform(),
        color=ATTEMPTS[1], ha="center", fontsize=12,
    )  # fmt: skip
    title(axes, "Diverging: stopped by a rule", f"Learning rate {steps[0].lr:g}. when: {diverged.condition}")


def _rolled_back(axes: Axes, spiked: Spiked) -> None:
    without, account = spiked.without, spiked.account
    axes.plot(
        [one.step for one in without.steps], [one.loss for one in without.steps],
        color=UNDISTURBED, linewidth=4, solid_capstyle="round", zorder=1,
        label=f"without rules: reads {100 * spiked.unruled_accuracy:.0f} % in the end",
    )  # fmt: skip
    epochs = account.epochs
    for place, epoch in enumerate(epochs):
        last = place == len(epochs) - 1
        label = f"goes on: reads {100 * spiked.accuracy:.0f} % in the end" if last else f"attempt {epoch}, rolled back"
        _curve(axes, account.of_attempt(epoch), ATTEMPTS[1] if last else ATTEMPTS[0], label)
    axes.set_xlim(0, spiked.steps_wanted * 1.01)
    _leave_room(axes, above=6)
    for number, (back, fired) in enumerate(zip(spiked.rollbacks, account.firings, strict=False)):
        step, to_step = back["step"], back["to_step"]
        before = account.of_attempt(epochs[number])
        top = _loss_at(before, step)
        _mark(axes, step, top, KILL)
        kept = [one for one in account.steps if one.step == max(to_step, 1)]
        foot = kept[0].loss
        axes.annotate(
            "", (to_step, foot), xytext=(step, top), zorder=5,
            arrowprops={"arrowstyle": "-|>", "color": KILL, "linewidth": 1.6, "connectionstyle": "arc3,rad=0.25"},
        )  # fmt: skip
        _mark(axes, to_step, foot, ATTEMPTS[1])
        text = f"rule {fired.rule} fired at step {step}\n{fired.because}"
        axes.annotate(text, (to_step, top), xytext=(-22, 2), textcoords="offset points", color=KILL, ha="right",
                      va="center", fontsize=10)  # fmt: skip
        text = (
            f"rolled back to the checkpoint of step {to_step}:\n{back['skip']} batches skipped, "
            f"learning rate × {back['lr_factor']:g}"
        )
        axes.annotate(text, (to_step, foot), xytext=(-22, 42 + 40 * number), textcoords="offset points",
                      color=ATTEMPTS[1], ha="right", va="bottom", fontsize=10)  # fmt: skip
    axes.legend(loc="upper right", frameon=False, labelcolor=INK, fontsize=10, borderaxespad=0.2)
    title(axes, "Spiking: rolled back by a rule", f"Damaged batches in the data. when: {spiked.condition}")


def _steered(axes: Axes, live: Live) -> None:
    steps, fired = live.account.steps, live.account.firings[-1]
    _curve(axes, steps, ATTEMPTS[0], "attempt 1")
    right = live.ended_at * 1.45
    axes.set_xlim(0, right)
    _leave_room(axes, above=1.4)
    for step, height, colour, text in (
        (live.saved_at, 0.98, GREEN, f"command save,\ncarried out at step {live.saved_at}"),
        (live.in_force_at, 0.80, VIOLET, f"revision {live.revision} of the rules\nin force from step "
                                         f"{live.in_force_at}"),
        (live.ended_at, 0.62, KILL, f"rule {fired.rule} fired at step {fired.step}:\n{fired.because}\n"
                                    f"job complete, {live.steps_wanted - live.ended_at} steps early"),
    ):  # fmt: skip
        loss, (low, high) = _loss_at(steps, step), axes.get_ylim()
        # Up to its text and no further, so that no line goes through the text of an earlier event.
        axes.plot([step, step], [loss, low * (high / low) ** height], color=colour, linewidth=1.4, zorder=2)
        _mark(axes, step, loss, colour)
        _say(axes, step, height, text, colour)
    title(axes, "Going well: steered while it runs",
          f"{live.steps_wanted} steps planned. when: {live.condition}. It reads {100 * live.accuracy:.0f} % of the "
          "held-out digits.")  # fmt: skip


def _curve(axes: Axes, steps: Sequence[Trained], colour: str, label: str) -> None:
    shown = [one for one in steps if math.isfinite(one.loss)]
    axes.plot(
        [one.step for one in shown], [one.loss for one in shown],
        color=colour, linewidth=1.2, marker="o", markersize=2.5, label=label, zorder=3,
    )  # fmt: skip


def _loss_at(steps: Sequence[Trained], step: int) -> float:
    """Of that step, or the newest before it that can be drawn."""
    shown = [one for one in steps if math.isfinite(one.loss) and one.step <= step]
    return shown[-1].loss if shown else 1.0


def _mark(axes: Axes, step: int, loss: float, colour: str) -> None:
    axes.plot([step], [loss], marker="o", markersize=8, color=colour, markeredgecolor="white", zorder=6)


def _say(axes: Axes, step: int, height: float, text: str, colour: str) -> None:
    """Beside the line at `step`; height: from 0 at the bottom to 1."""
    axes.annotate(
        text, (step, height), xycoords=axes.get_xaxis_transform(), xytext=(8, 0), textcoords="offset points",
        color=colour, va="top", ha="left", fontsize=10,
    )  # fmt: skip


def _leave_room(axes: Axes, *, above: float) -> None:
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * above)
