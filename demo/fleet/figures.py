"""Draw the chart over time: the job's attempts, the states of each machine, and the money below."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from baton.contract.fleets.fleet import MachineState as State
from demo import charts
from demo.charts import BLUE, GREEN, INK, ORANGE, PALE, RED, VIOLET
from demo.fleet.results import FleetResults, quoted_usd_per_hour
from demo.fleet.timeline import cut

SILENT = "silent"
"""A machine whose host has vanished, until the fleet can prove the loss."""
STATES: dict[str, tuple[str, str]] = {
    State.REQUESTED: ("#d9c8e8", "asked for"),
    State.AMBIGUOUS: (VIOLET, "asked for, no answer"),
    State.BOOTING: ("#f3c592", "boots"),
    State.REGISTERED: ("#e0d9a0", "enrols"),
    State.READY: ("#a8d5ba", "ready"),
    State.BUSY: (GREEN, "holds the job"),
    SILENT: ("#f2c1bb", "vanished, loss not proved"),
    State.DRAINING: (ORANGE, "ordered to leave"),
    State.LOST: (RED, "lost"),
    State.TERMINATING: (PALE, "given back, absence not proved"),
}
"""Colour and meaning of each state in the chart."""
HEIGHT = 0.46
NOTE: dict[str, Any] = {"textcoords": "offset points", "fontsize": 10}


def draw(results: FleetResults) -> dict[str, Figure]:
    """Draw job and machines as lanes, and the money below, over the same minutes."""
    figure, (lanes, money) = charts.panels(11.0, 8.6, (1.2, 1), shared_x=True)
    _lanes(lanes, results)
    _money(money, results)
    killed = results.minutes(results.lost.at)
    for axes in (lanes, money):
        axes.axvline(killed, color=RED, linewidth=1.4, zorder=4)
    charts.note(lanes, killed, 0.985, "host vanishes", RED)
    money.set_xlim(0, results.minutes(results.history.ended_at) * 1.01)
    money.set_xlabel("minutes by the fleets' clock, which runs 60 times as fast", color=INK)
    return {"fleet.png": figure}


def _lanes(axes: Axes, results: FleetResults) -> None:
    _job(axes, results)
    shown: set[str] = set()
    labels = ["job"]
    for lane, machine in enumerate(results.machines, start=1):
        spans = results.history.machine_spans(machine.id)
        if machine.id == results.lost.machine:
            spans = cut(spans, results.lost.at, State.BUSY, SILENT)
        for span in spans:
            shown.add(span.state)
            begin, end = results.minutes(span.begin), results.minutes(span.end)
            _bar(axes, lane, begin, end, STATES[span.state][0])
            if span.state == State.AMBIGUOUS:
                place = (begin, lane - HEIGHT / 2)
                text = "answer to the create lost"
                axes.annotate(text, place, xytext=(2, 4), color=VIOLET, va="bottom", **NOTE)
        name = results.history.name(machine.id)
        price = quoted_usd_per_hour(machine)
        labels.append(f"{name}\n{results.hosts.get(machine.id, machine.provider)}, {price:.2f} USD/h")
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.55, -0.75)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="both", length=0)
    handles = [Patch(color=colour, label=text) for state, (colour, text) in STATES.items() if state in shown]
    charts.legend(axes, handles=handles, loc="upper left", bbox_to_anchor=(-0.01, -0.03), ncols=4)
    charts.title(
        axes,
        "A host vanished, the job went on, every machine was given back",
        f"Triangles: committed checkpoints. Red line: SIGKILL to all {results.lost.processes} processes of "
        f"{results.history.name(results.lost.machine)}.",
    )


def _job(axes: Axes, results: FleetResults) -> None:
    """Draw the attempts at the job, and its committed checkpoints above."""
    for span in results.history.attempt_spans():
        # The control plane notices the loss later, when the lease has run out.
        until = min(span.end, results.lost.at) if span.begin < results.lost.at else span.end
        begin, end = results.minutes(span.begin), results.minutes(until)
        _bar(axes, 0, begin, end, BLUE)
        axes.annotate(span.state, ((begin + end) / 2, 0), color="white", ha="center", va="center", fontsize=10)
        if span.begin > results.lost.at:
            text = f"resumes at\nstep {results.resumed_step}"
            axes.annotate(text, (begin, 0), xytext=(-6, 0), color=BLUE, ha="right", va="center", **NOTE)
    for at, step in results.history.checkpoints():
        minute, top = results.minutes(at), -HEIGHT / 2
        axes.plot([minute], [top - 0.05], marker="v", markersize=6, color=BLUE, zorder=5)
        axes.annotate(f"{step}", (minute, top), xytext=(0, 9), color=BLUE, ha="center", **NOTE)


def _bar(axes: Axes, lane: int, begin: float, end: float, colour: str) -> None:
    axes.barh(lane, end - begin, left=begin, height=HEIGHT, color=colour, linewidth=0)


def _money(axes: Axes, results: FleetResults) -> None:
    minutes = [results.minutes(one.at) for one in results.history.money]
    spent = [one.spent_usd for one in results.history.money]
    both = [one.spent_usd + one.reserved_usd for one in results.history.money]
    axes.fill_between(minutes, spent, both, step="post", color="#f7dfc3", linewidth=0, label="reserved")
    axes.fill_between(minutes, 0, spent, color="#b9dcc7", linewidth=0)
    charts.curve(axes, minutes, spent, GREEN, label="spent", linewidth=2.0)
    axes.axhline(results.budget_usd, color=RED, linewidth=1.4, linestyle=(0, (5, 3)))
    axes.annotate(
        f"budget {results.budget_usd:.2f} USD", (1, results.budget_usd), xycoords=("axes fraction", "data"),
        xytext=(-4, 4), color=RED, ha="right", va="bottom", **NOTE,
    )  # fmt: skip
    axes.set_ylim(0, results.budget_usd * 1.12)
    axes.set_ylabel("USD", color=INK)
    charts.legend(axes, loc="upper left", bbox_to_anchor=(0.005, 0.86))
    charts.title(
        axes,
        f"{results.spent_usd:.2f} of {results.budget_usd:.2f} USD spent",
        f"Spent and reserved money together stay within the budget: {results.most_committed_usd:.2f} USD at most. "
        f"The providers' own meters: {results.charged_usd:.2f} USD.",
    )
