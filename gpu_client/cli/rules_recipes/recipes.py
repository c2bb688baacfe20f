"""Command group `baton recipes`: check, register, document and run recipes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import typer

from baton.contract.recipes.calls import RecipeSummary
from baton.contract.recipes.lint import Linted, lint
from baton.contract.recipes.model import Output, Parameter, Program, Recipe, RecipeStep
from baton.contract.yaml_documents import MAX_DOCUMENT_BYTES
from gpu_client.cli.admin.local import read_built_in_recipe
from gpu_client.cli.core.documents import format_fault, raise_faults, read_text
from gpu_client.cli.core.errors import CliError, ExitCode
from gpu_client.cli.core.formats import moment
from gpu_client.cli.core.output import FOLDED, TableColumn
from gpu_client.cli.core.profiles import NoProfileError
from gpu_client.cli.core.session import AsJson, CliSession, session_of
from gpu_client.cli.rules_recipes.recipe_run import LocalRun
from gpu_client.transport.api.calls import pages
from gpu_client.transport.api.client import BatonClient

recipes = typer.Typer(help="Manage recipes, which describe training tools.", no_args_is_help=True)
FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="Recipe file, YAML.", show_default=False)]
NameArgument = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="Recipe, for example digits@1. Default version: the highest.", show_default=False
    ),
]


def register(app: typer.Typer) -> None:
    """Add the command group."""
    app.add_typer(recipes, name="recipes")


@recipes.command("lint")
def lint_file(context: typer.Context, file: FileArgument, as_json: AsJson = False) -> None:
    """Check a recipe file.

    Prints each fault with line, column, reason and remedy. See docs/recipes.md.
    """
    session = session_of(context)
    linted = lint(_read_file(file))
    if as_json:
        session.output.json({"file": str(file), "faults": [fault._asdict() for fault in linted.faults]})
    else:
        for fault in linted.faults:
            session.output.line(format_fault(file, fault))
        if linted.recipe is not None:
            session.output.line(f"{file}: {linted.recipe.id} has no faults")
    if linted.faults:
        raise typer.Exit(ExitCode.FAILED)


@recipes.command("push")
def push(context: typer.Context, file: FileArgument, as_json: AsJson = False) -> None:
    """Register a recipe for use by jobs.

    A registered version is immutable: an identical file is accepted again, a different file is refused.
    """
    session = session_of(context)
    text = _read_file(file)
    _require_recipe(file, lint(text))
    with session.client() as client:
        pushed = client.push_recipe(text)
    if as_json:
        session.output.json(pushed)
    else:
        session.output.line(f"{pushed.id} is registered. Submit: baton submit --recipe {pushed.id}")


@recipes.command("list")
def list_recipes(context: typer.Context, as_json: AsJson = False) -> None:
    """List the registered and built-in recipes."""
    session = session_of(context)
    with session.client() as client:
        found = _list_registered(client)
    if as_json:
        session.output.json(found)
        return
    rows = [
        [one.id, "built in" if one.created_at is None else moment(one.created_at), _first_sentence(one.description)]
        for one in found
    ]
    session.output.table(("recipe", "registered", TableColumn("description", FOLDED)), rows)


@recipes.command("show")
def show(context: typer.Context, name: NameArgument, as_json: AsJson = False) -> None:
    """Print the document of a recipe."""
    session = session_of(context)
    with session.client() as client:
        found = client.recipe(_full_name(client, name))
    if as_json:
        session.output.json(found)
    else:
        for line in found.document.removesuffix("\n").split("\n"):
            session.output.line(line)


@recipes.command("docs")
def docs(context: typer.Context, name: NameArgument, as_json: AsJson = False) -> None:
    """Print the reference page of a recipe in Markdown.

    NAME can be a file. Built-in recipes need no account if the control plane is installed on this machine. --json
    prints the recipe as JSON.
    """
    session = session_of(context)
    if Path(name).is_file():
        recipe = _require_recipe(Path(name), lint(_read_file(Path(name))))
    else:
        linted = lint(_load_document(session, name))
        if linted.recipe is None:
            raise CliError(f"this version of baton cannot read the recipe {name}", "Install the newest version.")
        recipe = linted.recipe
    if as_json:
        session.output.json(recipe)
        return
    for line in render_reference(recipe).split("\n"):
        session.output.line(line)


@recipes.command("run")
def run(
    context: typer.Context,
    file: FileArgument,
    *,
    is_local: Annotated[
        bool, typer.Option("--local", help="Run on this machine with a temporary control plane; required.")
    ] = False,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Parameter of the recipe; repeatable.")
    ] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", metavar="DIR[:INTO]", help="Directory with the files of the input INTO; repeatable."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Directory of the outputs. Default: NAME-output", show_default=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files at the output paths.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run a recipe on this machine.

    Starts a local stack and a worker, runs one job and fetches its outputs. Ignores the requirements of the recipe and
    keeps only the outputs. Existing files at the output paths are an error unless --force is given.
    """
    session = session_of(context)
    text = _read_file(file)
    recipe = _require_recipe(file, lint(text))
    if not is_local:
        raise CliError("run requires --local", f"Add --local, or run: baton recipes push {file}, then baton submit.")
    ran = LocalRun(session, recipe, text, settings=settings or (), inputs=inputs or (), out=out, force=force)
    job = ran.run(note=session.output.note, line=session.output.note if as_json else session.output.line)
    if as_json:
        session.output.json(job)
    if not job.state == "complete":
        raise typer.Exit(ExitCode.FAILED)


def _read_file(file: Path) -> str:
    return read_text(file, "a recipe", MAX_DOCUMENT_BYTES)


def _load_document(session: CliSession, name: str) -> str:
    """Load the document of a registered recipe; without a profile, of a built-in recipe on this machine."""
    try:
        with session.client() as client:
            return client.recipe(_full_name(client, name)).document
    except NoProfileError:
        found = read_built_in_recipe(name)
        if found is None:
            raise
        return found


def _require_recipe(file: Path, linted: Linted) -> Recipe:
    """Return the recipe. Raises CliError with all faults."""
    if linted.recipe is None:
        raise_faults(file, linted.faults)
    return linted.recipe


def _list_registered(client: BatonClient) -> list[RecipeSummary]:
    return [one for page in pages(lambda cursor: client.recipes(limit=1000, cursor=cursor)) for one in page.recipes]


def _full_name(client: BatonClient, name: str) -> str:
    """Return `name@version`, with the highest version as default. Raises CliError."""
    if "@" in name:
        return name
    known = [one.id.partition("@") for one in _list_registered(client)]
    versions = [int(version) for known_name, _, version in known if known_name == name]
    if not versions:
        close = get_close_matches(name, [known_name for known_name, _, _ in known], n=1)
        guess = f"Did you mean {close[0]!r}? " if close else ""
        raise CliError(f"there is no recipe {name[:80]!r}", f"{guess}List the recipes with: baton recipes list")
    return f"{name}@{max(versions)}"


def _first_sentence(text: str) -> str:
    return " ".join(text.split()).partition(". ")[0].removesuffix(".")


def render_reference(recipe: Recipe) -> str:
    """Render the reference page of a recipe as Markdown, without a final line break."""
    parts = [f"# {recipe.id}", _line(recipe.description), *_parameters(recipe), *_rules(recipe), *_needs(recipe)]
    parts += [*_inputs(recipe), *_steps(recipe), *_outputs(recipe), _usage(recipe)]
    return "\n\n".join(part for part in parts if part)


def _parameters(recipe: Recipe) -> Iterator[str]:
    yield "## Parameters"
    if not recipe.parameters:
        yield "None."
        return
    # Required parameters first; otherwise in the order of the recipe.
    ordered = sorted(recipe.parameters.items(), key=lambda item: not item[1].required)
    rows = [(f"`{name}`", _default(spec), spec.expected(), spec.description) for name, spec in ordered]
    yield _table(("parameter", "default", "value", "meaning"), rows)


def _default(spec: Parameter) -> str:
    if spec.required:
        return "required"
    return "none" if spec.default is None else f"`{json.dumps(spec.default, ensure_ascii=False)}`"


def _rules(recipe: Recipe) -> Iterator[str]:
    if recipe.rules:
        yield "Constraints:"
        yield _list(f"`{rule.fields[0]}` {rule.message}. {rule.remedy}" for rule in recipe.rules)


def _needs(recipe: Recipe) -> Iterator[str]:
    needs = recipe.requirements
    parts = [
        *([f"GPU memory: {needs.min_vram_gib:g} GiB"] if needs.min_vram_gib else []),
        *([f"disk: {needs.min_disk_gib:g} GiB"] if needs.min_disk_gib else []),
        *([f"GPUs: {needs.min_gpus}"] if needs.min_gpus else []),
        *([f"one of {', '.join(needs.gpu_models)}"] if needs.gpu_models else []),
        *([f"the image `{needs.image}`"] if needs.image else []),
    ]
    if recipe.health.check is not None:
        parts.append(f"a machine that passes {_command(recipe.health.check)}")
    if recipe.health.no_progress_timeout_s is not None:
        parts.append(f"progress at least every {recipe.health.no_progress_timeout_s} s")
    if parts:
        yield "## Requirements"
        yield _list(parts)


def _inputs(recipe: Recipe) -> Iterator[str]:
    if recipe.inputs:
        yield "## Inputs"
        rows = [
            (f"`{one.into}`" if one.into else "(the data directory)", "yes" if one.required else "no", one.description)
            for one in recipe.inputs
        ]
        yield _table(("into", "required", "content"), rows)


def _steps(recipe: Recipe) -> Iterator[str]:
    yield "## Steps"
    yield "\n".join(f"{number}. {_step(step)}" for number, step in enumerate(recipe.steps, 1))
    if recipe.cleanup:
        yield "Cleanup, also after a failure:"
        yield _list(map(_command, recipe.cleanup))


def _step(step: RecipeStep) -> str:
    parts = [f"**{step.name}**: {_command(step)}"]
    if step.description:
        parts.append(_line(step.description))
    if step.when:
        parts.append(f"Only when `{step.when}`.")
    if step.timeout_s:
        parts.append(f"At most {step.timeout_s} s.")
    if step.retries:
        parts.append(f"Retried {step.retries} times.")
    if step.checkpoints == "none":
        parts.append("Starts from the beginning after an interruption.")
    return " ".join(parts)


def _outputs(recipe: Recipe) -> Iterator[str]:
    if recipe.outputs:
        yield "## Outputs"
        yield _table(
            ("path", "checks", "content"), [(f"`{o.path}`", _checks(o), o.description) for o in recipe.outputs]
        )
    if recipe.shared:
        yield "## Shared with later jobs"
        rows = [(f"`{one.path}`", ", ".join(f"`{name}`" for name in one.key), one.description) for one in recipe.shared]
        yield _table(("path", "with jobs of equal", "content"), rows)


def _checks(output: Output) -> str:
    parts = [
        *([f"only when `{output.when}`"] if output.when else []),
        *([] if output.required else ["optional"]),
        *([f"at least {output.min_bytes} bytes"] if output.min_bytes else []),
        *([f"at least {output.min_files} files"] if output.min_files else []),
        *([output.format] if output.format else []),
    ]
    return ", ".join(parts) or "exists"


def _usage(recipe: Recipe) -> str:
    required = {name: spec for name, spec in recipe.parameters.items() if spec.required}
    words = ["baton submit --recipe", recipe.id]
    # Lists are JSON and need quotes in a shell.
    words += [
        f"--set {name}=" + ("""'["...", "..."]'""" if spec.type == "strings" else "...")
        for name, spec in required.items()
    ]
    words += [f"--input PREFIX/:{one.into}" if one.into else "--input PREFIX/" for one in recipe.inputs if one.required]
    return f"## Submit\n\n    {' '.join(words)}"


def _command(command: Program) -> str:
    return f"`{' '.join(command.run)}`"


def _list(items: Iterable[str]) -> str:
    return "\n".join(f"- {_line(item)}" for item in items)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(_line(cell).replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _line(text: str) -> str:
    return " ".join(text.split())
