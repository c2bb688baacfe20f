"""Commands `baton jobs` and `baton show`."""

from __future__ import annotations

import json
import shlex
from typing import Annotated

import typer

from baton.contract.base import JsonObject
from baton.contract.elastic.world import WorldView
from baton.contract.fleets.job_machines import JobMachines
from baton.contract.jobs.history import AttemptView
from baton.contract.jobs.job import JobState, JobView
from baton.contract.recipes.lint import lint
from gpu_client.cli.core.errors import CliError
from gpu_client.cli.core.formats import age, count, duration, moment, number, size
from gpu_client.cli.core.output import CUT, FOLDED, CommandOutput, TableColumn, as_data
from gpu_client.cli.core.session import (
    SHOWN_ID_CHARACTERS,
    AsJson,
    CliSession,
    JobIdArgument,
    PricePerHour,
    find_job,
    list_attempts,
    session_of,
)
from gpu_client.cli.fleet.view import usd
from gpu_client.cli.jobs.explain import requirements_text
from gpu_client.cli.jobs.goodput import goodput_lines, total_of
from gpu_client.cli.jobs.rented import cost_usd, running_sentence, waiting_sentences
from gpu_client.cli.jobs.summary import reason_text, step_text, summarize
from gpu_client.cli.world.view import NODES, node_rows, watch_text
from gpu_client.transport.api.calls import pages
from gpu_client.transport.api.client import BatonClient
from gpu_client.transport.errors import ApiError

_COLUMNS = (
    "id",
    "state",
    TableColumn("job", CUT),
    TableColumn("queue", CUT),
    TableColumn("step", right=True),
    TableColumn("attempts", right=True),
    "age",
    TableColumn("reason", CUT),
)
_ATTEMPTS = (
    TableColumn("#", right=True),
    TableColumn("machine", FOLDED),
    "started",
    "duration",
    "end",
    TableColumn("step", right=True),
    TableColumn("reason", FOLDED),
)
_CHECKPOINTS = (TableColumn("step", right=True), "committed", TableColumn("size", right=True), "checkpoint")
_OUTPUTS = (TableColumn("size", right=True), TableColumn("output", FOLDED))
_PARAMETERS = ("parameter", TableColumn("value", FOLDED))
_PER_PAGE = 1000
DEFAULT_LIMIT = 50
WATCH_S = 2.0
_MAX_TITLE_CHARACTERS = 60
_USUAL_QUEUE = "default"
"""Queue that needs no column if all listed jobs belong to it."""


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("jobs")(jobs)
    app.command("show")(show)


def jobs(
    context: typer.Context,
    *,
    status: Annotated[
        JobState | None, typer.Option(metavar="STATE", help=f"List only jobs in this state: {', '.join(JobState)}.")
    ] = None,
    queue: Annotated[str | None, typer.Option(help="List only jobs of this queue.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help=f"Number of jobs to list. Default: {DEFAULT_LIMIT}.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="List all jobs.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Update the list every two seconds until Ctrl-C.")] = False,
    as_json: AsJson = False,
) -> None:
    """List jobs, newest first."""
    session = session_of(context)
    if everything and limit is not None:
        raise CliError("--all and --limit exclude each other", "Give one of the two.")
    wanted = None if everything else limit or DEFAULT_LIMIT
    with session.client() as client:
        while True:
            found, more = list_newest_jobs(client, status, queue, wanted)
            if as_json:
                (session.output.json_line if watch else session.output.json)(found)
            else:
                _show_list(session, found, clear=watch)
                if more:
                    session.output.note(f"{count(len(found), 'job')} listed, newest first. To list all: --all")
            if not watch:
                return
            session.sleep(WATCH_S)


def list_newest_jobs(
    client: BatonClient, status: JobState | None, queue: str | None, limit: int | None
) -> tuple[list[JobView], bool]:
    """Return the newest jobs, newest first (limit None: all), and True if more exist."""
    found: list[JobView] = []
    cursor: str | None = None
    while True:
        # The API filters a page by queue after reading, therefore a short page would find few jobs.
        size = _PER_PAGE if limit is None or queue is not None else min(limit - len(found), _PER_PAGE)
        page = client.jobs(status=status, queue=queue, limit=size, cursor=cursor, newest_first=True)
        found += page.jobs
        cursor = page.next_cursor
        if cursor is None or (limit is not None and len(found) >= limit):
            return found[:limit], cursor is not None or len(found) > (limit or len(found))


def _show_list(session: CliSession, found: list[JobView], *, clear: bool) -> None:
    output = session.output
    if clear:
        output.clear()
    now = session.clock()
    all_default = all(job.queue == _USUAL_QUEUE for job in found)
    output.table(_COLUMNS, (_row(job, now, with_queue=not all_default) for job in found))
    if not found:
        output.note("No jobs.")


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
    price_per_hour: PricePerHour = None,
    as_json: AsJson = False,
) -> None:
    """Show parameters, attempts, checkpoints and outputs of a job.

    Counts the parameters with the recipe's default without listing them; --json lists all parameters.
    """
    session = session_of(context)
    price = session.price_per_hour(price_per_hour)
    with session.client() as client:
        job = find_job(client, job_id)
        defaults = {} if as_json else _defaults(client, job)
        attempts = list_attempts(client, job.id)
        machines = client.job_machines(job.id)
        world = client.world(job.id) if job.nodes is not None else None
        checkpoints = [
            one for page in pages(lambda c: client.checkpoints(job.id, cursor=c)) for one in page.checkpoints
        ]
    if as_json:
        more = {
            "attempts": attempts,
            "checkpoints": checkpoints,
            "goodput": total_of(attempts),
            "rented": machines.attempts,
            "usd": machines.usd,
            "cost_usd": cost_usd(machines),
            **({} if world is None else {"world": world}),
        }
        session.output.json({**as_data(job), **as_data(more)})
        return
    output = session.output
    details = _details(job, attempts, world)
    output.fields([*details, *_rented(job, machines), *goodput_lines(total_of(attempts), price)])
    _show_parameters(output, job, defaults)
    if attempts:
        output.line("")
        output.table(_ATTEMPTS, map(_attempt_row, attempts))
    if world is not None and world.nodes:
        output.line("")
        output.table(NODES, node_rows(world, session.clock()))
    if checkpoints:
        output.line("")
        rows = [
            [
                str(one.step),
                moment(one.committed_at),
                size(one.total_bytes),
                _format_flags(one.current, one.pinned, one.damaged, one.tag),
            ]
            for one in checkpoints
        ]
        output.table(_CHECKPOINTS, rows)
    _show_artifacts(output, job)


def _details(job: JobView, attempts: list[AttemptView], world: WorldView | None) -> list[tuple[str, str]]:
    summary = summarize(job, attempts[-1] if attempts else None, None, nodes=attempts)
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
        ("nodes", "" if world is None else f"{watch_text(world)}; begins with {world.min}"),
        ("submitted", moment(job.created_at)),
        ("ran", duration(summary.runtime_s) if summary.runtime_s else ""),
        ("step", step_text(summary)),
        (
            "metrics",
            ", ".join(f"{name} {number(value)}" for name, value in (progress.metrics if progress else {}).items()),
        ),
        ("machine", job.machine_id or ""),
        ("webhook", job.webhook or ""),
        ("tags", ", ".join(f"{name}={value}" for name, value in job.tags.items())),
    ]


def _rented(job: JobView, found: JobMachines) -> list[tuple[str, str]]:
    """Return which fleets serve a waiting job, which rented machine runs it, and its cost so far."""
    waits = waiting_sentences(found) if job.state is JobState.PENDING else []
    one_machine = job.state is JobState.RUNNING and job.nodes is None
    running = running_sentence(found, job.epoch) if one_machine else ""
    budget = f" of {usd(job.rent.budget_usd)} USD" if job.rent else ""
    cost = f"{usd(cost_usd(found))} USD on rented machines{budget}" if found.attempts or cost_usd(found) else ""
    return [("waits", " ".join(waits)), ("rented", running), ("cost", cost)]


def _defaults(client: BatonClient, job: JobView) -> JsonObject:
    """Return the parameter defaults of the job's recipe; {} if the recipe cannot be read."""
    if not job.recipe or not job.parameters:
        return {}
    try:
        recipe = lint(client.recipe(job.recipe).document).recipe
    except ApiError:
        return {}  # The recipe was deleted: list all parameters.
    return recipe.filled({}) if recipe else {}


def _show_parameters(output: CommandOutput, job: JobView, defaults: JsonObject) -> None:
    """Print the parameters that differ from the recipe, and the number of the others."""
    own = {name: value for name, value in job.parameters.items() if name not in defaults or defaults[name] != value}
    if own:
        output.line("")
        output.table(_PARAMETERS, ([name, _parameter(value)] for name, value in own.items()))
    others = len(job.parameters) - len(own)
    if others:
        output.note(
            f"{count(others, 'other parameter')} with the default of {job.recipe}: baton recipes docs {job.recipe}"
        )


def _parameter(value: object) -> str:
    """Format a value as `--set` accepts it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _attempt_row(attempt: AttemptView) -> list[str]:
    lasted = duration(attempt.ended_at - attempt.started_at) if attempt.ended_at is not None else ""
    step = attempt.checkpoint_step if attempt.checkpoint_step is not None else attempt.resumed_step
    why = f"{attempt.reason.code} {attempt.reason.message}".strip() if attempt.reason else ""
    end = attempt.end.value if attempt.end else "running"
    return [
        str(attempt.epoch) if attempt.seat is None else f"node {attempt.seat}, {attempt.epoch}",
        attempt.machine_id or attempt.worker_id or "",
        moment(attempt.started_at)[:-3],
        lasted,
        end,
        "" if step is None else str(step),
        why,
    ]


def _format_flags(current: bool, pinned: bool, damaged: bool, tag: str) -> str:
    words = (("current", current), ("pinned", pinned), ("damaged", damaged), (f"tag {tag}", bool(tag)))
    return ", ".join(word for word, applies in words if applies)


def _show_artifacts(output: CommandOutput, job: JobView) -> None:
    if job.artifacts:
        output.line("")
        output.table(_OUTPUTS, ([size(one.size_bytes or 0), one.path] for one in job.artifacts))
        output.note(
            f"{count(len(job.artifacts), 'output')}; fetch with: baton fetch {job.id[:SHOWN_ID_CHARACTERS]} DIR"
        )
