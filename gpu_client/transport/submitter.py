"""Calls of the scope `submit`: jobs and their history."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterator, Sequence

from pydantic import BaseModel

from baton.contract.artifacts import StoredArtifactsPage
from baton.contract.checkpoints import CheckpointPage
from baton.contract.dreambooth import DreamboothSubmit
from baton.contract.errors import ErrorCode
from baton.contract.history import AttemptPage, EventPage
from baton.contract.jobs import (
    BatchSubmit,
    JobPage,
    JobState,
    JobSubmit,
    JobView,
    RetryRequest,
    StopRequest,
)
from baton.contract.output import LogPage, MetricPage, MetricPoint
from baton.contract.work import TransitionAnswer
from gpu_client.transport.calls import ApiCalls, read_answer, segment
from gpu_client.transport.errors import ApiError

DEFAULT_LIMIT = 100


class SubmitterCalls(ApiCalls):
    """What users do with jobs."""

    def submit(self, job: JobSubmit | DreamboothSubmit, *, idempotency_key: str | None = None) -> JobView:
        """Submit a job, once: each call makes its own key, so that its retries cannot submit twice.

        Give a key of your own to make repeating the call itself safe.
        """
        headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
        return read_answer("submit", self._send("submit", "POST", "/job", body=job, headers=headers), JobView)

    def submit_batch(self, jobs: Sequence[JobSubmit], *, idempotency_key: str | None = None) -> list[JobView]:
        """Submit 1 to 1,000 jobs: all or none; answers in order."""
        headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
        body = BatchSubmit(jobs=list(jobs))
        answer = self._send("submit_batch", "POST", "/jobs/batch", body=body, headers=headers)
        return read_answer("submit_batch", answer, list[JobView])

    def get_job(self, job_id: str) -> JobView:
        """One job."""
        return read_answer("get_job", self._send("get_job", "GET", _job(job_id)), JobView)

    def jobs(
        self,
        *,
        status: JobState | None = None,
        queue: str | None = None,
        limit: int = DEFAULT_LIMIT,
        cursor: str | None = None,
        newest_first: bool = False,
    ) -> JobPage:
        """One page of jobs, oldest first unless said otherwise; it may be empty and yet not the last."""
        # an order is asked for only where it matters: an older control plane does not know the field
        order = "desc" if newest_first else None
        query = {"status": status, "queue": queue, "order": order, "limit": limit, "cursor": cursor}
        return read_answer("jobs", self._send("jobs", "GET", "/jobs", query=query), JobPage)

    def events(self, job_id: str, *, limit: int = DEFAULT_LIMIT, cursor: str | None = None) -> EventPage:
        """One page of a job's history, oldest first."""
        query = {"limit": limit, "cursor": cursor}
        return read_answer("events", self._send("events", "GET", f"{_job(job_id)}/events", query=query), EventPage)

    def attempts(self, job_id: str, *, limit: int = DEFAULT_LIMIT, cursor: str | None = None) -> AttemptPage:
        """One page of a job's attempts, oldest first."""
        query = {"limit": limit, "cursor": cursor}
        answer = self._send("attempts", "GET", f"{_job(job_id)}/attempts", query=query)
        return read_answer("attempts", answer, AttemptPage)

    def checkpoints(self, job_id: str, *, limit: int = DEFAULT_LIMIT, cursor: str | None = None) -> CheckpointPage:
        """One page of a job's committed checkpoints, newest first."""
        query = {"limit": limit, "cursor": cursor}
        answer = self._send("checkpoints", "GET", f"{_job(job_id)}/checkpoints", query=query)
        return read_answer("checkpoints", answer, CheckpointPage)

    def artifacts(self, job_id: str, *, limit: int = DEFAULT_LIMIT, cursor: str | None = None) -> StoredArtifactsPage:
        """One page of what is stored of a job's outputs, with links; see StoredArtifactsPage."""
        query = {"limit": limit, "cursor": cursor}
        answer = self._send("artifacts", "GET", f"{_job(job_id)}/artifacts", query=query)
        return read_answer("artifacts", answer, StoredArtifactsPage)

    def logs(self, job_id: str, *, limit: int = 500, cursor: str | None = None) -> LogPage:
        """One page of a job's output. Poll with the page's `next_cursor` to follow."""
        query = {"limit": limit, "cursor": cursor}
        return read_answer("logs", self._send("logs", "GET", f"{_job(job_id)}/logs", query=query), LogPage)

    def metrics(self, job_id: str, *, limit: int = 1000, cursor: str | None = None) -> MetricPage:
        """One page of what a job's training reported. Poll with the page's `next_cursor` to follow."""
        query = {"limit": limit, "cursor": cursor}
        return read_answer("metrics", self._send("metrics", "GET", f"{_job(job_id)}/metrics", query=query), MetricPage)

    def metric_points(self, job_id: str) -> Iterator[MetricPoint]:
        """Everything that a job's training reported so far, attempt after attempt."""
        cursor: str | None = None
        while True:
            page = self.metrics(job_id, cursor=cursor)
            yield from page.points
            cursor = page.next_cursor
            if not page.points:
                return

    def stop(self, job_id: str, *, message: str = "") -> TransitionAnswer:
        """Cancel the job: final at once."""
        return self._steer("stop", job_id, StopRequest(message=message), wanted={JobState.CANCELED})

    def pause(self, job_id: str, *, message: str = "") -> TransitionAnswer:
        """Hold the job; a running one commits a checkpoint first."""
        wanted = {JobState.PAUSED, JobState.RUNNING}
        return self._steer("pause", job_id, StopRequest(message=message), wanted=wanted)

    def resume(self, job_id: str) -> TransitionAnswer:
        """Let a paused job run again."""
        return self._steer("resume", job_id, StopRequest(), wanted={JobState.PENDING, JobState.RUNNING})

    def retry(self, job_id: str, *, from_step: int | None = None, reset_counters: bool = True) -> TransitionAnswer:
        """Run an ended job again under its id: from its newest checkpoint, that of `from_step`, or 0 for the start."""
        body = RetryRequest(from_step=from_step, reset_counters=reset_counters)
        return self._steer("retry", job_id, body, wanted={JobState.PENDING, JobState.RUNNING})

    def _steer(self, kind: str, job_id: str, body: BaseModel, *, wanted: Collection[JobState]) -> TransitionAnswer:
        """A command. Where its first try went unanswered, a second one is refused because the first was obeyed."""
        try:
            answer = self._send(kind, "POST", f"{_job(job_id)}/{kind}", body=body)
        except ApiError as error:
            if error.after_retry and error.code in (ErrorCode.JOB_CANCELED, ErrorCode.ILLEGAL_TRANSITION):
                job = self.get_job(job_id)
                if job.state in wanted:
                    return TransitionAnswer(state=job.state.value, not_before=job.not_before)
            raise
        return read_answer(kind, answer, TransitionAnswer)


def _job(job_id: str) -> str:
    return f"/job/{segment(job_id)}"
