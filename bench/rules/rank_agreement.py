"""Cost of votes and rules in a step of a training of two processes over gloo."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
import torch.distributed as dist

from bench.harness.figures import Figure
from bench.rules.step_time import CONDITIONS, document
from gpu_client.controller.steering import Steering
from gpu_client.training.distributed.process_group import Ranks
from gpu_client.training.session.loop_requests import LoopRequests

RANKS = 2
STEPS = 400
"""Steps of each kind in a round; the kinds take turns."""
WORK = 160
"""Products of small matrices in each step: some milliseconds, in which the votes of the previous step arrive."""
TARGET_US = 200.0
"""A thousandth of a step of 0.2 s, which is short where several GPUs train one model."""
VALUES = {"loss": 1.0, "grad_norm": 1.0, "lr": 1e-4, "step.time": 0.1, "data.wait": 0.01}


def measure(*, rounds: int) -> list[Figure]:
    """Measure the median of report and vote in a step of the first process, rules included."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", __name__, str(port), str(rounds)]
    processes = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(RANKS)},
        )
        for rank in range(RANKS)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    for process in processes:
        if process.returncode:
            raise RuntimeError(f"a process of the vote ended with {process.returncode}")
    ruled, alone, waiting, work = json.loads(outputs[0])
    details = {"rules": len(CONDITIONS), "steps": STEPS, "work_us": round(median(work))}
    return [
        Figure(
            name=f"a vote of {RANKS} processes that is heard one step later",
            unit="us",
            rounds=alone,
            baseline_name="one that every step waits for",
            baseline=waiting,
            at_most=1.0,
            details=details,
        ),
        Figure(
            name="what 20 rules add to that step",
            unit="us",
            rounds=[with_rules - without for with_rules, without in zip(ruled, alone, strict=True)],
            at_most=TARGET_US,
            details=details,
        ),
    ]


def main(port: str, rounds: str) -> None:
    """Run one process; the first one prints the medians of each round in microseconds."""
    torch.set_num_threads(1)
    logging.getLogger("baton").setLevel(logging.ERROR)  # rules that fire say so
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=RANKS)
    ranks = Ranks(os.environ)
    pairs: list[tuple[Steering, LoopRequests]] = []
    for control in ({"rules": {"revision": 1, "text": document(mode="dry_run")}}, {}):
        directives = LoopRequests(ranks)
        steering = Steering(directives, ranks)
        directives.attach(steering)
        steering.begin(control, None)
        pairs.append((steering, directives))
    matrix = torch.randn(96, 96)

    def work() -> None:
        for _ in range(WORK):
            matrix @ matrix

    def with_votes(steering: Steering, directives: LoopRequests, step: int) -> None:
        steering.report_step(step, VALUES)
        directives.due(step, on_interval=False)

    kinds: list[Callable[[int], object]] = [partial(with_votes, *pair) for pair in pairs]
    kinds += [lambda step: ranks.agree(0, 0, 0, 0, 0), lambda step: work()]
    found: list[list[float]] = [[] for _ in kinds]
    step = 0
    for _ in range(int(rounds)):
        took: list[list[float]] = [[] for _ in kinds]
        for _ in range(STEPS):
            step += 1
            for kind, times in zip(kinds, took, strict=True):
                ranks.agree(0)  # as gradients do: all begin a step together
                work()
                began = time.perf_counter()
                kind(step)
                times.append(time.perf_counter() - began)
        for medians, times in zip(found, took, strict=True):
            medians.append(1e6 * median(times))
    if ranks.first:
        sys.stdout.write(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
