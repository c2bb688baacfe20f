"""Which committed checkpoints stay."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from contract.jobs import Retention
from functions.domain.records import CheckpointRecord


def expendable(
    records: Sequence[CheckpointRecord],
    policy: Retention,
    *,
    current_step: int | None,
    now: int,
    in_history: Callable[[CheckpointRecord], bool] | None = None,
) -> list[CheckpointRecord]:
    """The records that retention lets go of.

    Kept: the current one, the last N up to it, every K-th step, the best by metric, pinned ones and ones that
    somebody was given URLs for. Of checkpoints that a retry left behind (`in_history`: Job.in_history) only the last
    two kinds.
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
    if current_step is not None:
        kept.add(current_step)
    return [r for r in records if r.step not in kept and not r.pinned and r.protected_until <= now]
