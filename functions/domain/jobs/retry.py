"""Apply the retry policy: backoff, machines to avoid, budgets."""

from __future__ import annotations

from baton.contract.jobs.job import Reason, ReasonCode
from baton.contract.jobs.policy import Policy
from functions.domain.records import Job

MAX_BACKOFF_S = 3600
"""Longest delay after doubling; a longer first delay stays."""
MAX_AVOIDED_MACHINES = 64
FREE_INTERRUPTIONS = 2
"""Interruptions in a row, without a new checkpoint, that cause no backoff: spot machines are lost regularly."""


def backoff_s(policy: Policy, times: int) -> int:
    """Return the backoff in seconds after the `times`-th failure, counted from 1."""
    doublings = min(times - 1, 20)
    return min(policy.backoff_s << doublings, max(MAX_BACKOFF_S, policy.backoff_s))


def cap_reached(job: Job) -> Reason | None:
    """Return the reason to fail the job for good; None while no budget is spent.

    An elastic job has the budgets of all its nodes together, a seat none but the running time.
    """
    policy, counters = job.spec.policy, job.counters
    if job.spec.nodes is not None:
        return _cap_of_nodes(job, job.spec.nodes.max)
    budgets = (
        (ReasonCode.FAILURE_CAP, counters.failures, policy.max_failures, "failed"),
        (ReasonCode.NODE_FAULT_CAP, counters.node_faults, policy.max_node_faults, "met a faulty machine"),
        (ReasonCode.INTERRUPTION_CAP, counters.interruptions, policy.max_interruptions, "lost its machine"),
        (
            ReasonCode.FRUITLESS_INTERRUPTION_CAP,
            job.fruitless_interruptions,
            policy.max_fruitless_interruptions,
            "lost its machine in a row without committing a checkpoint",
        ),
    )
    for code, used, allowed, failure in budgets if job.spec.seat is None else ():
        if used >= allowed:
            times = "1 time" if used == 1 else f"{used} times"
            return Reason(code=code, message=f"{failure} {times}; the policy allows {allowed}")
    if policy.max_runtime_s is not None and counters.runtime_s >= policy.max_runtime_s:
        return Reason(
            code=ReasonCode.MAX_RUNTIME, message=f"ran for the {policy.max_runtime_s} s that the policy allows"
        )
    return None


def _cap_of_nodes(job: Job, nodes: int) -> Reason | None:
    policy, alone = job.spec.policy, "without committing a checkpoint"
    budgets = (
        (ReasonCode.FAILURE_CAP, job.fruitless_failures, policy.max_failures, f"failed {alone}"),
        (ReasonCode.NODE_FAULT_CAP, job.fruitless_node_faults, policy.max_node_faults, f"met faulty machines {alone}"),
        (ReasonCode.INTERRUPTION_CAP, job.counters.interruptions, policy.max_interruptions, "lost their machines"),
        (
            ReasonCode.FRUITLESS_INTERRUPTION_CAP,
            job.fruitless_interruptions,
            policy.max_fruitless_interruptions,
            f"lost their machines {alone}",
        ),
    )
    for code, used, allowed, failure in budgets:
        if used >= allowed * nodes:
            message = f"its {nodes} nodes {failure}, {used} times; the policy allows {allowed} for each"
            return Reason(code=code, message=message)
    return None


def avoided(avoid: dict[str, int], machine_id: str | None, policy: Policy, now: int) -> dict[str, int]:
    """Return the machines to avoid after `machine_id` failed the job, without expired entries."""
    until_by_machine = {machine: until for machine, until in avoid.items() if until > now}
    if machine_id and policy.avoid_machine_s:
        until_by_machine[machine_id] = now + policy.avoid_machine_s
    newest = sorted(until_by_machine.items(), key=lambda entry: entry[1], reverse=True)[:MAX_AVOIDED_MACHINES]
    return dict(newest)
