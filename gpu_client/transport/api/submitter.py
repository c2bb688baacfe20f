"""Call the API with the scope `submit`: jobs, their history, rules, live commands, recipes."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterator, Sequence

from pydantic import BaseModel

from baton.contract.checkpoints.calls import CheckpointPage
from baton.contract.elastic.world import ExcludeRequest, WorldView
from baton.contract.errors import ErrorCode
from baton.contract.jobs.dreambooth import DreamboothSubmit
from baton.contract.jobs.history import AttemptPage, EventPage
from baton.contract.jobs.job import (
    BatchSubmit,
    JobPage,
    JobState,
    JobSubmit,
    JobView,
    RetryRequest,
    StopRequest,
)
from baton.contract.jobs.rule_calls import RulesHistory, RulesRequest, RulesView
from baton.contract.objects.artifacts import StoredArtifactsPage
from baton.contract.recipes.calls import RecipePage, RecipePush, RecipeView
from baton.contract.worker.calls import TransitionAnswer
from baton.contract.worker.control import Command, CommandList, CommandRequest
from baton.contract.worker.output import LogPage, MetricPage, MetricPoint
from gpu_client.transport.api.calls import ApiCalls, job_path, segment
from gpu_client.transport.errors import ApiError

DEFAULT_LIMIT = 100


class SubmitterCalls(ApiCalls):
    """Calls that submit, read, steer and stop jobs, and register recipes."""

    def submit(self, job: JobSubmit | DreamboothSubmit, *, idempotency_key: str | None = None) -> JobView:
        """Submit a job once. Each call makes an idempotency key, so that its retries cannot submit a second job.

        With the caller's own key, repeated calls are idempotent, too.
        """
        headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
        return self._read(JobView, "submit", "POST", "/job", body=job, headers=headers)

    def submit_batch(self, jobs: Sequence[JobSubmit], *, idempotency_key: str | None = None) -> list[JobView]:
        """Submit 1 to 1,000 jobs atomically. Returns the jobs in order."""
        headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
        body = BatchSubmit(jobs=list(jobs))
        return self._read(list[JobView], "submit_batch", "POST", "/jobs/batch", body=body, headers=headers)

    def get_job(self, job_id: str) -> JobView:
        """Return one job."""
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
        """Return one page of jobs, oldest first by default. A page may be empty although more pages follow."""
        # "asc" is the default, therefore the query omits "asc".
        order = "desc" if newest_first else None
        query = {"status": status, "queue": queue, "order": order, "limit": limit, "cursor": cursor}
        return self._read(JobPage, "jobs", "GET", "/jobs", query=query)

    def events(self, job_id: str, *, limit: int = DEFAULT_LIMIT, cursor: str | None = None) -> EventPage:
        """Return one page of a job's events, oldest first."""
        query = {"limit": limit, "cursor": cursor}
        return self._read(EventPage, "events", "GET", f"{job_path(job_id)}/events", query=query)

    def attempts(self, job_id: str, *, limit: int = DEFAULT_LIMIT, cursor: str | None = None) -> AttemptPage:
        """Return one page of a job's attempts, oldest first."""
        query = {"limit": limit, "cursor": cursor}
        return self._read(AttemptPage, "attempts", "GET", f"{job_path(job_id)}/attempts", query=query)

    def checkpoints(self, job_id: str, *, limit: int = DEFAULT_LIMIT, cursor: str | None = None) -> CheckpointPage:
        """Return one page of a job's committed checkpoints, newest first."""
        query = {"limit": limit, "cursor": cursor}
        return self._read(CheckpointPage, "checkpoints", "GET", f"{job_path(job_id)}/checkpoints", query=query)

    def artifacts(self, job_id: str, *, limit: int = DEFAULT_LIMIT, cursor: str | None = None) -> StoredArtifactsPage:
        """Return one page of a job's stored outputs, with links; see StoredArtifactsPage."""
        query = {"limit": limit, "cursor": cursor}
        return self._read(StoredArtifactsPage, "artifacts", "GET", f"{job_path(job_id)}/artifacts", query=query)

    def logs(self, job_id: str, *, limit: int = 500, cursor: str | None = None, seat: int | None = None) -> LogPage:
        """Return one page of a job's log. Poll with the page's `next_cursor` to follow the log.

        `seat`: node of an elastic job.
        """
        query = {"limit": limit, "cursor": cursor, "seat": seat}
        return self._read(LogPage, "logs", "GET", f"{job_path(job_id)}/logs", query=query)

    def metrics(
        self, job_id: str, *, limit: int = 1000, cursor: str | None = None, seat: int | None = None
    ) -> MetricPage:
        """Return one page of a training's metrics. Poll with the page's `next_cursor` to follow the metrics.

        `seat`: node of an elastic job.
        """
        query = {"limit": limit, "cursor": cursor, "seat": seat}
        return self._read(MetricPage, "metrics", "GET", f"{job_path(job_id)}/metrics", query=query)

    def metric_points(self, job_id: str, *, seat: int | None = None) -> Iterator[MetricPoint]:
        """Yield all present metrics of a training, attempt by attempt."""
        cursor: str | None = None
        while True:
            page = self.metrics(job_id, cursor=cursor, seat=seat)
            yield from page.points
            cursor = page.next_cursor
            if not page.points:
                return

    def stop(self, job_id: str, *, message: str = "") -> TransitionAnswer:
        """Cancel the job, at once and for good."""
        return self._steer("stop", job_id, StopRequest(message=message), wanted={JobState.CANCELED})

    def pause(self, job_id: str, *, message: str = "") -> TransitionAnswer:
        """Pause the job; a running job commits a checkpoint first."""
        wanted = {JobState.PAUSED, JobState.RUNNING}
        return self._steer("pause", job_id, StopRequest(message=message), wanted=wanted)

    def resume(self, job_id: str) -> TransitionAnswer:
        """Resume a paused job."""
        return self._steer("resume", job_id, StopRequest(), wanted={JobState.PENDING, JobState.RUNNING})

    def retry(self, job_id: str, *, from_step: int | None = None, reset_counters: bool = True) -> TransitionAnswer:
        """Run an ended job again, from its newest checkpoint, the checkpoint of `from_step`, or the start (0)."""
        body = RetryRequest(from_step=from_step, reset_counters=reset_counters)
        return self._steer("retry", job_id, body, wanted={JobState.PENDING, JobState.RUNNING})

    def _steer(self, kind: str, job_id: str, body: BaseModel, *, wanted: Collection[JobState]) -> TransitionAnswer:
        """Send a state change. If the answer of a successful first try was lost, return the effect of the first try."""
        try:
            return self._read(TransitionAnswer, kind, "POST", f"{job_path(job_id)}/{kind}", body=body)
        except ApiError as error:
            if error.after_retry and error.code in (ErrorCode.JOB_CANCELED, ErrorCode.ILLEGAL_TRANSITION):
                job = self.get_job(job_id)
                if job.state in wanted:
                    return TransitionAnswer(state=job.state.value, not_before=job.not_before)
            raise

    def exclude_nodes(self, job_id: str, seats: Sequence[int]) -> WorldView:
        """Remove members of an elastic job's world. A repeat is refused with `not_a_member`."""
        path = f"{job_path(job_id)}/world/exclude"
        return self._read(WorldView, "exclude_nodes", "POST", path, body=ExcludeRequest(seats=list(seats)))

    def put_rules(self, job_id: str, text: str, *, if_revision: int | None = None) -> RulesView:
        """Store the next revision of a job's rules. Idempotent for an unchanged text."""
        body = RulesRequest(text=text, if_revision=if_revision)
        return self._read(RulesView, "put_rules", "PUT", f"{job_path(job_id)}/rules", body=body)

    def rules(self, job_id: str) -> RulesView:
        """Return the newest rules of a job, and the worker's last report about these rules."""
        return self._read(RulesView, "rules", "GET", f"{job_path(job_id)}/rules")

    def rules_history(self, job_id: str, *, limit: int = 20, cursor: str | None = None) -> RulesHistory:
        """Return one page of the revisions of a job's rules, newest first."""
        query = {"limit": limit, "cursor": cursor}
        return self._read(RulesHistory, "rules_history", "GET", f"{job_path(job_id)}/rules/history", query=query)

    def command(self, job_id: str, request: CommandRequest, *, idempotency_key: str | None = None) -> Command:
        """Send a command to a job's training once. Each call makes an idempotency key, as in `submit`."""
        headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
        path = f"{job_path(job_id)}/commands"
        return self._read(Command, "command", "POST", path, body=request, headers=headers)

    def commands(self, job_id: str) -> CommandList:
        """Return the commands that a job received, newest first."""
        path = f"{job_path(job_id)}/commands"
        return self._read(CommandList, "commands", "GET", path)

    def push_recipe(self, document: str) -> RecipeView:
        """Register a recipe. Idempotent for an unchanged document."""
        body = RecipePush(document=document)
        return self._read(RecipeView, "push_recipe", "POST", "/recipes", body=body)

    def recipes(self, *, limit: int = 100, cursor: str | None = None) -> RecipePage:
        """Return one page of the recipes, built-in recipes first."""
        query = {"limit": limit, "cursor": cursor}
        return self._read(RecipePage, "recipes", "GET", "/recipes", query=query)

    def recipe(self, recipe_id: str) -> RecipeView:
        """Return the recipe `name@version`."""
        return self._read(RecipeView, "recipe", "GET", f"/recipes/{segment(recipe_id)}")
