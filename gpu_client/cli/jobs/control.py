"""Commands `baton stop`, `pause`, `resume`, `retry` and `tell`: change a job's state, or command a training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from baton.contract.jobs.job import JobState
from baton.contract.jobs.rent import fleet_of
from baton.contract.worker.calls import TransitionAnswer
from baton.contract.worker.control import Command, CommandKind, CommandRequest
from gpu_client.cli.core.errors import CliError
from gpu_client.cli.core.formats import moment
from gpu_client.cli.core.output import FOLDED, TableColumn
from gpu_client.cli.core.session import AsJson, CliSession, JobIdArgument, resolve_job_id, session_of
from gpu_client.cli.fleet.view import usd
from gpu_client.transport.api.client import BatonClient

Message = Annotated[str, typer.Option("--message", "-m", help="Reason, stored in the job's history.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (stop, pause, resume, retry):
        app.command(command.__name__)(command)
    app.command("tell")(send_command)


def stop(context: typer.Context, job_id: JobIdArgument, message: Message = "", as_json: AsJson = False) -> None:
    """Cancel a job immediately, in any state.

    The job keeps its checkpoints and can be retried.
    """
    _transition(session_of(context), job_id, lambda client, job: client.stop(job, message=message), as_json)


def pause(context: typer.Context, job_id: JobIdArgument, message: Message = "", as_json: AsJson = False) -> None:
    """Pause a job; a running job commits a checkpoint first."""
    _transition(
        session_of(context),
        job_id,
        lambda client, job: client.pause(job, message=message),
        as_json,
        if_running=" until its checkpoint is committed, then paused",
    )


def resume(context: typer.Context, job_id: JobIdArgument, as_json: AsJson = False) -> None:
    """Resume a paused job."""
    _transition(session_of(context), job_id, lambda client, job: client.resume(job), as_json)


def retry(
    context: typer.Context,
    job_id: JobIdArgument,
    *,
    from_step: Annotated[
        int | None,
        typer.Option(
            min=0, help="Step of the checkpoint to resume from; 0 starts from the beginning. Default: the newest."
        ),
    ] = None,
    keep_counters: Annotated[
        bool, typer.Option("--keep-counters", help="Keep the counters of failures and interruptions.")
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="Retry also a complete job, which rents its machine once more.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run an ended job again under the same id."""

    def command(client: BatonClient, job: str) -> TransitionAnswer:
        if not yes:
            _require_no_second_rent(client, job)
        return client.retry(job, from_step=from_step, reset_counters=not keep_counters)

    _transition(session_of(context), job_id, command, as_json)


def _require_no_second_rent(client: BatonClient, job_id: str) -> None:
    """Refuse a complete job that rents its own machine: nothing is left to do, and the retry costs money."""
    job = client.get_job(job_id)
    if job.rent is None or job.state is not JobState.COMPLETE:
        return
    bounds = client.fleet(fleet_of(job_id)).bounds
    left = min(max(0.0, one.cap_usd - one.spent_usd - one.reserved_usd) for one in bounds)
    raise CliError(
        f"{job_id} is complete, and a retry rents a machine again, for up to {usd(left)} USD",
        f"To do so: baton retry {job_id} --yes",
    )


def _transition(
    session: CliSession,
    given: str,
    command: Callable[[BatonClient, str], TransitionAnswer],
    as_json: bool,
    *,
    if_running: str = "",
) -> None:
    """Change the state of a job and print the new one. if_running: addition for a job that still runs."""
    with session.client() as client:
        job_id = resolve_job_id(client, given)
        answer = command(client, job_id)
    if as_json:
        session.output.json({"id": job_id, "state": answer.state, "not_before": answer.not_before})
        return
    waits = f", not before {moment(answer.not_before)}" if answer.not_before else ""
    runs = if_running if answer.state == JobState.RUNNING else ""
    session.output.line(f"{job_id} is {answer.state}{runs}{waits}")


def send_command(
    context: typer.Context,
    job_id: JobIdArgument,
    kind: Annotated[CommandKind | None, typer.Argument(help="Command. Default: list the commands so far.")] = None,
    knob: Annotated[str | None, typer.Argument(help="For set: name of the knob, for example lr.")] = None,
    *,
    value: Annotated[float | None, typer.Option(help="For set: new value.")] = None,
    factor: Annotated[float | None, typer.Option(help="For set: factor of the present value.")] = None,
    failed: Annotated[bool, typer.Option("--failed", help="For stop: end the job as failed.")] = False,
    no_save: Annotated[bool, typer.Option("--no-save", help="For stop: do not save a final checkpoint.")] = False,
    tag: Annotated[str | None, typer.Option(help="For save: tag of the checkpoint.")] = None,
    expires_in_s: Annotated[
        int, typer.Option("--expires", min=1, help="Seconds until an undelivered command expires.")
    ] = 3600,
    as_json: AsJson = False,
) -> None:
    """Send a command to a training: stop, save, evaluate, set or pause.

    The training executes the command once, after its present step, also on another machine. `stop` ends the job as
    complete with its outputs. To cancel a job: baton stop.
    """
    session = session_of(context)
    if kind is None:
        with session.client() as client:
            given = client.commands(resolve_job_id(client, job_id)).commands
        if as_json:
            session.output.json(given)
        else:
            rows = [
                [str(one.seq), _format_command(one), moment(one.issued_at), one.status, _format_outcome(one)]
                for one in given
            ]
            columns = (
                TableColumn("#", right=True),
                "command",
                "sent",
                "state",
                TableColumn("result", FOLDED),
            )
            session.output.table(columns, rows)
        return
    request = _build_request(
        kind=kind,
        knob=knob,
        value=value,
        factor=factor,
        tag=tag,
        outcome="failed" if failed else None,
        save=False if no_save else None,
        expires_in_s=expires_in_s,
    )
    with session.client() as client:
        command = client.command(resolve_job_id(client, job_id), request)
    if as_json:
        session.output.json(command)
    else:
        session.output.line(
            f"command {command.seq}: {_format_command(command)}. To see the result: baton tell {job_id}"
        )


def _build_request(**given: Any) -> CommandRequest:
    try:
        return CommandRequest(**given)
    except ValidationError as error:
        reasons = [str(one["msg"]).removeprefix("Value error, ") for one in error.errors()]
        raise CliError(
            f"invalid command: {'; '.join(reasons)}", "Example: baton tell ID set lr --factor 0.5"
        ) from error


def _format_command(command: Command) -> str:
    arguments = " ".join(f"{name}={value}" for name, value in sorted(command.arguments.items()))
    return f"{command.kind} {arguments}".rstrip()


def _format_outcome(command: Command) -> str:
    step = f"step {command.step:,}: " if command.step is not None else ""
    return f"{step}{command.message}"
