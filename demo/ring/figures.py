"""Draw the chart over time: fill of the ring, reuse and age of its samples, loss of both trainings."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from demo import charts
from demo.charts import BLUE, FAINT, GREEN, INK, ORANGE, PALE, RED, SAND
from demo.ring.results import RingResults, Training, gaps


def draw(results: RingResults) -> dict[str, Figure]:
    """Draw fill, reuse, age and loss one below the other, over the same seconds."""
    figure, every = charts.panels(10.0, 14.0, (1.1, 0.8, 0.9, 1.4), shared_x=True)
    fill, reuse, age, loss = every
    zero = results.fed.began_at
    for axes in every:
        for begin, end in gaps(results.events):
            axes.axvspan(begin - zero, end - zero, color=SAND, linewidth=0, zorder=0)
        for event in results.events:
            if event.killed:
                axes.axvline(event.at - zero, color=RED, linewidth=1.0, alpha=0.7, zorder=1)
    _fill(fill, results, zero)
    _reuse(reuse, results, zero)
    _age(age, results, zero)
    _loss(loss, results)
    loss.set_xlabel("seconds since the training's first batch", color=INK)
    seconds = [state.at - zero for state in results.states]
    loss.set_xlim(min(seconds[0], 0.0), seconds[-1])
    return {"ring.png": figure}


def _fill(axes: Axes, results: RingResults, zero: float) -> None:
    seconds = [state.at - zero for state in results.states]
    axes.fill_between(seconds, [state.readable for state in results.states], color=BLUE, alpha=0.25, linewidth=0)
    charts.curve(axes, seconds, [state.readable for state in results.states], BLUE)
    axes.axhline(results.cap, color=FAINT, linewidth=1.0, linestyle=(0, (4, 3)))
    axes.set_ylim(0, results.cap * 1.6)
    axes.set_ylabel("readable samples", color=INK)
    beside = axes.twinx()
    charts.style(beside)
    beside.grid(visible=False)
    beside.spines["right"].set_visible(True)
    beside.spines["right"].set_color(FAINT)
    beside.step(seconds, [state.generators for state in results.states], where="post", color=GREEN, linewidth=1.6)
    most = max(state.generators for state in results.states)
    beside.set_ylim(0, most * 1.15)
    beside.set_yticks(range(most + 1))
    beside.set_ylabel("generators alive", color=GREEN)
    proof = results.proof
    charts.title(
        axes,
        f"{proof.kills} generators were killed; the training went on",
        f"Fill of the ring (cap {results.cap}). Red lines: SIGKILL. Shaded: no generator at all. "
        f"{proof.inserted} samples arrived, {proof.lost} were lost.",
    )


def _reuse(axes: Axes, results: RingResults, zero: float) -> None:
    shown = [state for state in results.states if state.inserted]
    reads = [state.read / state.inserted for state in shown]
    charts.curve(axes, [state.at - zero for state in shown], reads, ORANGE, linewidth=1.8)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("reads per sample", color=INK)
    charts.title(axes, "Reuse", f"Samples read so far per sample put so far; {results.reuse:.1f} in the end.")


def _age(axes: Axes, results: RingResults, zero: float) -> None:
    shown = [state for state in results.states if state.readable]
    seconds = [state.at - zero for state in shown]
    newest, oldest = [state.newest_s for state in shown], [state.oldest_s for state in shown]
    axes.fill_between(seconds, newest, oldest, color=BLUE, alpha=0.2, linewidth=0)
    charts.curve(axes, seconds, oldest, BLUE, label="oldest")
    charts.curve(axes, seconds, newest, GREEN, label="newest")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("age in seconds", color=INK)
    charts.legend(axes, loc="upper left")
    charts.title(axes, "Age", "Age of the readable samples. It grows while no generator is alive; reading goes on.")


def _loss(axes: Axes, results: RingResults) -> None:
    _curves(axes, results.coupled, PALE, FAINT, "without the ring")
    _curves(axes, results.fed, "#f3c592", ORANGE, "with the ring")
    # The loss of a first batch may be far higher than all later ones, therefore the held-out losses set the scale.
    axes.set_ylim(0, max(one.held_out_loss for run in (results.coupled, results.fed) for one in run.measured) * 1.6)
    axes.set_ylabel("cross-entropy loss (nats)", color=INK)
    charts.legend(axes)
    charts.title(axes, "Loss", "Dots: on held-out pictures. Thin lines: on each batch.")


def _curves(axes: Axes, training: Training, thin: str, bold: str, name: str) -> None:
    zero = training.began_at
    steps, measured = training.steps, training.measured
    charts.curve(axes, [one.at - zero for one in steps], [one.loss for one in steps], thin, linewidth=0.8, zorder=2)
    charts.curve(
        axes, [one.at - zero for one in measured], [one.held_out_loss for one in measured], bold,
        linewidth=2.0, marker="o", markersize=4.5, zorder=4,
        label=f"{name}: {len(steps)} steps, waits {100 * training.wait_share:.1f} % of its time, "
              f"names {100 * measured[-1].accuracy:.0f} % of the shapes",
    )  # fmt: skip
