"""A job as written on the command line or in a file, made into what the API takes. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import ValidationError

from baton.contract.documents import load_values
from baton.contract.jobs import JobSubmit
from gpu_client.cli.errors import CliError
from gpu_client.cli.formats import parse_duration

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
