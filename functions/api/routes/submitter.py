"""The calls of submitters: jobs, recipes, rules, commands."""

from __future__ import annotations

from functools import partial

from baton.contract.checkpoints.calls import CheckpointPage
from baton.contract.errors import ErrorCode as E
from baton.contract.jobs.curves import CurvesQuery, CurvesView
from baton.contract.jobs.dreambooth import DreamboothSubmit, OriginalEvent, OriginalJob
from baton.contract.jobs.history import AttemptPage, EventPage, EventView
from baton.contract.jobs.job import BatchSubmit, JobChecked, JobPage, JobSubmit, JobView, RetryRequest, StopRequest
from baton.contract.jobs.rule_backtest import BacktestRequest, BacktestView
from baton.contract.jobs.rule_calls import RulesChecked, RulesHistory, RulesRequest, RulesView
from baton.contract.recipes.calls import RecipePage, RecipePush, RecipeQuery, RecipeView
from baton.contract.worker.calls import TransitionAnswer
from baton.contract.worker.control import Command, CommandList, CommandRequest
from baton.contract.worker.output import LogPage, MetricPage
from functions.api.http.route import JOB, PAGE, SUBMIT, Route
from functions.api.jobs import job_calls, recipes
from functions.api.rules import rule_calls
from functions.api.worker import curves, logs, rule_backtest

_WEBHOOK = (E.WEBHOOK_NOT_FOUND,)
_SUBMIT = (E.UNKNOWN_RECIPE, E.INVALID_RULES, E.NOT_FOR_ELASTIC, E.IDEMPOTENCY_MISMATCH, *_WEBHOOK)
_STEER = (*JOB, E.ILLEGAL_TRANSITION, E.JOB_FINISHED, E.JOB_CANCELED, E.CONFLICT, E.CHECKPOINT_NOT_FOUND)
_GIVE = (*JOB, E.JOB_FINISHED, E.ILLEGAL_TRANSITION, E.CONFLICT)
_IDEMPOTENCY = ("idempotency-key",)
_submitter = partial(Route, function="submitter", scopes=SUBMIT)
_submit = partial(_submitter, "POST", refuses=_SUBMIT, headers=_IDEMPOTENCY)
_page = partial(_submitter, "GET", refuses=PAGE)
_output = partial(_submitter, "GET", refuses=(*PAGE, E.NOT_ELASTIC))
_steer = partial(_submitter, "POST", body_required=False, answer=TransitionAnswer, refuses=_STEER)

ROUTES: tuple[Route, ...] = (
    _submit("/job", job_calls.submit, body=(JobSubmit, DreamboothSubmit), answer=JobView | OriginalJob),
    _submitter(
        "POST", "/jobs/check", job_calls.check, body=(JobSubmit,), answer=JobChecked, refuses=(*_SUBMIT, E.CONFLICT)
    ),
    _submit("/jobs/batch", job_calls.submit_batch, body=(BatchSubmit,), answer=list[JobView]),
    _submitter(
        "GET",
        "/jobs",
        job_calls.list_jobs,
        query=job_calls.JobsQuery,
        answer=JobPage | list[JobView] | list[OriginalJob],
        refuses=(E.INVALID_CURSOR,),
    ),
    _submitter("GET", "/job/{id}", job_calls.get_job, answer=JobView | OriginalJob, refuses=JOB),
    _page(
        "/job/{id}/events",
        job_calls.list_events,
        query=job_calls.PageQuery,
        answer=EventPage | list[EventView] | list[OriginalEvent],
    ),
    _page("/job/{id}/attempts", job_calls.list_attempts, query=job_calls.PageQuery, answer=AttemptPage),
    _page("/job/{id}/checkpoints", job_calls.list_checkpoints, query=job_calls.PageQuery, answer=CheckpointPage),
    _output("/job/{id}/logs", logs.read, query=logs.LogsQuery, answer=LogPage),
    _output("/job/{id}/metrics", logs.read_points, query=logs.LogsQuery, answer=MetricPage),
    _submitter(
        "GET",
        "/job/{id}/curves",
        curves.read_curves,
        query=CurvesQuery,
        answer=CurvesView,
        headers=("if-none-match",),
        refuses=(*JOB, E.NOT_ELASTIC),
    ),
    _steer("/job/{id}/stop", job_calls.stop, body=(StopRequest,)),
    _steer("/job/{id}/pause", job_calls.pause, body=(StopRequest,)),
    _steer("/job/{id}/resume", job_calls.resume, body=(StopRequest,)),
    _steer("/job/{id}/retry", job_calls.retry, body=(RetryRequest,)),
    _submitter(
        "PUT",
        "/job/{id}/rules",
        rule_calls.put_rules,
        body=(RulesRequest,),
        answer=RulesView,
        refuses=(*_GIVE, E.NOT_FOR_ELASTIC, E.INVALID_RULES),
    ),
    _submitter("GET", "/job/{id}/rules", rule_calls.show_rules, answer=RulesView, refuses=JOB),
    _page("/job/{id}/rules/history", rule_calls.list_rules, query=rule_calls.RulesHistoryQuery, answer=RulesHistory),
    _submitter(
        "POST",
        "/job/{id}/rules/backtest",
        rule_backtest.backtest,
        body=(BacktestRequest,),
        answer=BacktestView,
        refuses=(*JOB, E.NOT_FOR_ELASTIC, E.INVALID_RULES, E.PAYLOAD_TOO_LARGE),
    ),
    _submitter("POST", "/rules/check", rule_calls.check_rules, body=(rule_calls.RulesCheck,), answer=RulesChecked),
    _submitter(
        "POST",
        "/job/{id}/commands",
        rule_calls.give_command,
        body=(CommandRequest,),
        answer=Command,
        refuses=(*_GIVE, E.IDEMPOTENCY_MISMATCH),
        headers=_IDEMPOTENCY,
    ),
    _submitter("GET", "/job/{id}/commands", rule_calls.list_commands, answer=CommandList, refuses=JOB),
    _submitter(
        "POST",
        "/recipes",
        recipes.push,
        body=(RecipePush,),
        answer=RecipeView,
        refuses=(E.INVALID_RECIPE, E.RECIPE_EXISTS),
    ),
    _submitter(
        "GET", "/recipes", recipes.list_recipes, query=RecipeQuery, answer=RecipePage, refuses=(E.INVALID_CURSOR,)
    ),
    _submitter("GET", "/recipes/{recipe}", recipes.show, answer=RecipeView, refuses=(E.RECIPE_NOT_FOUND,)),
)
