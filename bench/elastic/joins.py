"""Let a node join a running training; measure the wait of the others, and the time until the joiner's steps count."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

from bench.elastic.failures import cluster, exactness
from bench.elastic.nodes.node_cluster import BenchNode, NodeCluster
from bench.elastic.nodes.node_program import NodePlan
from bench.elastic.places import linked
from bench.harness.figures import Figure

MBIT_S = 500
LINK_USE = 0.8
PERIOD_S = 3.0
"""Inner steps between two rounds."""
STEPS = 30
SMALLER = 10


def stalls(rounds: int, values: int) -> list[Figure]:
    """Let a third process join two, with a model of `values` parameters and with a tenth of them."""
    found: dict[int, list[float]] = {}
    figures = []
    sizes = (values // SMALLER, values)
    for size in sizes:
        with cluster(_plan(size), 2, 3) as job:
            nodes = job.form(2)
            found[size] = [_stall(job, nodes) for _ in range(-(-rounds // 3))]
            figures += exactness(f"join, {size * 4 / 1e6:.0f} MB", job.finish(nodes))
    for size in sizes:
        title = f"longest wait of 2 running nodes while a third joins, beyond a usual round, {size * 4 / 1e6:.0f} MB"
        figures.insert(0, Figure(name=title, unit="s", rounds=found[size], at_most=0.5))
    return figures


def productive(rounds: int, values: int) -> list[Figure]:
    """Let a node join over a link of 500 Mbit/s, against the time of its state's bytes and a round."""
    took, bounds = [], []
    try:
        with (
            linked(3, MBIT_S) as places,
            tempfile.TemporaryDirectory(prefix="baton-bench-") as folder,
            NodeCluster(Path(folder, "c"), _plan(values), 2, 3, places) as job,
        ):
            nodes = job.form(2)
            for _ in range(-(-rounds // 3)):
                joiner = job.start(2)
                job.wait_for_members([*nodes, joiner])
                began = next(joiner.found("born"))["at"]
                job.wait(lambda one=joiner: _first_counted(one), "a round that counts the joiner's steps")
                took.append(_first_counted(joiner) - began)
                commits = [one["at"] for one in nodes[0].found("commit")]
                period = median(after - before for before, after in pairwise(commits))
                bounds.append(8 * values * 8 / (LINK_USE * MBIT_S * 1e6) + period)
                joiner.process.kill()
                job.end_attempt(joiner)
                job.wait_for_members(nodes)
            ledger = job.finish(nodes)
    except PermissionError as error:
        print(f"no links of limited rate: {error}", file=sys.stderr)
        return []
    return [
        Figure(
            name=f"start until a round counts the joiner's steps, state of {values * 8 / 1e6:.0f} MB, {MBIT_S} Mbit/s",
            unit="s",
            rounds=took,
            baseline_name="state / (0.8 x link) + 1 round",
            baseline=bounds,
            at_most=1.0,
        ),
        *exactness("join by a link", ledger),
    ]


def _plan(values: int) -> NodePlan:
    return NodePlan(values=values, inner_steps=STEPS, step_s=PERIOD_S / STEPS)


def _stall(job: NodeCluster, nodes: Sequence[BenchNode]) -> float:
    """Return the longest wait of the running nodes from the joiner's start to its second round, less the usual wait."""
    joiner = job.start(2)
    job.wait_for_members([*nodes, joiner], rounds=1)
    joined_at = job.wait(lambda: next((one["at"] for one in joiner.found("commit")), 0.0), "the joiner's commit")
    job.wait_for_members([*nodes, joiner], rounds=3)
    began = next(joiner.found("born"))["at"]
    longest = max(one["waited_s"] for node in nodes for one in node.found("step", began) if one["at"] <= joined_at)
    usual = median(one["waited_s"] for node in nodes for one in node.found("step", joined_at) if one["waited_s"] > 0.02)
    joiner.process.kill()
    job.end_attempt(joiner)
    job.wait_for_members(nodes)
    return max(0.0, longest - usual)


def _first_counted(joiner: BenchNode) -> float:
    """Return the instant of the first commit that counts the joiner's delta; 0 without one."""
    for one in joiner.found("commit"):
        if one["tries"][str(one["epoch"])].get(joiner.name):
            return float(one["at"])
    return 0.0
