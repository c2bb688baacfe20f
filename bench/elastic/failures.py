"""Kill, stop and cut off nodes of real trainings; measure the waits and the losses of the survivors."""

from __future__ import annotations

import random
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from bench.elastic.nodes.node_cluster import BenchNode, NodeCluster
from bench.elastic.nodes.node_program import NodePlan
from bench.elastic.nodes.trace_ledger import TraceLedger
from bench.harness.figures import Figure
from gpu_client.elastic.parameters import BUCKET_VALUES

SEED = 20_261_128
INSIDE = ("encode", "accumulate", "decode")
OUTAGE_S = 60.0
"""At the default number of rounds."""
SMALL = NodePlan(values=200_000, inner_steps=10, step_s=0.02)
TEXT = NodePlan(inner_steps=20, step_s=0.03, loss_windows=64, settings={"batch_size": 4, "context": 32})
LOSS_ROUNDS = 10
"""Rounds before a third of the nodes is lost."""


@contextmanager
def cluster(plan: NodePlan, least: int, most: int) -> Iterator[NodeCluster]:
    """Open a cluster in a temporary directory."""
    with (
        tempfile.TemporaryDirectory(prefix="baton-bench-") as folder,
        NodeCluster(Path(folder, "c"), plan, least, most) as one,
    ):
        yield one


def kills(rounds: int, values: int) -> list[Figure]:
    """Kill one of three processes inside a reduce, again and again."""
    chance = random.Random(SEED)
    plan = NodePlan(values=values, inner_steps=5, step_s=0.05)
    took: list[float] = []
    with cluster(plan, 2, 3) as job:
        nodes = job.form(3)
        while len(took) < 2 * rounds + 2:
            place = chance.randrange(3)
            victim, survivors = nodes[place], [one for one in nodes if one is not nodes[place]]
            took.append(_fault(job, victim, survivors, signal.SIGKILL, chance))
            nodes[place] = job.replace(victim)
            job.wait_for_members(nodes)
        ledger = job.finish(nodes)
        usual = _boundary_waits(nodes)
    name = f"SIGKILL inside a reduce of {values * 4 / 1e6:.0f} MB, 3 processes, until the survivors have committed"
    return [
        Figure(
            name=name,
            unit="s",
            rounds=took,
            at_most=1.5,
            p95=True,
            details={"undisturbed_round_waits_s": usual, "points": ledger.faults()},
        ),
        *exactness("SIGKILL", ledger),
    ]


def stops(rounds: int, values: int) -> list[Figure]:
    """Stop one of three processes inside a reduce; continue it later."""
    chance = random.Random(SEED)
    plan = NodePlan(values=values // 10, inner_steps=5, step_s=0.05)
    took: list[float] = []
    returned: list[float] = []
    with cluster(plan, 2, 3) as job:
        nodes = job.form(3)
        for _ in range(-(-rounds // 3)):
            victim = chance.choice(nodes)
            survivors = [one for one in nodes if one is not victim]
            took.append(_fault(job, victim, survivors, signal.SIGSTOP, chance))
            job.wait_for_members(survivors)
            began = time.monotonic()
            victim.send(signal.SIGCONT)
            job.wait_for_members(nodes)
            returned.append(time.monotonic() - began)
        ledger = job.finish(nodes)
    return [
        Figure(
            name="SIGSTOP inside a reduce, 3 processes, until the survivors have committed",
            unit="s",
            rounds=took,
            at_most=8.0,
            counted=True,
        ),
        Figure(name="SIGCONT until the process is a member again and has committed a round", unit="s", rounds=returned),
        *exactness("SIGSTOP", ledger),
    ]


def outage(rounds: int, _: int) -> list[Figure]:
    """Let the control plane answer no call for a minute."""
    length_s = OUTAGE_S * min(1.0, rounds / 9)
    with cluster(SMALL, 3, 3) as job:
        nodes = job.form(3)
        before = time.monotonic()
        time.sleep(length_s / 3)
        with job.lock:
            job.world.is_down = True
        began = time.monotonic()
        time.sleep(length_s)
        ended = time.monotonic()
        with job.lock:
            job.world.is_down = False
        ledger = job.finish(nodes)
        commits = list(nodes[0].found("commit", began))
    during = [one for one in commits if one["at"] <= ended]
    missed = sum(3 - sum(bool(one) for one in commit["tries"][str(commit["epoch"])].values()) for commit in during)
    pace = [(ended - began) / len(during)]
    usual = [(began - before) / sum(before <= at < began for at in ledger.committed_at.values())]
    return [
        Figure(
            name=f"control plane away for {length_s:.0f} s: deltas that {len(during)} rounds miss",
            unit="",
            rounds=[missed],
            at_most=0,
            counted=True,
        ),
        Figure(
            name="control plane away: time from commit to commit",
            unit="s",
            rounds=pace,
            baseline_name="before",
            baseline=usual,
            at_most=1.1,
        ),
        *exactness("outage", ledger),
    ]


def thirds(_: int, __: int) -> list[Figure]:
    """Kill two of six processes at the same moment inside a reduce of a training of the example's transformer."""
    with cluster(TEXT, 4, 6) as job:
        nodes = job.form(6, rounds=LOSS_ROUNDS)
        lost, kept = nodes[4:], nodes[:4]
        for one in lost:
            one.arm("encode", signal.SIGKILL)
        job.wait(lambda: all(list(one.found("fault")) for one in lost), "both faults")
        killed_at = min(next(one.found("fault"))["at"] for one in lost)
        for one in lost:
            job.end_attempt(one)
        job.wait_for_members(kept, rounds=5)
        ledger = job.finish(kept)
        lines = list(nodes[0].found("loss"))
    before = [one["loss"] for one in lines if one["at"] < killed_at][-1]
    after = [one["loss"] for one in lines if one["at"] >= killed_at][:3]
    return [
        Figure(
            name="a third of 6 nodes killed at once: largest held-out loss of 3 rounds, less the one before",
            unit="nats",
            rounds=[max(after) - before],
            at_most=0.05,
            details={"losses": [one["loss"] for one in lines]},
        ),
        Figure(
            name="a third of 6 nodes killed at once: smallest held-out loss of these rounds, less the one before",
            unit="nats",
            rounds=[min(after) - before],
            at_most=0.0,
        ),
        *exactness("loss of a third", ledger),
    ]


def lone(rounds: int, _: int) -> list[Figure]:
    """Kill two of three processes; the third goes on alone, and two new ones join."""
    alone: list[float] = []
    again: list[float] = []
    with cluster(SMALL, 1, 3) as job:
        nodes = job.form(3)
        for turn in range(-(-rounds // 3)):
            place = turn % 3
            survivor, dead = nodes[place], [one for one in nodes if one is not nodes[place]]
            for one in dead:
                one.send(signal.SIGKILL)
            began = time.monotonic()
            for one in dead:
                job.end_attempt(one)
            job.wait_for_members([survivor])
            alone.append(time.monotonic() - began)
            began = time.monotonic()
            nodes = [one if one is survivor else job.start(one.seat) for one in nodes]
            job.wait_for_members(nodes)
            again.append(time.monotonic() - began)
        ledger = job.finish(nodes)
    return [
        Figure(name="2 of 3 killed at once, until the lone survivor has committed a round", unit="s", rounds=alone),
        Figure(name="2 of 3 killed at once, until 2 new processes have taken part in a round", unit="s", rounds=again),
        *exactness("lone survivor", ledger),
    ]


def snapshots(rounds: int, values: int) -> list[Figure]:
    """Copy the outer state for a checkpoint after each round."""
    plan = NodePlan(values=values, inner_steps=5, step_s=0.05, saves=True)
    with cluster(plan, 3, 3) as job:
        nodes = job.form(3, rounds=rounds + 2)
        ledger = job.finish(nodes)
        saved = [one for node in nodes for one in node.found("checkpoint")]
    by_round: dict[int, int] = {}
    for one in saved:
        by_round[one["round"]] = by_round.get(one["round"], 0) + one["bytes"]
    return [
        Figure(
            name=f"training waits for a checkpoint of the outer state ({values * 8 / 1e6:.0f} MB), per GB",
            unit="s",
            rounds=[one["seconds"] / one["bytes"] * 1e9 for one in saved],
            at_most=1.0,
        ),
        Figure(
            name="bytes that all 3 nodes save in a round, against one outer state",
            unit="MB",
            rounds=[size / 1e6 for size in by_round.values()],
            baseline_name="one state",
            baseline=[values * 8 / 1e6] * len(by_round),
            at_most=1.01,
            counted=True,
        ),
        *exactness("checkpoints", ledger),
    ]


def _fault(
    job: NodeCluster, victim: BenchNode, survivors: Sequence[BenchNode], number: signal.Signals, chance: random.Random
) -> float:
    """Let the victim send itself a signal inside a reduce; return the seconds until all survivors have committed."""
    buckets = -(-job.plan.values // BUCKET_VALUES)
    since = time.monotonic()
    victim.arm(chance.choice(INSIDE), number, skip=chance.randrange(2 * buckets))
    job.wait(lambda: list(victim.found("fault", since)), "the fault")
    at = next(victim.found("fault", since))["at"]
    job.wait(lambda: all(any(True for _ in one.found("commit", at)) for one in survivors), "the survivors' commit")
    return max(next(one.found("commit", at))["at"] for one in survivors) - at


def _boundary_waits(nodes: Sequence[BenchNode]) -> float:
    """Return the median of the times in which training waits for a round."""
    return median(one["waited_s"] for node in nodes for one in node.found("step") if one["waited_s"] > 0.02)


def exactness(event: str, ledger: TraceLedger) -> list[Figure]:
    """Return the figures that must be zero, whatever happens to other nodes."""
    counts = {
        "inner steps that surviving processes lost": sum(map(abs, ledger.lost_steps.values())),
        "rounds of which two nodes hold different bytes": len(ledger.divergent),
        "deltas that count twice": len(ledger.repeated) + len(ledger.unknown),
    }
    details = {"rounds": len(ledger.committed_at), "processes": len(ledger.lost_steps), "problems": ledger.problems()}
    return [
        Figure(name=f"{event}: {name}", unit="", rounds=[count], at_most=0, counted=True, details=details)
        for name, count in counts.items()
    ]
