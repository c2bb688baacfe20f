"""Builders of job and attempt views; a test states only the fields under test."""

from __future__ import annotations

from typing import Any

from baton.contract.jobs.history import AttemptView
from baton.contract.jobs.job import AttemptEnd, JobState, JobView

NOW = 1_790_000_000
ID = "146683a1-cb76-4702-9fef-fcccd32594f1"


def a_job(state: JobState = JobState.PENDING, **more: Any) -> JobView:
    values: dict[str, Any] = {
        "id": ID,
        "status": state,
        "state": state,
        "queue": "default",
        "priority": 50,
        "command": ["train"],
        "parameters": {},
        "environment": {},
        "inputs": [],
        "outputs": [],
        "requirements": {},
        "policy": {},
        "tags": {},
        "epoch": 0,
        "counters": {},
        "created_at": NOW - 600,
        "updated_at": NOW - 600,
        "checkpoint_bucket": "training-checkpoints",
        "checkpoint_prefix": f"jobs/{ID}/",
    }
    return JobView.model_validate({**values, **more})


def an_attempt(epoch: int = 1, end: AttemptEnd | None = None, **more: Any) -> AttemptView:
    values: dict[str, Any] = {"epoch": epoch, "machine_id": f"m-{epoch}", "started_at": NOW - 500, "end": end}
    if end is not None:
        values["ended_at"] = NOW - 400
    return AttemptView.model_validate({**values, **more})
