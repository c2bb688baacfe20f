"""Count conflicts between 64 claimers of 1,000 jobs in several processes.

Each claimer is a thread with a claim window of its own, as Lambda gives each concurrent request an environment of its
own. A conflict is a transaction that DynamoDB canceled.
"""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from typing import Any

from bench.harness.figures import Figure
from bench.harness.plane import Plane

CLAIMERS, JOBS, PROCESSES = 64, 1000, 4
TARGET_CONFLICTS = 0.5
ROUND_TIMEOUT_S = 300.0
_SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Taken:
    """Claims of one process in one round, and their cost."""

    job_ids: list[str]
    conflicts: int
    transactions: int
    queries: int
    error: str = ""


def measure(endpoint_url: str, *, rounds: int, jobs: int = JOBS, claimers: int = CLAIMERS) -> list[Figure]:
    """Measure the race; raises RuntimeError unless every job of every round is claimed exactly once."""
    plane = Plane(endpoint_url, "race-")
    threads = claimers // PROCESSES
    start = _SPAWN.Barrier(PROCESSES + 1)
    claimed = _SPAWN.Value("i", 0)
    results: Queue[Taken] = _SPAWN.Queue()
    arguments = (endpoint_url, rounds, threads, jobs, start, claimed, results)
    processes = [_SPAWN.Process(target=_claimers, args=arguments, daemon=True) for _ in range(PROCESSES)]
    for process in processes:
        process.start()
    conflicts: list[float] = []
    seconds: list[float] = []
    requests: list[float] = []
    try:
        for number in range(rounds):
            plane.fill(jobs, queue=f"round-{number}")
            with claimed.get_lock():
                claimed.value = 0
            start.wait(ROUND_TIMEOUT_S)
            began = time.perf_counter()
            taken = [results.get(timeout=ROUND_TIMEOUT_S) for _ in processes]
            seconds.append(time.perf_counter() - began)
            check_each_once(taken, jobs)
            conflicts.append(sum(part.conflicts for part in taken) / jobs)
            requests.append(sum(part.transactions + part.queries for part in taken) / jobs)
    finally:
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
    return [
        Figure(
            name=f"conflicts per claim, {claimers} claimers, {jobs} jobs",
            unit="",
            rounds=conflicts,
            at_most=TARGET_CONFLICTS,
            details={
                "processes": PROCESSES,
                "threads in each": threads,
                "each job claimed exactly once": True,
                "seconds": [round(value, 2) for value in seconds],
                "requests per claim": [round(value, 3) for value in requests],
            },
        )
    ]


def check_each_once(taken: list[Taken], jobs: int) -> None:
    """Raise RuntimeError unless every job went to exactly one claimer."""
    errors = [part.error for part in taken if part.error]
    if errors:
        raise RuntimeError(f"a claimer failed: {errors[0]}")
    owners = Counter(job_id for part in taken for job_id in part.job_ids)
    twice = sorted(job_id for job_id, times in owners.items() if times > 1)
    if twice or len(owners) != jobs:
        raise RuntimeError(f"{len(owners)} of {jobs} jobs were claimed, {len(twice)} of them twice")


def _claimers(
    endpoint_url: str, rounds: int, threads: int, jobs: int, start: Barrier, claimed: Any, results: Queue[Taken]
) -> None:
    """Run `threads` claimers in each round until all jobs are claimed."""
    plane = Plane(endpoint_url, "race-", create=False)
    environments = [plane.environment() for _ in range(threads)]
    for number in range(rounds):
        sent, errors = Counter(plane.log.sent), Counter(plane.log.errors)
        start.wait(ROUND_TIMEOUT_S)

        def claim_all(turn: int, queue: str = f"round-{number}") -> list[str]:
            mine: list[str] = []
            deadline = time.monotonic() + ROUND_TIMEOUT_S
            while claimed.value < jobs and time.monotonic() < deadline:
                for item in plane.claim(queue=queue, machine_id=f"m-{turn}", context=environments[turn]):
                    mine.append(item["id"])
                    with claimed.get_lock():
                        claimed.value += 1
            return mine

        error, job_ids = "", []
        with ThreadPoolExecutor(threads) as pool:
            try:
                job_ids = [job_id for part in pool.map(claim_all, range(threads)) for job_id in part]
            except RuntimeError as problem:
                error = str(problem)
        sent, errors = Counter(plane.log.sent) - sent, Counter(plane.log.errors) - errors
        results.put(
            Taken(
                job_ids=job_ids,
                conflicts=errors["TransactionCanceledException"],
                transactions=sent["dynamodb.TransactWriteItems"],
                queries=sent["dynamodb.Query"],
                error=error,
            )
        )
