"""Summarize a job in numbers: progress, remaining time, cost. Pure; all times are server times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from baton.contract.jobs.goodput import Goodput
from baton.contract.jobs.history import AttemptView
from baton.contract.jobs.job import JobState, JobView
from baton.contract.worker.lease_grace import LEASE_INTERVALS
from gpu_client.cli.core.formats import count, duration, number
from gpu_client.cli.jobs.goodput import percent, share_of

_TOTAL = "_total"


@dataclass(frozen=True)
class JobSummary:
    """State of a job in numbers; None for unknown values."""

    id: str
    state: JobState
    step: int | None
    total_steps: int | None
    eta_s: int | None
    loss: float | None
    phases: dict[str, tuple[int, int]]
    """Work between two steps: numbers of finished items and of all items, by name."""
    attempts: int
    interruptions: int
    failures: int
    runtime_s: int
    cost: float | None
    checkpoint_step: int | None
    machine_id: str | None
    reason: str
    ended_by: str = ""
    """Rule or command that ended the training."""
    goodput: Goodput | None = None
    """Goodput, summed over all attempts."""
    fired: str = ""
    """Last firing in short; "" if not polled."""
    rented: str = ""
    """State of the job's fleet: the machine that comes or runs the job, or why none comes; "" if not polled."""
    nodes: str = ""
    """Nodes and round of an elastic job; "" for another job, and if not polled."""

    @property
    def share(self) -> float | None:
        """Return the progress, from 0 to 1."""
        if self.state is JobState.COMPLETE:
            return 1.0
        if self.step is None or not self.total_steps:
            return None
        return min(1.0, self.step / self.total_steps)

    def as_data(self) -> dict[str, Any]:
        """Return the summary as JSON values."""
        goodput = self.goodput.model_dump() if self.goodput else None
        return {**asdict(self), "state": self.state.value, "goodput": goodput}


def summarize(
    job: JobView,
    attempt: AttemptView | None,
    price_per_hour: float | None,
    goodput: Goodput | None = None,
    *,
    nodes: Sequence[AttemptView] = (),
) -> JobSummary:
    """Summarize a job. `attempt`: the newest attempt, used if running. `goodput`: sum over all attempts.

    `nodes`: attempts at all seats of an elastic job, used instead of `attempt`.
    """
    newest = attempt if job.nodes is None else None
    live = newest if newest and newest.ended_at is None and job.state is JobState.RUNNING else None
    progress = (live.progress if live else None) or job.progress
    running = running_s(job, live) if job.nodes is None else _nodes_s(nodes)
    runtime_s = job.counters.runtime_s + running
    return JobSummary(
        id=job.id,
        state=job.state,
        step=progress.step if progress else None,
        total_steps=progress.total_steps if progress else None,
        eta_s=_eta_s(live),
        loss=progress.metrics.get("loss") if progress else None,
        phases=_phases(live.progress.metrics) if live and live.progress else {},
        attempts=job.counters.attempts,
        interruptions=job.counters.interruptions,
        failures=job.counters.failures,
        runtime_s=runtime_s,
        cost=None if price_per_hour is None else round(runtime_s * price_per_hour / 3600, 4),
        checkpoint_step=job.checkpoint_step,
        machine_id=job.machine_id,
        reason=reason_text(job),
        ended_by=ended_by_text(job),
        goodput=goodput,
    )


def _nodes_s(attempts: Sequence[AttemptView]) -> int:
    """Return the seconds from the claims of the running attempts at all seats to the last report of each."""
    live = [one for one in attempts if one.ended_at is None and one.progress is not None]
    return sum(max((one.progress.reported_at or 0) - one.started_at, 0) for one in live if one.progress is not None)


def _phases(metrics: Mapping[str, float]) -> dict[str, tuple[int, int]]:
    """Extract the phases that `Session.phase` reports as metrics `<name>` and `<name>_total`."""
    names = (name for name in metrics if f"{name}{_TOTAL}" in metrics)
    return {name: (int(metrics[name]), int(metrics[f"{name}{_TOTAL}"])) for name in names}


def running_s(job: JobView, live: AttemptView | None) -> int:
    """Return the seconds from the claim of the running attempt to its last heartbeat."""
    if live is None or job.lease_expires_at is None:
        return 0
    # Each heartbeat sets the lease's expiry, therefore the expiry gives the time of the last heartbeat.
    last_heartbeat_at = job.lease_expires_at - LEASE_INTERVALS * job.policy.heartbeat_interval_s
    return max(0, last_heartbeat_at - live.started_at)


def _eta_s(live: AttemptView | None) -> int | None:
    """Return the remaining seconds at the mean speed of this attempt; None before its first new step."""
    if live is None or live.progress is None or not live.progress.total_steps or live.progress.reported_at is None:
        return None
    done = live.progress.step - (live.resumed_step or 0)
    took_s = live.progress.reported_at - live.started_at
    left = live.progress.total_steps - live.progress.step
    return round(left * took_s / done) if done > 0 and took_s > 0 and left >= 0 else None


def reason_text(job: JobView) -> str:
    """Format the job's reason; "" without a reason."""
    if job.reason is None:
        return ""
    return f"{job.reason.code}: {job.reason.message}" if job.reason.message else job.reason.code


def ended_by_text(job: JobView) -> str:
    """Return `rule spike at step 120: loss = 7.25`; "" if no rule or command ended the job."""
    by = job.ended_by
    if by is None:
        return ""
    source = f"rule {by.rule}" if by.rule else f"command {by.command}"
    return f"{source} at step {by.step:,}" + (f": {by.message}" if by.message else "")


def step_text(summary: JobSummary) -> str:
    """Return `150 of 500, 23 min left`; "" before the first step."""
    if summary.step is None:
        return ""
    left = f", {duration(summary.eta_s)} left" if summary.eta_s is not None else ""
    return f"{summary.step} of {summary.total_steps or '?'}{left}"


def headline(summary: JobSummary) -> str:
    """Format a summary as one line."""
    parts: list[str] = [summary.state.value, *([summary.nodes] if summary.nodes else [])]
    if summary.step is not None:
        total = f"/{summary.total_steps:,}" if summary.total_steps else ""
        share = f" ({summary.share:.0%})" if summary.share is not None else ""
        parts.append(f"step {summary.step:,}{total}{share}")
    parts += [f"{name.replace('_', ' ')} {done:,}/{total:,}" for name, (done, total) in summary.phases.items()]
    if summary.eta_s is not None:
        parts.append(f"{duration(summary.eta_s)} left")
    if summary.loss is not None:
        parts.append(f"loss {number(summary.loss)}")
    if summary.attempts:
        parts.append(count(summary.attempts, "attempt"))
    if summary.runtime_s:
        parts.append(f"ran {duration(summary.runtime_s)}")
    if summary.cost is not None:
        parts.append(f"cost {summary.cost:.2f}")
    if goodput := percent(share_of(summary.goodput)):
        parts.append(f"goodput {goodput}")
    if summary.rented:
        parts.append(summary.rented)
    if summary.fired and not summary.state.terminal:
        parts.append(summary.fired)
    if summary.reason and summary.state is not JobState.COMPLETE:
        parts.append(summary.reason)
    elif summary.ended_by and summary.state.terminal:
        parts.append(f"ended by {summary.ended_by}")
    return ", ".join(parts)
