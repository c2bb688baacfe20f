"""`baton submit`: a job from a file, or from the command line alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from baton.contract.rules.document import load
from baton.contract.steering import MAX_RULES_BYTES
from gpu_client.cli.documents import read_text, require_sound, told
from gpu_client.cli.errors import CliError
from gpu_client.cli.pending import idempotency_key
from gpu_client.cli.profiles import state_directory
from gpu_client.cli.session import AsJson, connect, session_of
from gpu_client.cli.submission import Options, build_job, read_document

MAX_FILE_BYTES = 1024 * 1024


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("submit")(submit)


def submit(
    context: typer.Context,
    file: Annotated[
        str | None, typer.Argument(metavar="FILE", help="JSON or YAML; - reads standard input.", show_default=False)
    ] = None,
    *,
    recipe: Annotated[str | None, typer.Option(help="Such as digits@1.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A parameter; may be repeated.")
    ] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", metavar="PREFIX[:INTO]", help="Stored files that the job reads; may be repeated."),
    ] = None,
    queue: Annotated[str | None, typer.Option(help="Default: default.")] = None,
    priority: Annotated[int | None, typer.Option(help="0 to 100; higher first. Default: 50.")] = None,
    name: Annotated[str | None, typer.Option(help="For people.")] = None,
    checkpoint_every: Annotated[
        str | None,
        typer.Option(metavar="TIME|auto", help="Ask a script with our session for checkpoints so often: 15m, auto."),
    ] = None,
    rules: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What watches and steers the training: docs/rules.md.")
    ] = None,
    webhook: Annotated[str | None, typer.Option(help="Id of one that is told of this job's events too.")] = None,
    tags: Annotated[list[str] | None, typer.Option("--tag", metavar="NAME=VALUE", help="May be repeated.")] = None,
    rings: Annotated[
        list[str] | None,
        typer.Option("--ring", metavar="NAME", help="A ring baton:NAME that the job uses; may be repeated."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Submit a job and print its id.

    Repeated after an interruption, the same command does not submit it twice.
    """
    session = session_of(context)
    if file is None and recipe is None:
        raise CliError("nothing to submit", "Name a file, or a recipe: baton submit --recipe digits@1 --input digits/")
    options = Options(
        recipe=recipe,
        name=name,
        queue=queue,
        priority=priority,
        webhook=webhook,
        checkpoint_every=checkpoint_every,
        rules=_rules(rules) if rules is not None else None,
        settings=settings or (),
        inputs=inputs or (),
        tags=tags or (),
        rings=rings or (),
    )
    job = build_job(read_document(_read(file), file) if file is not None else {}, options)
    if job.rules:
        for warning in load(job.rules, max_silence_s=job.policy.max_silence_s).warnings:
            session.screen.say(f"{told(rules or Path(file or 'rules'), warning)} (warning)")
    profile = session.profile()
    asked = (profile.url, *profile.api_key.split("_")[:2], job.model_dump_json(exclude_unset=True))
    with (
        connect(profile) as client,
        idempotency_key(state_directory(session.environ) / "submissions", *asked) as key,
    ):
        submitted = client.submit(job, idempotency_key=key)
        if as_json:
            session.screen.json(submitted)
        else:
            session.screen.raw(submitted.id)


def _rules(file: Path) -> str:
    """A rule document without faults. Raises CliError."""
    text = read_text(file, "a rule document", MAX_RULES_BYTES)
    require_sound(file, load(text).faults)
    return text


def _read(file: str) -> str:
    """The text of a job file. Raises CliError."""
    try:
        if file == "-" and sys.stdin is None:
            raise CliError("there is no standard input", "Name a file, or pipe the job in.")
        if file == "-":
            data = sys.stdin.buffer.read(MAX_FILE_BYTES + 1)
        else:
            with Path(file).open("rb") as opened:
                data = opened.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise CliError(f"{file} is larger than a job can be")
        return data.decode("utf-8-sig")
    except OSError as error:
        raise CliError(f"{file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CliError(f"{file} is not UTF-8 text") from error
