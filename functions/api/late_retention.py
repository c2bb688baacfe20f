"""Retention for jobs that ended without a last call of their worker: stopped, out of time, or given up.

Called by the sweeper. Nobody waits for it, so it is done an hour after the end (`retention.LATE_AFTER_S`): by then no
function and no upload of the last attempt is under way, and whoever stopped the job to change it has retried it.
"""

from __future__ import annotations

from functions.api.context import Context
from functions.api.letting_go import Retention
from functions.api.sweeping import by_itself
from functions.domain.packs import FUNCTION_TIMEOUT_S, SWEEPER_TIMEOUT_S

JOBS_A_SWEEP = 20
LOOKED_AT = 200
"""Due jobs among which these are looked for: some may be changing, or be damaged, and must not hold up the others."""


def run_due_retentions(context: Context, began_at: int) -> int:
    """Let go of what ended jobs do not keep; answers with the number of jobs. `began_at`: when this function began.

    Each job says itself when it is to be looked at, and says so until everything is done: whatever ends this, a later
    sweep goes on.
    """
    ends_by = began_at + SWEEPER_TIMEOUT_S
    done = 0
    for job_id in context.jobs.due_retentions(began_at, limit=LOOKED_AT):
        if done == JOBS_A_SWEEP or context.clock.now() > ends_by - FUNCTION_TIMEOUT_S:
            break
        done += by_itself(job_id, _run, context, job_id, ends_by)
    return done


def _run(context: Context, job_id: str, ends_by: int) -> bool:
    """False if nothing is due: the index may be behind."""
    now = context.clock.now()
    job = context.jobs.get(job_id)
    if job is None or job.retention_at is None or job.retention_at > now:
        return False
    return Retention(context, job, now, ends_by=ends_by).run_at_end()
