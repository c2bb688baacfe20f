"""Draw the chart: the loss of each job over its steps, and on it the effects of rules and commands."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from demo import charts
from demo.charts import BLUE, GREEN, ORANGE, RED, SAND, VIOLET
from demo.rules.results import Diverged, RulesResults, Spiked, Steered, firings


def draw(results: RulesResults) -> dict[str, Figure]:
    """Draw the three jobs, one below the other."""
    figure, (stopped, rolled_back, steered) = charts.panels(10.0, 13.0, (1, 1, 1))
    _stopped(stopped, results.diverged)
    _rolled_back(rolled_back, results.spiked)
    _steered(steered, results.steered)
    for axes in (stopped, rolled_back):
        axes.set_xlabel("")
    return {"rules.png": figure}


def _stopped(axes: Axes, diverged: Diverged) -> None:
    steps, fired, wanted = diverged.record.steps, firings(diverged.record)[-1], diverged.steps_wanted
    axes.axvspan(fired.step, wanted, color=SAND, linewidth=0, zorder=0)
    charts.losses(axes, steps, BLUE, "attempt 1, stopped")
    charts.loss_scale(axes, wanted, room=3)
    charts.dot(axes, fired.step, charts.loss_at(steps, fired.step), RED)
    axes.axvline(fired.step, color=RED, linewidth=1.4, zorder=2)
    text = f"rule {fired.rule} fired at step {fired.step}: {fired.because}\njob failed at once"
    charts.note(axes, fired.step, 0.97, text, RED)
    axes.annotate(
        f"{diverged.steps_saved} steps, {100 * diverged.share_saved:.0f} % of the job, were saved",
        ((fired.step + wanted) / 2, 0.4), xycoords=axes.get_xaxis_transform(), color=ORANGE, ha="center", fontsize=12,
    )  # fmt: skip
    explanation = f"Learning rate {steps[0].metrics['lr']:g}. when: {diverged.condition}"
    charts.title(axes, "Diverging: stopped by a rule", explanation)


def _rolled_back(axes: Axes, spiked: Spiked) -> None:
    record, epochs = spiked.record, spiked.record.epochs
    unruled = f"without rules: reads {100 * spiked.unruled_accuracy:.0f} % in the end"
    charts.losses_behind(axes, spiked.without.steps, unruled)
    for epoch in epochs[:-1]:
        charts.losses(axes, record.of_attempt(epoch), BLUE, f"attempt {epoch}, rolled back")
    goes_on = f"goes on: reads {100 * spiked.accuracy:.0f} % in the end"
    charts.losses(axes, record.of_attempt(epochs[-1]), ORANGE, goes_on)
    charts.loss_scale(axes, spiked.steps_wanted, room=6)
    for number, (back, fired) in enumerate(zip(spiked.rollbacks, firings(record), strict=False)):
        step, to_step = back["step"], back["to_step"]
        top = charts.loss_at(record.of_attempt(epochs[number]), step)
        foot = next(one.loss for one in record.steps if one.step == max(to_step, 1))
        axes.annotate(
            "", (to_step, foot), xytext=(step, top), zorder=5,
            arrowprops={"arrowstyle": "-|>", "color": RED, "linewidth": 1.6, "connectionstyle": "arc3,rad=0.25"},
        )  # fmt: skip
        rolled_back = (
            f"rolled back to the checkpoint of step {to_step}:\n{back['skip']} batches skipped, "
            f"learning rate × {back['lr_factor']:g}"
        )
        spike = f"rule {fired.rule} fired at step {step}\n{fired.because}"
        for x, y, offset, align, colour, text in (
            (step, top, 2, "center", RED, spike),
            (to_step, foot, 42 + 40 * number, "bottom", ORANGE, rolled_back),
        ):
            charts.dot(axes, x, y, colour)
            axes.annotate(
                text, (to_step, y), xytext=(-22, offset), textcoords="offset points", color=colour, ha="right",
                va=align, fontsize=10,
            )  # fmt: skip
    charts.legend(axes)
    charts.title(axes, "Spiking: rolled back by a rule", f"Damaged batches in the data. when: {spiked.condition}")


def _steered(axes: Axes, steered: Steered) -> None:
    steps, fired = steered.record.steps, firings(steered.record)[-1]
    charts.losses(axes, steps, BLUE, "attempt 1")
    charts.loss_scale(axes, steered.ended_at * 1.45, room=1.4)
    early = steered.steps_wanted - steered.ended_at
    ended = f"rule {fired.rule} fired at step {fired.step}:\n{fired.because}\njob complete, {early} steps early"
    revision = f"revision {steered.revision} of the rules\nin force from step {steered.in_force_at}"
    low, high = axes.get_ylim()
    for step, height, colour, text in (
        (steered.saved_at, 0.98, GREEN, f"command save,\ncarried out at step {steered.saved_at}"),
        (steered.in_force_at, 0.80, VIOLET, revision),
        (steered.ended_at, 0.62, RED, ended),
    ):
        loss = charts.loss_at(steps, step)
        # The line ends at its text, because it would otherwise cross the text of an earlier event.
        charts.curve(axes, [step, step], [loss, low * (high / low) ** height], colour, zorder=2)
        charts.dot(axes, step, loss, colour)
        charts.note(axes, step, height, text, colour)
    explanation = (
        f"{steered.steps_wanted} steps planned. when: {steered.condition}. The model reads "
        f"{100 * steered.accuracy:.0f} % of the held-out digits."
    )
    charts.title(axes, "Going well: steered while it runs", explanation)
