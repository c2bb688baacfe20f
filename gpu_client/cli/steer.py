"""`baton stop`, `pause`, `resume` and `retry`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer
from gpu_client.cli.formats import moment
from gpu_client.cli.session import AsJson, JobIdArgument, Session, full_id, session_of

from baton.contract.work import TransitionAnswer
from gpu_client.transport.api.client import BatonClient

Message = Annotated[str, typer.Option("--message", "-m", help="Why; kept in the job's history.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (stop, pause, resume, retry):
        app.command(command.__name__)(command)


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
