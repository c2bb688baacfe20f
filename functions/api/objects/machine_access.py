"""Limit the key of a rented machine to the job that the machine holds. The host of a rented machine is not trusted."""

from __future__ import annotations

from baton.contract.errors import ErrorCode
from baton.contract.jobs.job import JobState
from functions.api.http.context import ApiCall, Context
from functions.domain.errors import Refusal
from functions.domain.records import Attempt, Job


def require_own_job(context: Context, call: ApiCall, job: Job | None, *, field: str) -> None:
    """Refuse a rented machine the objects of a job whose present attempt another key has claimed.

    job: None for an object of no job. The keys of users are not limited.
    """
    if call.principal.machine is None:
        return
    running = job is not None and job.tenant == call.tenant and job.state is JobState.RUNNING
    attempt = context.jobs.read(Attempt, job.id, job.epoch) if job is not None and running else None
    if attempt is None or attempt.key_id != call.principal.key_id:
        detail = (
            "The key of a rented machine reaches only the objects of the job that the machine runs; "
            "a job's inputs come by GET /job/{id}/inputs."
        )
        raise Refusal(ErrorCode.WRONG_SCOPE, detail, field=field)
