"""Train on many processes for minutes while one after another is killed, stopped, cut off and slowed down."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable

from bench.elastic.failures import cluster, exactness
from bench.elastic.nodes.node_cluster import BenchNode, NodeCluster
from bench.elastic.nodes.node_program import NodePlan
from bench.harness.figures import Figure

SEED = 20_261_128
PLAN = NodePlan(inner_steps=20, step_s=0.1, overlap=True, settings={"batch_size": 2, "context": 32})
"""An inner step takes 0.1 s as on an accelerator, whatever the load, unless a core is missing."""
FAULT_EVERY_S = 30.0
AWAY_S = 10.0
"""Duration of a stop, a cut and a slow link."""
SLOW_BYTES_PER_S = 250_000.0
LEAST_SHARE = 0.97
FAULTS = ("kill", "stop", "cut", "slow")

Undo = tuple[float, BenchNode, Callable[[], None]]
"""Instant, node and call of the end of a fault."""


def soak(minutes: float, nodes: int, fault_every_s: float = FAULT_EVERY_S) -> list[Figure]:
    """Train undisturbed, then for as long with a fault every 30 s; compare the steps that count for each second."""
    length_s = minutes * 60
    usual, _, _ = _train(nodes, length_s, None, fault_every_s)
    chance = random.Random(SEED)
    disturbed, checks, told = _train(nodes, length_s, chance, fault_every_s)
    return [
        Figure(
            name=f"{nodes} processes, {minutes:g} min, a fault every {fault_every_s:g} s: time for a step that counts",
            unit="s",
            rounds=[disturbed],
            baseline_name="undisturbed",
            baseline=[usual],
            at_most=1 / LEAST_SHARE,
            details={"faults": told, "throughput": usual / disturbed},
        ),
        *checks,
    ]


def _train(
    count: int, length_s: float, chance: random.Random | None, fault_every_s: float
) -> tuple[float, list[Figure], list[str]]:
    """Return seconds for each step that counts, the checks, and the faults.

    The time ends when all faults have: it contains all that they cost, and all steps that cut off nodes kept.
    """
    told: list[str] = []
    with cluster(PLAN, count // 2, count) as job:
        nodes = job.form(count)
        job.wait_for_members(nodes)
        began = time.monotonic()
        due: list[Undo] = []
        next_fault = began + fault_every_s / 2
        while (now := time.monotonic()) < began + length_s:
            for one in [one for one in due if one[0] <= now]:
                one[2]()
                due.remove(one)
            if chance is not None and now >= next_fault:
                next_fault += fault_every_s
                told.append(_disturb(job, nodes, chance, due, len(told)))
            time.sleep(0.05)
        for _, _, undo in due:
            undo()
        job.wait_for_members(nodes, rounds=2)
        ended = time.monotonic()
        ledger = job.finish(nodes)
    name = "soak" if chance is not None else "undisturbed"
    return ledger.seconds_per_token(began, ended), exactness(name, ledger), told


def _disturb(job: NodeCluster, nodes: list[BenchNode], chance: random.Random, due: list[Undo], count: int) -> str:
    """Cause a fault at a node that no other fault affects; note when it ends."""
    place = chance.choice([place for place, one in enumerate(nodes) if one not in [busy for _, busy, _ in due]])
    node, fault = nodes[place], FAULTS[count % len(FAULTS)]
    ends_at = time.monotonic() + AWAY_S
    if fault == "kill":
        node.send(signal.SIGKILL)
        nodes[place] = job.replace(node)
    elif fault == "stop":
        node.send(signal.SIGSTOP)
        due.append((ends_at, node, lambda: node.send(signal.SIGCONT)))
    elif fault == "slow":
        node.limit(SLOW_BYTES_PER_S)
        due.append((ends_at, node, lambda: node.limit(None)))
    else:
        _cut(job, node, is_cut=True)
        due.append((ends_at, node, lambda: _cut(job, node, is_cut=False)))
    return f"{fault} {node.folder.name}"


def _cut(job: NodeCluster, node: BenchNode, *, is_cut: bool) -> None:
    """Cut a node off from its peers and from the control plane."""
    node.limit(0 if is_cut else None)
    with job.lock:
        (job.world.cut_off.add if is_cut else job.world.cut_off.discard)(f"{node.seat}.0.0")
