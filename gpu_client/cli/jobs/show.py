"""`baton jobs` and `baton show`."""

from __future__ import annotations

import json
import shlex
from typing import Annotated

import typer

from baton.contract.base import JsonObject
from baton.contract.history import AttemptView
from baton.contract.jobs import JobState, JobView
from baton.contract.recipes.lint import lint
from gpu_client.cli.core.errors import CliError
from gpu_client.cli.core.formats import age, count, duration, finite, moment, number, size
from gpu_client.cli.core.output import CUT, FOLDED, Column, Screen, as_data
from gpu_client.cli.core.session import SHOWN_ID_CHARACTERS, AsJson, JobIdArgument, Session, find_job, session_of
from gpu_client.cli.jobs.explain import requirements_text
from gpu_client.cli.jobs.goodput import goodput_lines, total_of
from gpu_client.cli.jobs.summary import reason_text, summarize
from gpu_client.transport.api.calls import pages
from gpu_client.transport.api.client import BatonClient
from gpu_client.transport.errors import ApiError

_COLUMNS = (
    "id",
    "state",
    Column("job", CUT),
    Column("queue", CUT),
    Column("step", right=True),
    Column("attempts", right=True),
    "age",
    Column("reason", CUT),
)
_ATTEMPTS = (
    Column("#", right=True),
    Column("machine", FOLDED),
    "started",
    "lasted",
    "end",
    Column("step", right=True),
    Column("why", FOLDED),
)
_CHECKPOINTS = (Column("step", right=True), "committed", Column("size", right=True), "checkpoint")
_OUTPUTS = (Column("size", right=True), Column("output", FOLDED))
_PARAMETERS = ("parameter", Column("value", FOLDED))
_PER_PAGE = 1000
DEFAULT_LIMIT = 50
WATCH_S = 2.0
_MAX_TITLE_CHARACTERS = 60
_USUAL_QUEUE = "default"
"""Where all jobs are of it, it goes without saying."""


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("jobs")(jobs)
    app.command("show")(show)


def jobs(
    context: typer.Context,
    *,
    status: Annotated[
        JobState | None, typer.Option(metavar="STATE", help=f"Only jobs in this state: {', '.join(JobState)}.")
    ] = None,
    queue: Annotated[str | None, typer.Option(help="Only jobs of this queue.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help=f"The newest so many. Default: {DEFAULT_LIMIT}.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Not only the newest.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show the list anew every two seconds, until Ctrl-C.")] = False,
    as_json: AsJson = False,
) -> None:
    """List jobs, the newest first."""
    session = session_of(context)
    if everything and limit is not None:
        raise CliError("--all and --limit exclude each other", "Give one of them.")
    wanted = None if everything else limit or DEFAULT_LIMIT
    with session.client() as client:
        while True:
            found, more = newest_jobs(client, status, queue, wanted)
            if as_json:
                (session.screen.json_line if watch else session.screen.json)(found)
            else:
                _show_list(session, found, clear=watch)
                if more:
                    session.screen.say(f"The newest {len(found)}. For all: --all")
            if not watch:
                return
            session.sleep(WATCH_S)


def newest_jobs(
    client: BatonClient, status: JobState | None, queue: str | None, limit: int | None
) -> tuple[list[JobView], bool]:
    """The newest jobs, newest first (None: all), and whether there are more."""
    found: list[JobView] = []
    cursor: str | None = None
    while True:
        # a page is filtered by queue after it was read: a short one would find little
        size = _PER_PAGE if limit is None or queue is not None else min(limit - len(found), _PER_PAGE)
        page = client.jobs(status=status, queue=queue, limit=size, cursor=cursor, newest_first=True)
        found += page.jobs
        cursor = page.next_cursor
        if cursor is None or (limit is not None and len(found) >= limit):
            return found[:limit], cursor is not None or len(found) > (limit or len(found))


def _show_list(session: Session, found: list[JobView], *, clear: bool) -> None:
    screen = session.screen
    if clear:
        screen.clear()
    now = session.clock()
    everyday = all(job.queue == _USUAL_QUEUE for job in found)
    screen.table(_COLUMNS, (_row(job, now, with_queue=not everyday) for job in found))
    if not found:
        screen.say("No jobs.")


def _row(job: JobView, now: float, *, with_queue: bool) -> list[str]:
    title = job.name or job.recipe or shlex.join(job.command)[:_MAX_TITLE_CHARACTERS]
    progress = job.progress
    step = "" if progress is None else f"{progress.step}" + (f"/{progress.total_steps}" if progress.total_steps else "")
    return [
        job.id[:SHOWN_ID_CHARACTERS],
        job.state.value,
        title,
        job.queue if with_queue else "",
        step,
        str(job.counters.attempts),
        age(now - job.created_at),
        reason_text(job),
    ]


def show(
    context: typer.Context,
    job_id: JobIdArgument,
    price_per_hour: Annotated[
        float | None, typer.Option(min=0, help="Of one machine; default: the profile's. Shows what was lost in money.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a job: its parameters, attempts, checkpoints and outputs.

    Parameters that have the recipe's default are counted only; --json has all.
    """
    session = session_of(context)
    price = finite(price_per_hour, "--price-per-hour")
    if price is None:
        price = session.profile().price_per_hour
    with session.client() as client:
        job = find_job(client, job_id)
        defaults = {} if as_json else _defaults(client, job)
        attempts = [one for page in pages(lambda c: client.attempts(job.id, cursor=c)) for one in page.attempts]
        checkpoints = [
            one for page in pages(lambda c: client.checkpoints(job.id, cursor=c)) for one in page.checkpoints
        ]
    if as_json:
        more = {"attempts": attempts, "checkpoints": checkpoints, "goodput": total_of(attempts)}
        session.screen.json({**as_data(job), **as_data(more)})
        return
    screen = session.screen
    screen.fields([*_details(job, attempts[-1] if attempts else None), *goodput_lines(total_of(attempts), price)])
    _show_parameters(screen, job, defaults)
    if attempts:
        screen.line("")
        screen.table(_ATTEMPTS, map(_attempt_row, attempts))
    if checkpoints:
        screen.line("")
        rows = [
            [
                str(one.step),
                moment(one.committed_at),
                size(one.total_bytes),
                _remarks(one.current, one.pinned, one.damaged, one.tag),
            ]
            for one in checkpoints
        ]
        screen.table(_CHECKPOINTS, rows)
    _show_artifacts(screen, job)


def _details(job: JobView, attempt: AttemptView | None) -> list[tuple[str, str]]:
    summary = summarize(job, attempt, None)
    progress = job.progress
    inputs = ", ".join(f"{one.prefix} -> {one.into}" if one.into else one.prefix for one in job.inputs)
    return [
        ("id", job.id),
        ("name", job.name or ""),
        ("state", job.state.value),
        ("reason", reason_text(job)),
        ("not before", moment(job.not_before) if job.not_before else ""),
        ("recipe", job.recipe or ""),
        ("command", shlex.join(job.command)),
        ("inputs", inputs),
        ("queue", f"{job.queue}, priority {job.priority}"),
        ("needs", requirements_text(job)),
        ("submitted", moment(job.created_at)),
        ("ran", duration(summary.runtime_s) if summary.runtime_s else ""),
        ("step", f"{summary.step} of {summary.total_steps or '?'}" if summary.step is not None else ""),
        (
            "metrics",
            ", ".join(f"{name} {number(value)}" for name, value in (progress.metrics if progress else {}).items()),
        ),
        ("machine", job.machine_id or ""),
        ("webhook", job.webhook or ""),
        ("tags", ", ".join(f"{name}={value}" for name, value in job.tags.items())),
    ]


def _defaults(client: BatonClient, job: JobView) -> JsonObject:
    """What the job's recipe gives parameters that a job does not; nothing where it cannot be read."""
    if not job.recipe or not job.parameters:
        return {}
    try:
        recipe = lint(client.recipe(job.recipe).document).recipe
    except ApiError:
        return {}  # of an older control plane, or not there any more: then all are shown
    return recipe.filled({}) if recipe else {}


def _show_parameters(screen: Screen, job: JobView, defaults: JsonObject) -> None:
    """Those that tell this job from another one, and how many do not."""
    own = {name: value for name, value in job.parameters.items() if name not in defaults or defaults[name] != value}
    if own:
        screen.line("")
        screen.table(_PARAMETERS, ([name, _parameter(value)] for name, value in own.items()))
    others = len(job.parameters) - len(own)
    if others:
        screen.say(f"{count(others, 'other parameter')} as in {job.recipe}: baton recipes docs {job.recipe}")


def _parameter(value: object) -> str:
    """As `--set` takes it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _attempt_row(attempt: AttemptView) -> list[str]:
    lasted = duration(attempt.ended_at - attempt.started_at) if attempt.ended_at is not None else ""
    step = attempt.checkpoint_step if attempt.checkpoint_step is not None else attempt.resumed_step
    why = f"{attempt.reason.code} {attempt.reason.message}".strip() if attempt.reason else ""
    end = attempt.end.value if attempt.end else "running"
    return [
        str(attempt.epoch),
        attempt.machine_id or attempt.worker_id or "",
        moment(attempt.started_at)[:-3],
        lasted,
        end,
        "" if step is None else str(step),
        why,
    ]


def _remarks(current: bool, pinned: bool, damaged: bool, tag: str) -> str:
    words = (("current", current), ("pinned", pinned), ("damaged", damaged), (f"tag {tag}", bool(tag)))
    return ", ".join(word for word, holds in words if holds)


def _show_artifacts(screen: Screen, job: JobView) -> None:
    if job.artifacts:
        screen.line("")
        screen.table(_OUTPUTS, ([size(one.size_bytes or 0), one.path] for one in job.artifacts))
        screen.say(f"{count(len(job.artifacts), 'output')}; fetch with: baton fetch {job.id[:SHOWN_ID_CHARACTERS]} DIR")
