"""The picture of the report: how full the ring was, how its samples were used, and what the training made of them."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from demo.pictures import ATTEMPTS, BAND, FAINT, GREEN, INK, KILL, UNDISTURBED, sheet, style, title
from demo.ring.summary import Result, Trained, nobody

SIZE_IN = (10.0, 14.0)


def figure_of(result: Result) -> Figure:
    """One below the other, over the same seconds: fill, reuse, age, loss."""
    figure = sheet(*SIZE_IN, ConstrainedLayoutEngine(h_pad=0.14))
    every = figure.subplots(4, 1, sharex=True, gridspec_kw={"height_ratios": [1.1, 0.8, 0.9, 1.4]})
    fill, reuse, age, loss = every
    zero = result.fed.began_at
    for axes in every:
        style(axes)
        for begin, end in nobody(result.events):
            axes.axvspan(begin - zero, end - zero, color=BAND, linewidth=0, zorder=0)
        for event in result.events:
            if event.killed:
                axes.axvline(event.at - zero, color=KILL, linewidth=1.0, alpha=0.7, zorder=1)
    _fill(fill, result, zero)
    _reuse(reuse, result, zero)
    _age(age, result, zero)
    _loss(loss, result)
    loss.set_xlabel("seconds since the training's first batch", color=INK)
    seconds = [look.at - zero for look in result.looks]
    loss.set_xlim(min(seconds[0], 0.0), seconds[-1])
    return figure


def _fill(axes: Axes, result: Result, zero: float) -> None:
    seconds = [look.at - zero for look in result.looks]
    axes.fill_between(seconds, [look.readable for look in result.looks], color=ATTEMPTS[0], alpha=0.25, linewidth=0)
    axes.plot(seconds, [look.readable for look in result.looks], color=ATTEMPTS[0], linewidth=1.6)
    axes.axhline(result.cap, color=FAINT, linewidth=1.0, linestyle=(0, (4, 3)))
    axes.set_ylim(0, result.cap * 1.6)
    axes.set_ylabel("samples that can be read", color=INK)
    beside = axes.twinx()
    style(beside)
    beside.grid(visible=False)
    beside.spines["right"].set_visible(True)
    beside.spines["right"].set_color(FAINT)
    beside.step(seconds, [look.generators for look in result.looks], where="post", color=GREEN, linewidth=1.6)
    most = max(look.generators for look in result.looks)
    beside.set_ylim(0, most * 1.15)
    beside.set_yticks(range(most + 1))
    beside.set_ylabel("generators alive", color=GREEN)
    proof = result.proof
    title(
        axes,
        f"{proof.kills} generators were killed; the training went on",
        f"Fill of the ring (cap {result.cap}). Red lines: SIGKILL. Shaded: no generator at all. "
        f"{proof.inserted} samples came, {proof.lost} were lost.",
    )


def _reuse(axes: Axes, result: Result, zero: float) -> None:
    shown = [look for look in result.looks if look.inserted]
    axes.plot(
        [look.at - zero for look in shown], [look.read / look.inserted for look in shown],
        color=ATTEMPTS[1], linewidth=1.8,
    )  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.set_ylabel("reads of a sample", color=INK)
    title(axes, "Reuse", f"Samples read so far per sample put so far; {result.reuse:.1f} in the end.")


def _age(axes: Axes, result: Result, zero: float) -> None:
    shown = [look for look in result.looks if look.readable]
    seconds = [look.at - zero for look in shown]
    newest, oldest = [look.newest_s for look in shown], [look.oldest_s for look in shown]
    axes.fill_between(seconds, newest, oldest, color=ATTEMPTS[0], alpha=0.2, linewidth=0)
    axes.plot(seconds, oldest, color=ATTEMPTS[0], linewidth=1.4, label="oldest")
    axes.plot(seconds, newest, color=GREEN, linewidth=1.4, label="newest")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("age in seconds", color=INK)
    axes.legend(loc="upper left", frameon=False, labelcolor=INK, fontsize=10, borderaxespad=0.2)
    title(axes, "Age", "Of the samples that can be read. While nobody generates, it grows; nothing else happens.")


def _loss(axes: Axes, result: Result) -> None:
    _curves(axes, result.coupled, UNDISTURBED, FAINT, "without the ring")
    _curves(axes, result.fed, "#f3c592", ATTEMPTS[1], "with the ring")
    # A first batch may be far off: what comes after it is to be seen.
    axes.set_ylim(0, max(one.held_out_loss for run in (result.coupled, result.fed) for one in run.measured) * 1.6)
    axes.set_ylabel("cross-entropy loss (nats)", color=INK)
    axes.legend(loc="upper right", edgecolor="none", framealpha=0.9, labelcolor=INK, fontsize=10, borderaxespad=0.2)
    title(axes, "Loss", "Dots: on pictures that no training has seen. Thin: on each batch.")


def _curves(axes: Axes, trained: Trained, thin: str, bold: str, name: str) -> None:
    zero = trained.began_at
    steps, measured = trained.steps, trained.measured
    axes.plot([one.at - zero for one in steps], [one.loss for one in steps], color=thin, linewidth=0.8, zorder=2)
    axes.plot(
        [one.at - zero for one in measured], [one.held_out_loss for one in measured],
        color=bold, linewidth=2.0, marker="o", markersize=4.5, zorder=4,
        label=f"{name}: {len(steps)} steps, waits {100 * trained.wait_share:.1f} % of its time, "
              f"names {100 * measured[-1].accuracy:.0f} % of the shapes",
    )  # fmt: skip
