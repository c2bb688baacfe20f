"""Draw loss over time, with the membership of each machine beneath."""

from __future__ import annotations

from matplotlib.figure import Figure

from demo import charts
from demo.charts import BLUE, FAINT, GREEN, INK, ORANGE, RED, VIOLET
from demo.elastic.results import ElasticResults, TracedStep

COLORS = (BLUE, ORANGE, GREEN, VIOLET, "#4a90a4", "#9a7b4f")
SMOOTHED = 10
"""Inner steps over which a curve is averaged."""
GAP_S = 2.0
"""Pause between two steps from which a curve has a gap."""


def draw(results: ElasticResults) -> dict[str, Figure]:
    """Draw the picture, by file name."""
    figure, (losses, members) = charts.panels(10.0, 6.4, (3, 1.3), shared_x=True)
    for place, node in enumerate(results.nodes):
        color = COLORS[place % len(COLORS)]
        steps = sorted((one for one in results.steps if one.node == node), key=lambda one: one.at)
        label: str | None = f"node {node.rpartition('.')[0]}"
        for part in _split_at_gaps(steps):
            times = [one.at - results.began_at for one in part]
            smooth = [results.mean_loss(part[max(0, index - SMOOTHED) : index + 1]) for index in range(len(part))]
            charts.curve(losses, times, smooth, color, label=label, linewidth=1.3)
            label = None
        for begin, end in results.spans(node):
            members.barh(place, end - begin, left=begin, height=0.62, color=color)
    losses.set_ylabel("loss (nats per byte)", color=INK)
    members.set_yticks(range(len(results.nodes)), [f"node {one.rpartition('.')[0]}" for one in results.nodes])
    members.invert_yaxis()
    members.grid(visible=False)
    members.set_xlabel("seconds", color=INK)
    members.set_ylabel("member", color=INK)
    low, high = losses.get_ylim()
    losses.set_ylim(low, high + 0.16 * (high - low))
    for place, (at, name) in enumerate(results.marks):
        x = at - results.began_at
        color = RED if name.startswith(("SIGKILL", "SIGSTOP")) else FAINT
        for axes in (losses, members):
            axes.axvline(x, color=color, linewidth=1.1, zorder=2)
        charts.note(losses, x, 0.99 - 0.07 * (place % 2), name, color)
    losses.set_xlim(0, results.moments[-1].at - results.began_at)
    charts.legend(losses, loc="center right")
    explanation = (
        "Each curve is the loss of one node, each bar its membership. All that reach the end have the same weights."
    )
    charts.title(losses, "One training, while machines vanish, freeze and join", explanation)
    return {"elastic.png": figure}


def _split_at_gaps(steps: list[TracedStep]) -> list[list[TracedStep]]:
    """Split the steps of a node where the node took no step for a while."""
    parts: list[list[TracedStep]] = []
    for one in steps:
        if not parts or one.at - parts[-1][-1].at > GAP_S:
            parts.append([])
        parts[-1].append(one)
    return parts
