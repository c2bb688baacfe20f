"""`baton stop`, `pause`, `resume` and `retry`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from baton.contract.steering import Command, CommandKind, CommandRequest
from baton.contract.work import TransitionAnswer
from gpu_client.cli.core.errors import CliError
from gpu_client.cli.core.formats import moment
from gpu_client.cli.core.output import FOLDED, Column
from gpu_client.cli.core.session import AsJson, JobIdArgument, Session, full_id, session_of
from gpu_client.transport.api.client import BatonClient

Message = Annotated[str, typer.Option("--message", "-m", help="Why; kept in the job's history.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (stop, pause, resume, retry):
        app.command(command.__name__)(command)
    app.command("tell")(tell)


def stop(context: typer.Context, job_id: JobIdArgument, message: Message = "", as_json: AsJson = False) -> None:
    """Cancel a job, wherever it stands: final at once.

    Its checkpoints stay, and it can be retried.
    """
    _steer(session_of(context), job_id, lambda client, job: client.stop(job, message=message), as_json)


def pause(context: typer.Context, job_id: JobIdArgument, message: Message = "", as_json: AsJson = False) -> None:
    """Hold a job; a running one commits a checkpoint first."""
    _steer(session_of(context), job_id, lambda client, job: client.pause(job, message=message), as_json)


def resume(context: typer.Context, job_id: JobIdArgument, as_json: AsJson = False) -> None:
    """Let a paused job run again."""
    _steer(session_of(context), job_id, lambda client, job: client.resume(job), as_json)


def retry(
    context: typer.Context,
    job_id: JobIdArgument,
    from_step: Annotated[
        int | None, typer.Option(min=0, help="Resume from this checkpoint; 0 starts anew. Default: the newest.")
    ] = None,
    keep_counters: Annotated[
        bool, typer.Option("--keep-counters", help="Go on counting failures where they stand.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run an ended job again, under the same id."""
    _steer(
        session_of(context),
        job_id,
        lambda client, job: client.retry(job, from_step=from_step, reset_counters=not keep_counters),
        as_json,
    )


def _steer(
    session: Session, given: str, command: Callable[[BatonClient, str], TransitionAnswer], as_json: bool
) -> None:
    with session.client() as client:
        job_id = full_id(client, given)
        answer = command(client, job_id)
    if as_json:
        session.screen.json({"id": job_id, "state": answer.state, "not_before": answer.not_before})
        return
    waits = f", not before {moment(answer.not_before)}" if answer.not_before else ""
    session.screen.line(f"{job_id} is {answer.state}{waits}")


def tell(
    context: typer.Context,
    job_id: JobIdArgument,
    kind: Annotated[CommandKind | None, typer.Argument(help="Without it, the commands so far.")] = None,
    knob: Annotated[str | None, typer.Argument(help="Of set: such as lr.")] = None,
    *,
    value: Annotated[float | None, typer.Option(help="Of set: to that value.")] = None,
    factor: Annotated[float | None, typer.Option(help="Of set: by that factor.")] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Of stop: the job has failed then.")] = False,
    no_save: Annotated[bool, typer.Option("--no-save", help="Of stop: without a last checkpoint.")] = False,
    tag: Annotated[str | None, typer.Option(help="Of save.")] = None,
    expires_in_s: Annotated[int, typer.Option("--expires", min=1, help="Seconds; later it is not carried out.")] = 3600,
    as_json: AsJson = False,
) -> None:
    """Tell a training to stop, save, evaluate, set, pause.

    It does so after its present step, once, on whatever machine. `stop` ends it as complete, with its outputs; to
    cancel: baton stop.
    """
    session = session_of(context)
    if kind is None:
        with session.client() as client:
            given = client.commands(full_id(client, job_id)).commands
        if as_json:
            session.screen.json(given)
        else:
            rows = [[str(one.seq), _asked(one), moment(one.issued_at), one.status, _became(one)] for one in given]
            columns = (Column("command", right=True), "asked", "given", "state", Column("what became of it", FOLDED))
            session.screen.table(columns, rows)
        return
    request = _request(
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
        command = client.command(full_id(client, job_id), request)
    if as_json:
        session.screen.json(command)
    else:
        session.screen.line(f"command {command.seq}: {_asked(command)}. What became of it: baton tell {job_id}")


def _request(**given: Any) -> CommandRequest:
    try:
        return CommandRequest(**given)
    except ValidationError as error:
        reasons = [str(one["msg"]).removeprefix("Value error, ") for one in error.errors()]
        raise CliError(
            f"this is no command: {'; '.join(reasons)}", "Such as: baton tell ID set lr --factor 0.5"
        ) from error


def _asked(command: Command) -> str:
    said = command.arguments
    arguments = " ".join(f"{name}={said[name]}" for name in sorted(said))
    return f"{command.kind} {arguments}".rstrip()


def _became(command: Command) -> str:
    step = f"step {command.step:,}: " if command.step is not None else ""
    return f"{step}{command.message}"
