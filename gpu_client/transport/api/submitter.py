"""Calls of the scope `submit`: jobs, their history, rules, live commands, recipes."""

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
from baton.contract.recipes.calls import RecipePage, RecipePush, RecipeView
from baton.contract.rule_calls import RulesHistory, RulesRequest, RulesView
from baton.contract.steering import Command, CommandList, CommandRequest
from baton.contract.work import TransitionAnswer
from gpu_client.transport.api.calls import ApiCalls, job_path, segment
from gpu_client.transport.errors import ApiError

DEFAULT_LIMIT = 100


class SubmitterCalls(ApiCalls):
    """What users do with jobs."""

    def submit(self, job: JobSubmit | DreamboothSubmit, *, idempotency_key: str | None = None) -> JobView:
        """Submit a job, once: each call makes its own key, so that its retries cannot submit twice.

        Give a key of your own to make repeating the call itself safe.
        """
        headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
        return self._read(JobView, "submit", "POST", "/job", body=job, headers=headers)

    def submit_batch(self, jobs: Sequence[JobSubmit], *, idempotency_key: str | None = None) -> list[JobView]:
        """Submit 1 to 1,000 jobs: all or none; answers in order."""
        headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
        body = BatchSubmit(jobs=list(jobs))
        return self._read(list[JobView], "submit_batch", "POST", "/jobs/batch", body=body, headers=headers)

    def get_job(self, job_id: str) -> JobView:
        """One job."""
        return self._read(JobView, "get_job", "GET", job_path(job_id))

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
        return self._read(JobPage, "jobs", "GET", "/jobs", query=query)

    def events(self, job_id: str, *, limit: int = DEFAULT_LIMIT, cursor: str | None = None) -> EventPage:
        """One page of a job's history, oldest first."""
        query = {"limit": limit, "cursor": cursor}
        return self._read(EventPage, "events", "GET", f"{job_path(job_id)}/events", query=query)

    def attempts(self, job_id: str, *, limit: int = DEFAULT_LIMIT, cursor: str | None = None) -> AttemptPage:
        """One page of a job's attempts, oldest first."""
        query = {"limit": limit, "cursor": cursor}
        return self._read(AttemptPage, "attempts", "GET", f"{job_path(job_id)}/attempts", query=query)

    def checkpoints(self, job_id: str, *, limit: int = DEFAULT_LIMIT, cursor: str | None = None) -> CheckpointPage:
        """One page of a job's committed checkpoints, newest first."""
        query = {"limit": limit, "cursor": cursor}
        return self._read(CheckpointPage, "checkpoints", "GET", f"{job_path(job_id)}/checkpoints", query=query)

    def artifacts(self, job_id: str, *, limit: int = DEFAULT_LIMIT, cursor: str | None = None) -> StoredArtifactsPage:
        """One page of what is stored of a job's outputs, with links; see StoredArtifactsPage."""
        query = {"limit": limit, "cursor": cursor}
        return self._read(StoredArtifactsPage, "artifacts", "GET", f"{job_path(job_id)}/artifacts", query=query)

    def logs(self, job_id: str, *, limit: int = 500, cursor: str | None = None) -> LogPage:
        """One page of a job's output. Poll with the page's `next_cursor` to follow."""
        query = {"limit": limit, "cursor": cursor}
        return self._read(LogPage, "logs", "GET", f"{job_path(job_id)}/logs", query=query)

    def metrics(self, job_id: str, *, limit: int = 1000, cursor: str | None = None) -> MetricPage:
        """One page of what a job's training reported. Poll with the page's `next_cursor` to follow."""
        query = {"limit": limit, "cursor": cursor}
        return self._read(MetricPage, "metrics", "GET", f"{job_path(job_id)}/metrics", query=query)

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
            return self._read(TransitionAnswer, kind, "POST", f"{job_path(job_id)}/{kind}", body=body)
        except ApiError as error:
            if error.after_retry and error.code in (ErrorCode.JOB_CANCELED, ErrorCode.ILLEGAL_TRANSITION):
                job = self.get_job(job_id)
                if job.state in wanted:
                    return TransitionAnswer(state=job.state.value, not_before=job.not_before)
            raise

    def put_rules(self, job_id: str, text: str, *, if_revision: int | None = None) -> RulesView:
        """Give a job its next revision of rules; the same text again is fine."""
        body = RulesRequest(text=text, if_revision=if_revision)
        return self._read(RulesView, "put_rules", "PUT", f"{job_path(job_id)}/rules", body=body)

    def rules(self, job_id: str) -> RulesView:
        """The newest rules of a job, and what its worker said last of them."""
        return self._read(RulesView, "rules", "GET", f"{job_path(job_id)}/rules")

    def rules_history(self, job_id: str, *, limit: int = 20, cursor: str | None = None) -> RulesHistory:
        """One page of their revisions, newest first."""
        query = {"limit": limit, "cursor": cursor}
        return self._read(RulesHistory, "rules_history", "GET", f"{job_path(job_id)}/rules/history", query=query)

    def command(self, job_id: str, request: CommandRequest, *, idempotency_key: str | None = None) -> Command:
        """Give a command to a job's training, once: each call makes its own key, as `submit` does."""
        headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
        path = f"{job_path(job_id)}/commands"
        return self._read(Command, "command", "POST", path, body=request, headers=headers)

    def commands(self, job_id: str) -> CommandList:
        """The commands that a job was given, newest first."""
        path = f"{job_path(job_id)}/commands"
        return self._read(CommandList, "commands", "GET", path)

    def push_recipe(self, document: str) -> RecipeView:
        """Register a recipe; the same document again is fine."""
        body = RecipePush(document=document)
        return self._read(RecipeView, "push_recipe", "POST", "/recipes", body=body)

    def recipes(self, *, limit: int = 100, cursor: str | None = None) -> RecipePage:
        """One page of the recipes that jobs may name, built-in ones first."""
        query = {"limit": limit, "cursor": cursor}
        return self._read(RecipePage, "recipes", "GET", "/recipes", query=query)

    def recipe(self, recipe_id: str) -> RecipeView:
        """One recipe, `name@version`."""
        return self._read(RecipeView, "recipe", "GET", f"/recipes/{segment(recipe_id)}")
