"""Kill and stop real nodes at random points of all phases, and compare the committed states (`make chaos`).

Prints the seed, which repeats the choices of nodes, points and signals. The exit code is 1 after a violation.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence

from bench.elastic.failures import cluster
from bench.elastic.nodes.fault_points import POINTS
from bench.elastic.nodes.node_cluster import BenchNode, NodeCluster
from bench.elastic.nodes.node_program import NodePlan

NODES, LEAST = 5, 3
PLAN = NodePlan(values=2_500_000, inner_steps=8, step_s=0.05)
ARMED_S = 20.0
"""Time after which a fault whose point the node never crosses strikes at once: `fetch` is for joining nodes."""
STOPPED_S = (0.5, 8.0)
"""A short stop is a pause, a long one an exclusion."""
JOINING = ("fetch", "open")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run faults until the number or the time is reached; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.elastic.chaos", description=__doc__)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    chance, deadline = random.Random(seed), time.monotonic() + options.minutes * 60
    with cluster(PLAN, LEAST, NODES) as job:
        nodes = job.form(NODES)
        done = 0
        while done < options.faults and time.monotonic() < deadline:
            done += _strike(job, nodes, chance)
            print(f"{done} faults, epoch {job.view().epoch}, round {max(one.round for one in nodes)}", flush=True)
        ledger = job.finish(nodes)
        generations = len(job.world.formed_epochs)
    problems = ledger.problems()
    if generations > 1:
        problems.append(f"the world began anew {generations - 1} times")
    print(f"seed {seed}: {done} faults, {len(ledger.committed_at)} rounds, {len(ledger.counted)} deltas")
    for fault, times in sorted(Counter(ledger.faults()).items()):
        print(f"  {times:3} x {fault}")
    print(
        "\n".join(problems)
        or "Outer states are equal, each delta counts at most once, and surviving processes lost no step."
    )
    return 1 if problems else 0


def _strike(job: NodeCluster, nodes: list[BenchNode], chance: random.Random) -> int:
    """Cause one or two faults at the same time; return when all nodes are members again."""
    places = chance.sample(range(len(nodes)), chance.choice((1, 1, 2)))
    stopped: list[tuple[float, BenchNode]] = []
    count = 0
    for place in places:
        point = chance.choice(POINTS)
        number = chance.choice((signal.SIGKILL, signal.SIGSTOP))
        if point in JOINING:
            # Another process at the seat joins, and meets the fault on its way.
            nodes[place].send(signal.SIGKILL)
            nodes[place] = job.replace(nodes[place])
            count += 1
        nodes[place].arm(point, number, skip=0 if point in JOINING else chance.randrange(4))
    since = time.monotonic() - 1.0
    for place in places:
        node = nodes[place]
        fault = _wait_for_fault(node, since)
        count += 1
        if fault == signal.SIGSTOP:
            stopped.append((time.monotonic() + chance.choice(STOPPED_S), node))
        else:
            nodes[place] = job.replace(node)
    for until, node in stopped:
        time.sleep(max(0.0, until - time.monotonic()))
        node.send(signal.SIGCONT)
    job.wait_for_members(nodes)
    return count


def _wait_for_fault(node: BenchNode, since: float) -> int:
    """Return the signal that has struck."""
    deadline = time.monotonic() + ARMED_S
    while time.monotonic() < deadline:
        for one in node.found("fault", since):
            return int(one["signal"])
        time.sleep(0.02)
    (node.folder / "fault").unlink(missing_ok=True)
    node.send(signal.SIGKILL)
    return int(signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
