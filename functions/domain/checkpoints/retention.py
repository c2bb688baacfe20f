"""Select the committed checkpoints that stay, and the time of the sweeper's retention."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from baton.contract.jobs.policy import Retention
from functions.domain.jobs.attempt_end import LATE_AFTER_S
from functions.domain.jobs.transaction import Transaction, write_job
from functions.domain.records import CheckpointRecord, Job

MAX_TAGS = 20
"""Number of tags of a job whose newest checkpoints are kept."""


def next_try_at(job: Job, now: int) -> int:
    """Return when retention of an ended job is retried; the intervals grow with each failure."""
    ended_at = max(job.completed_at or 0, job.failed_at or 0, job.canceled_at or 0)
    return now + max(LATE_AFTER_S, now - (ended_at or now))


def schedule_retention(job: Job, at: int | None) -> Transaction:
    """Schedule the sweeper's retention of an ended job at `at`; None ends the retries."""
    return write_job(job.model_copy(update={"rev": job.rev + 1, "retention_at": at}))


def surplus(
    records: Sequence[CheckpointRecord],
    policy: Retention,
    *,
    current_step: int | None,
    in_history: Callable[[CheckpointRecord], bool] | None = None,
) -> list[CheckpointRecord]:
    """Return the records that the policy does not keep.

    Kept are the current checkpoint, the last N up to the current one, every K-th step, the best by metric, the newest
    of each tag (of the MAX_TAGS newest tags), and pinned checkpoints. Checkpoints that a retry left behind
    (`in_history`: Job.in_history) are surplus unless pinned.
    """
    sound = sorted(
        (r for r in records if not r.damaged and (in_history is None or in_history(r))),
        key=lambda record: record.step,
        reverse=True,
    )
    reachable = [r for r in sound if current_step is None or r.step <= current_step]
    kept = {r.step for r in reachable[: policy.keep_last]}
    if policy.keep_every_steps:
        kept |= {r.step for r in sound if r.step % policy.keep_every_steps == 0}
    if policy.keep_best_metric:
        measured = [r for r in sound if policy.keep_best_metric in r.metrics]
        sign = 1.0 if policy.keep_best_mode == "min" else -1.0
        best = min(measured, key=lambda r: sign * r.metrics[policy.keep_best_metric or ""], default=None)
        if best:
            kept.add(best.step)
    newest: dict[str, int] = {}
    for record in sound:
        if record.tag and len(newest) < MAX_TAGS:
            newest.setdefault(record.tag, record.step)
    kept |= set(newest.values())
    if current_step is not None:
        kept.add(current_step)
    return [r for r in records if r.step not in kept and not r.pinned]
