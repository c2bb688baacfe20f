"""Command `baton submit`: build a job from a file and options, submit it once."""

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
from pydantic_core import ErrorDetails

from baton.contract.document_models import explain_problem, locate
from baton.contract.fleets.plan import PlanRequest
from baton.contract.jobs.job import JobSubmit
from baton.contract.jobs.rent import fleet_of
from baton.contract.rules.document.loader import load
from baton.contract.worker.control import MAX_RULES_BYTES
from baton.contract.yaml_documents import Location, load_values
from gpu_client.cli.core.documents import format_fault, read_text, require_no_faults
from gpu_client.cli.core.errors import CliError, ExitCode
from gpu_client.cli.core.formats import parse_duration, require_finite
from gpu_client.cli.core.profiles import state_directory
from gpu_client.cli.core.session import AsJson, CliSession, connect, session_of
from gpu_client.cli.jobs.rented import rent_lines
from gpu_client.transport.api.client import BatonClient
from gpu_client.transport.errors import ApiError, BatonError

_SHOWN_PROBLEMS = 100


@dataclass(frozen=True, kw_only=True)
class SubmitOptions:
    """Options that extend or override a job file. None and () are omitted options."""

    recipe: str | None = None
    name: str | None = None
    queue: str | None = None
    priority: int | None = None
    webhook: str | None = None
    checkpoint_every: str | None = None
    rules: str | None = None
    rent: bool = False
    budget_usd: float | None = None
    max_usd_per_hour: float | None = None
    providers: Sequence[str] = ()
    settings: Sequence[str] = ()
    inputs: Sequence[str] = ()
    tags: Sequence[str] = ()
    rings: Sequence[str] = ()


def parse_job_file(text: str, name: str) -> dict[str, Any]:
    """Parse a JSON or YAML job file. Raises CliError with the position of a syntax error."""
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
        raise CliError(f"{name} has a number with too many digits") from error
    if not isinstance(found, dict):
        raise CliError(
            f"{name} does not describe a job",
            "Write fields like 'recipe: digits@1' or 'command: [...]'.",
        )
    return found


def build_job(document: dict[str, Any], options: SubmitOptions) -> JobSubmit:
    """Build a job; options override the document. Raises CliError with each invalid field."""
    wanted: dict[str, Any] = dict(document)
    for name in ("recipe", "name", "queue", "priority", "webhook", "rules"):
        value = getattr(options, name)
        if value is not None:
            wanted[name] = value
    if options.checkpoint_every is not None:
        every = options.checkpoint_every
        policy = {"checkpoint_every": every if every == "auto" else parse_duration(every)}
        wanted["policy"] = _merge(wanted.get("policy"), policy)
    settings, tags = dict(map(parse_setting, options.settings)), dict(map(_parse_tag, options.tags))
    lists = (("inputs", list(map(parse_input, options.inputs))), ("rings", list(options.rings)))
    rent = _build_rent(options, wanted.get("rent"))
    for name, added in (("parameters", settings), ("tags", tags), ("rent", rent), *lists):
        if added:
            wanted[name] = _merge(wanted.get(name), added)
    try:
        return JobSubmit.model_validate(wanted)
    except ValidationError as error:
        problems = _list_problems(wanted, error)
        if len(problems) == 1:
            raise CliError(f"invalid job: {problems[0]}") from error
        shown = problems[:_SHOWN_PROBLEMS]
        if len(problems) > len(shown):
            shown.append(f"and {len(problems) - len(shown)} more")
        raise CliError(f"invalid job: {len(problems)} problems", problems=shown) from error


def _build_rent(options: SubmitOptions, there: object) -> dict[str, Any]:
    """Return the fields of `rent` that the options set. Raises CliError if a necessary option is missing."""
    values = (("budget_usd", options.budget_usd), ("max_usd_per_hour", options.max_usd_per_hour))
    found: dict[str, Any] = {name: value for name, value in values if value is not None}
    if options.providers:
        found["providers"] = list(options.providers)
    if found and not options.rent and there is None:
        raise CliError("--budget, --max-usd-per-hour and --provider need --rent", "Add --rent.")
    missing = {"budget_usd", "providers"} - {*found, *(there if isinstance(there, dict) else ())}
    if options.rent and missing:
        raise CliError(
            "--rent needs a budget and a provider",
            "For example: baton submit job.yaml --rent --budget 5 --provider vast",
        )
    return found


def _merge(there: Any, added: Any) -> Any:
    """Merge dicts or lists. Keeps a present value of another type for the validation to refuse."""
    if there is None:
        return added
    if isinstance(there, dict) and isinstance(added, dict):
        return {**there, **added}
    if isinstance(there, list) and isinstance(added, list):
        return [*there, *added]
    return there


def parse_setting(text: str) -> tuple[str, Any]:
    """Parse `steps=600` to ("steps", 600); a value that is not JSON is text."""
    name, value = _split_pair(text, "--set")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def parse_input(text: str) -> dict[str, str]:
    """Parse `PREFIX` or `PREFIX:INTO`; INTO is a folder below the job's data directory."""
    prefix, _, into = text.partition(":")
    if not prefix:
        raise CliError(f"--input {text[:80]!r} has no prefix", "Write the input like digits/ or digits/:digits")
    return {"prefix": prefix, "into": into} if into else {"prefix": prefix}


def _parse_tag(text: str) -> tuple[str, str]:
    return _split_pair(text, "--tag")


def _split_pair(text: str, option: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise CliError(f"{option} {text[:80]!r} is not NAME=VALUE")
    return name.strip(), value


def _list_problems(document: dict[str, Any], error: ValidationError) -> list[str]:
    """List the problems with their locations; the failed alternatives of a union are one problem."""
    found: dict[Location, list[ErrorDetails]] = {}
    for problem in error.errors(include_url=False):
        found.setdefault(locate(document, problem["loc"]), []).append(problem)
    listed = []
    for place, problems in found.items():
        text = "; or: ".join(str(problem["msg"]).removeprefix("Value error, ") for problem in problems)
        if len(problems) == 1 and problems[0]["type"] != "value_error":
            text = _explain(problems[0], place)
        listed.append(f"{'.'.join(map(str, place))}: {text}" if place else text)
    return listed


def _explain(problem: ErrorDetails, place: Location) -> str:
    if place == ("recipe",) and problem["type"] == "string_pattern_mismatch":
        name = str(problem["input"])[:80]
        return f"{name!r} is not NAME@VERSION, as in digits@1. List the recipes with: baton recipes list"
    names = "Use up to 63 lower-case letters, digits and hyphens, a letter or digit first."
    reason, remedy = explain_problem(dict(problem), place, JobSubmit, kind="jobs", names=names)
    return f"{reason}. {remedy}"


KEY_LIFETIME_S = 24 * 3600
"""Lifetime of an idempotency key in seconds; an equal submission after a day is a new job."""


@contextmanager
def idempotency_key(directory: Path, *asked: str) -> Iterator[str]:
    """Yield the idempotency key of a submission; keep the key on disk if the block ends without an answer.

    The key is stored before the call and deleted after an answer, so that a repeated command after an interruption
    submits the same job. `asked` identifies the submission. Two concurrent processes get two keys. Raises CliError.
    """
    path = directory / hashlib.sha256("\n".join(asked).encode()).hexdigest()
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise CliError(
            f"the idempotency key cannot be written to {directory}: {error.strerror}",
            "Set XDG_STATE_HOME to a writable directory.",
            exit_code=ExitCode.FAILED,
        ) from error
    with os.fdopen(descriptor, "r+") as file:
        if not _try_lock(descriptor):
            yield uuid.uuid4().hex
            return
        key = file.read(64).strip()
        too_old = time.time() - os.fstat(descriptor).st_mtime > KEY_LIFETIME_S
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


def _try_lock(descriptor: int) -> bool:
    """Lock the key file; return False if another process has locked or deleted it."""
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
        str | None,
        typer.Argument(metavar="FILE", help="Job file, JSON or YAML; - reads standard input.", show_default=False),
    ] = None,
    *,
    recipe: Annotated[str | None, typer.Option(help="Recipe, for example digits@1.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Parameter of the recipe; repeatable.")
    ] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", metavar="PREFIX[:INTO]", help="Stored files that the job reads; repeatable."),
    ] = None,
    queue: Annotated[str | None, typer.Option(help="Queue of the job. Default: default.")] = None,
    priority: Annotated[int | None, typer.Option(help="Priority, 0 to 100; higher runs first. Default: 50.")] = None,
    name: Annotated[str | None, typer.Option(help="Display name of the job.")] = None,
    checkpoint_every: Annotated[
        str | None,
        typer.Option(
            metavar="TIME|auto",
            help="Checkpoint interval, for example 15m or auto; needs a script that uses baton.Session.",
        ),
    ] = None,
    rules: Annotated[Path | None, typer.Option(metavar="FILE", help="Rule file: docs/rules.md.")] = None,
    rent: Annotated[
        bool, typer.Option("--rent", help="Rent machines for this job alone, one for each node; they end with the job.")
    ] = False,
    budget: Annotated[
        float | None, typer.Option(metavar="USD", help="With --rent: the most that its machines cost, boot included.")
    ] = None,
    max_usd_per_hour: Annotated[
        float | None, typer.Option(metavar="USD", help="With --rent: price cap of each machine.")
    ] = None,
    providers: Annotated[
        list[str] | None,
        typer.Option("--provider", metavar="NAME", help="With --rent: provider of the machines; repeatable."),
    ] = None,
    webhook: Annotated[str | None, typer.Option(help="Id of a webhook that receives this job's events.")] = None,
    tags: Annotated[
        list[str] | None, typer.Option("--tag", metavar="NAME=VALUE", help="Tag of the job; repeatable.")
    ] = None,
    rings: Annotated[
        list[str] | None,
        typer.Option("--ring", metavar="NAME", help="Ring baton:NAME that the job uses; repeatable."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Submit a job and print its id.

    After an interruption, repeat the command: it does not submit the job twice.
    """
    session = session_of(context)
    if file is None and recipe is None:
        raise CliError("nothing to submit", "Give a file or a recipe: baton submit --recipe digits@1 --input digits/")
    options = SubmitOptions(
        recipe=recipe,
        name=name,
        queue=queue,
        priority=priority,
        webhook=webhook,
        checkpoint_every=checkpoint_every,
        rules=_read_rules(rules) if rules is not None else None,
        rent=rent,
        budget_usd=require_finite(budget, "--budget"),
        max_usd_per_hour=require_finite(max_usd_per_hour, "--max-usd-per-hour"),
        providers=providers or (),
        settings=settings or (),
        inputs=inputs or (),
        tags=tags or (),
        rings=rings or (),
    )
    job = build_job(parse_job_file(_read(file), file) if file is not None else {}, options)
    if job.rules:
        for warning in load(job.rules, max_silence_s=job.policy.max_silence_s).warnings:
            session.output.note(f"{format_fault(rules or Path(file or 'rules'), warning)} (warning)")
    profile = session.profile()
    asked = (profile.url, *profile.api_key.split("_")[:2], job.model_dump_json(exclude_unset=True))
    with connect(profile) as client:
        with idempotency_key(state_directory(session.environ) / "submissions", *asked) as key:
            submitted = client.submit(job, idempotency_key=key)
            if as_json:
                session.output.json(submitted)
            else:
                session.output.raw(submitted.id)
        # Prices take seconds, and an interruption of them must not keep the key: the submission is answered.
        if job.rent is not None and not as_json:
            _print_rent(session, client, job, fleet_of(submitted.id))


def _print_rent(session: CliSession, client: BatonClient, job: JobSubmit, name: str) -> None:
    """Print on standard error what the job rents and at which price, or why nothing can be rented now."""
    try:
        # The job of the request stands for the stored one, which the index of waiting jobs may not list yet.
        waiting = job.model_copy(update={"rent": None, "queue": name})
        fleet = client.fleet(name)
        plan = client.plan_fleet(PlanRequest(fleet=fleet.spec, job=waiting))
        if plan.alive and not fleet.machines:
            fleet = client.fleet(name)
    except BatonError as error:
        session.output.note(f"The job is submitted; what it rents cannot be shown: {error}")
        return
    for line in rent_lines(plan, fleet):
        session.output.note(line)


def _read_rules(file: Path) -> str:
    """Read a rule document. Raises CliError with its faults."""
    text = read_text(file, "a rule document", MAX_RULES_BYTES)
    require_no_faults(file, load(text).faults)
    return text


def _read(file: str) -> str:
    """Read a job file or standard input. Raises CliError."""
    if file == "-" and sys.stdin is None:
        raise CliError("there is no standard input", "Give a file, or pipe the job to this command.")
    return read_text(Path(file), "a job", MAX_FILE_BYTES, sys.stdin.buffer if file == "-" else None)
