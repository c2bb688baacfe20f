"""Commands `baton submit`: build a job from a file and options, and submit it once."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from pydantic import ValidationError

from baton.contract.documents import load_values
from baton.contract.jobs import JobSubmit
from baton.contract.rules.document.loader import load
from baton.contract.steering import MAX_RULES_BYTES
from gpu_client.cli.core.documents import read_text, require_sound, told
from gpu_client.cli.core.errors import CliError, ExitCode
from gpu_client.cli.core.formats import parse_duration
from gpu_client.cli.core.profiles import state_directory
from gpu_client.cli.core.session import AsJson, connect, session_of
from gpu_client.transport.errors import ApiError

_SHOWN_PROBLEMS = 100


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line adds to a document, or says instead of one. None and empty mean: not said."""

    recipe: str | None = None
    name: str | None = None
    queue: str | None = None
    priority: int | None = None
    webhook: str | None = None
    checkpoint_every: str | None = None
    rules: str | None = None
    settings: Sequence[str] = ()
    inputs: Sequence[str] = ()
    tags: Sequence[str] = ()
    rings: Sequence[str] = ()


def read_document(text: str, name: str) -> dict[str, Any]:
    """The job in a JSON or YAML file. Raises CliError saying where it is not."""
    try:
        found = json.loads(text) if name.endswith(".json") else load_values(text)
    except json.JSONDecodeError as error:
        raise CliError(f"{name} is not JSON: {error.msg} in line {error.lineno}, column {error.colno}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise CliError(f"{name} is not YAML: {getattr(error, 'problem', None) or 'unreadable'}{place}") from error
    except RecursionError as error:
        raise CliError(f"{name} is nested too deeply") from error
    except ValueError as error:
        raise CliError(f"{name} has a number that is too long to be one") from error
    if not isinstance(found, dict):
        raise CliError(f"{name} does not describe a job", "Write fields like 'recipe: digits@1' or 'command: [...]'.")
    return found


def build_job(document: dict[str, Any], options: Options) -> JobSubmit:
    """The job to submit; options win over the document. Raises CliError naming each wrong field."""
    wanted: dict[str, Any] = dict(document)
    for name in ("recipe", "name", "queue", "priority", "webhook", "rules"):
        value = getattr(options, name)
        if value is not None:
            wanted[name] = value
    if options.checkpoint_every is not None:
        every = options.checkpoint_every
        policy = {"checkpoint_every": every if every == "auto" else parse_duration(every)}
        wanted["policy"] = _joined(wanted.get("policy"), policy)
    settings, tags = dict(map(parse_setting, options.settings)), dict(map(_parse_tag, options.tags))
    lists = (("inputs", list(map(parse_input, options.inputs))), ("rings", list(options.rings)))
    for name, added in (("parameters", settings), ("tags", tags), *lists):
        if added:
            wanted[name] = _joined(wanted.get(name), added)
    try:
        return JobSubmit.model_validate(wanted)
    except ValidationError as error:
        problems = _problems_in(wanted, error)
        if len(problems) == 1:
            raise CliError(f"this is no job: {problems[0]}") from error
        shown = problems[:_SHOWN_PROBLEMS]
        if len(problems) > len(shown):
            shown.append(f"and {len(problems) - len(shown)} more")
        raise CliError(f"this is no job: {len(problems)} things are wrong", problems=shown) from error


def _joined(there: Any, added: Any) -> Any:
    """Both together. What is there and of another kind stays alone: it is wrong, and refused as such."""
    if there is None:
        return added
    if isinstance(there, dict) and isinstance(added, dict):
        return {**there, **added}
    if isinstance(there, list) and isinstance(added, list):
        return [*there, *added]
    return there


def parse_setting(text: str) -> tuple[str, Any]:
    """`steps=600` as ("steps", 600): a value that is JSON is taken as such, any other as text."""
    name, value = _pair(text, "--set")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def parse_input(text: str) -> dict[str, str]:
    """`PREFIX` or `PREFIX:INTO`, INTO being a folder below the job's data directory."""
    prefix, _, into = text.partition(":")
    if not prefix:
        raise CliError(f"--input {text[:80]!r} names no prefix", "Write it like digits/ or digits/:digits")
    return {"prefix": prefix, "into": into} if into else {"prefix": prefix}


def _parse_tag(text: str) -> tuple[str, str]:
    return _pair(text, "--tag")


def _pair(text: str, option: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise CliError(f"{option} {text[:80]!r} is not NAME=VALUE")
    return name.strip(), value


def _problems_in(document: dict[str, Any], error: ValidationError) -> list[str]:
    """Each with its place. What may be of several kinds, and is of none, is one problem."""
    found: dict[str, list[str]] = {}
    for problem in error.errors(include_url=False):
        said = str(problem["msg"]).removeprefix("Value error, ")
        if problem["loc"] == ("recipe",) and problem["type"] == "string_pattern_mismatch":
            said = f"{str(problem['input'])[:80]!r} is not NAME@VERSION, as in digits@1. See: baton recipes list"
        found.setdefault(_place(document, problem["loc"]), []).append(said)
    return [f"{place}: {'; or: '.join(said)}" if place else "; ".join(said) for place, said in found.items()]


def _place(value: Any, loc: Sequence[int | str]) -> str:
    """Where in a document, without the names of kinds that pydantic adds behind it."""
    parts: list[str] = []
    for part in loc:
        if isinstance(value, dict):
            value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int):
            value = value[part] if part < len(value) else None
        else:
            break
        parts.append(str(part))
    return ".".join(parts)


FORGOTTEN_AFTER_S = 24 * 3600
"""The same job a day later is meant as another one."""


@contextmanager
def idempotency_key(directory: Path, *asked: str) -> Iterator[str]:
    """The key for submitting what `asked` describes; kept if the block ends without an answer.

    Raises CliError if it cannot be written down. Two processes that submit the same at once get two keys.
    """
    path = directory / hashlib.sha256("\n".join(asked).encode()).hexdigest()
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise CliError(
            f"the submission's key cannot be written to {directory}: {error.strerror}",
            "Set XDG_STATE_HOME to a directory that can be.",
            exit_code=ExitCode.FAILED,
        ) from error
    with os.fdopen(descriptor, "r+") as file:
        if not _ours(descriptor):
            yield uuid.uuid4().hex
            return
        key = file.read(64).strip()
        too_old = time.time() - os.fstat(descriptor).st_mtime > FORGOTTEN_AFTER_S
        if too_old or not re.fullmatch("[0-9a-f]{32}", key):
            key = uuid.uuid4().hex
            file.seek(0)
            file.truncate()
            file.write(key)
            file.flush()
        try:
            yield key
        except ApiError:
            path.unlink(missing_ok=True)
            raise
        path.unlink(missing_ok=True)


def _ours(descriptor: int) -> bool:
    """Whether no other process is submitting the same: neither still, nor just now while we waited."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return os.fstat(descriptor).st_nlink > 0


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
