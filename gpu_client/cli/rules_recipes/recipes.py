"""Command group `baton recipes`: check, register, document and run recipes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import typer

from baton.contract.documents import MAX_DOCUMENT_BYTES
from baton.contract.recipes.calls import RecipeSummary
from baton.contract.recipes.lint import Linted, lint
from baton.contract.recipes.model import Command, Output, Parameter, Recipe, Step
from gpu_client.cli.admin.local import built_in_document
from gpu_client.cli.core.documents import raise_faults, read_text, told
from gpu_client.cli.core.errors import CliError, ExitCode
from gpu_client.cli.core.formats import moment
from gpu_client.cli.core.output import FOLDED, Column
from gpu_client.cli.core.profiles import NoProfileError
from gpu_client.cli.core.session import AsJson, Session, session_of
from gpu_client.cli.rules_recipes.recipe_run import LocalRun
from gpu_client.transport.api.calls import pages
from gpu_client.transport.api.client import BatonClient

recipes = typer.Typer(help="Training tools: what they take, run and leave.", no_args_is_help=True)
FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="YAML.", show_default=False)]
NameArgument = Annotated[
    str,
    typer.Argument(metavar="NAME", help="Such as digits@1; without a version, the highest one.", show_default=False),
]


def register(app: typer.Typer) -> None:
    """Add the group."""
    app.add_typer(recipes, name="recipes")


@recipes.command("lint")
def lint_file(context: typer.Context, file: FileArgument, as_json: AsJson = False) -> None:
    """Find every fault of a recipe: line, column, reason and remedy."""
    session = session_of(context)
    linted = lint(_text(file))
    if as_json:
        session.screen.json({"file": str(file), "faults": [fault._asdict() for fault in linted.faults]})
    else:
        for fault in linted.faults:
            session.screen.line(told(file, fault))
        if linted.recipe is not None:
            session.screen.line(f"{file}: {linted.recipe.id} has no faults")
    if linted.faults:
        raise typer.Exit(ExitCode.FAILED)


@recipes.command("push")
def push(context: typer.Context, file: FileArgument, as_json: AsJson = False) -> None:
    """Register a recipe, so that jobs can name it.

    A version never changes: the same file again is fine, another one is refused.
    """
    session = session_of(context)
    text = _text(file)
    _sound(file, lint(text))
    with session.client() as client:
        pushed = client.push_recipe(text)
    if as_json:
        session.screen.json(pushed)
    else:
        session.screen.line(f"{pushed.id} is registered. Submit: baton submit --recipe {pushed.id}")


@recipes.command("list")
def list_recipes(context: typer.Context, as_json: AsJson = False) -> None:
    """List the recipes that jobs may name."""
    session = session_of(context)
    with session.client() as client:
        found = _known(client)
    if as_json:
        session.screen.json(found)
        return
    rows = [
        [one.id, "built in" if one.created_at is None else moment(one.created_at), _first_sentence(one.description)]
        for one in found
    ]
    session.screen.table(("recipe", "registered", Column("what", FOLDED)), rows)


@recipes.command("show")
def show(context: typer.Context, name: NameArgument, as_json: AsJson = False) -> None:
    """Print a recipe's document."""
    session = session_of(context)
    with session.client() as client:
        found = client.recipe(_full_name(client, name))
    if as_json:
        session.screen.json(found)
    else:
        for line in found.document.removesuffix("\n").split("\n"):
            session.screen.line(line)


@recipes.command("docs")
def docs(context: typer.Context, name: NameArgument, as_json: AsJson = False) -> None:
    """Print a reference page of a recipe, in Markdown.

    NAME may be a file. Built-in recipes need no account where the control plane is installed. With --json what the page
    is made from.
    """
    session = session_of(context)
    if Path(name).is_file():
        recipe = _sound(Path(name), lint(_text(Path(name))))
    else:
        linted = lint(_document(session, name))
        if linted.recipe is None:
            raise CliError(f"this program does not understand {name}", "Install the newest one.")
        recipe = linted.recipe
    if as_json:
        session.screen.json(recipe)
        return
    for line in page_of(recipe).split("\n"):
        session.screen.line(line)


@recipes.command("run")
def run(
    context: typer.Context,
    file: FileArgument,
    *,
    is_local: Annotated[
        bool, typer.Option("--local", help="On this machine, with a control plane of its own; needed.")
    ] = False,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A parameter; may be repeated.")
    ] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", metavar="DIR[:INTO]", help="A folder of files for the input INTO; may be repeated."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the outputs go. Default: NAME-output", show_default=False)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what lies where the outputs go.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run a recipe on this machine against the local stack, and fetch its outputs.

    Its requirements are not asked of this machine. Nothing but the outputs is kept. Where something lies in their place
    already nothing is run, unless --force says so.
    """
    session = session_of(context)
    text = _text(file)
    recipe = _sound(file, lint(text))
    if not is_local:
        raise CliError(
            "run works on this machine only", f"Say --local; or baton recipes push {file}, then baton submit."
        )
    ran = LocalRun(session, recipe, text, settings=settings or (), inputs=inputs or (), out=out, force=force)
    job = ran.run(say=session.screen.say, line=session.screen.say if as_json else session.screen.line)
    if as_json:
        session.screen.json(job)
    if not job.state == "complete":
        raise typer.Exit(ExitCode.FAILED)


def _text(file: Path) -> str:
    return read_text(file, "a recipe", MAX_DOCUMENT_BYTES)


def _document(session: Session, name: str) -> str:
    """A registered recipe's document; without an account a built-in one's, where it lies on this machine."""
    try:
        with session.client() as client:
            return client.recipe(_full_name(client, name)).document
    except NoProfileError:
        found = built_in_document(name)
        if found is None:
            raise
        return found


def _sound(file: Path, linted: Linted) -> Recipe:
    """The recipe. Raises CliError with all of its faults."""
    if linted.recipe is None:
        raise_faults(file, linted.faults)
    return linted.recipe


def _known(client: BatonClient) -> list[RecipeSummary]:
    return [one for page in pages(lambda cursor: client.recipes(limit=1000, cursor=cursor)) for one in page.recipes]


def _full_name(client: BatonClient, name: str) -> str:
    """`name@version`; without a version, the highest there is. Raises CliError."""
    if "@" in name:
        return name
    known = [one.id.partition("@") for one in _known(client)]
    versions = [int(version) for known_name, _, version in known if known_name == name]
    if not versions:
        close = get_close_matches(name, [known_name for known_name, _, _ in known], n=1)
        guess = f"Did you mean {close[0]!r}? " if close else ""
        raise CliError(f"there is no recipe {name[:80]!r}", f"{guess}See: baton recipes list")
    return f"{name}@{max(versions)}"


def _first_sentence(text: str) -> str:
    return " ".join(text.split()).partition(". ")[0].removesuffix(".")


def page_of(recipe: Recipe) -> str:
    """The page, without a line break at its end."""
    parts = [f"# {recipe.id}", _line(recipe.description), *_parameters(recipe), *_rules(recipe), *_needs(recipe)]
    parts += [*_inputs(recipe), *_steps(recipe), *_outputs(recipe), _usage(recipe)]
    return "\n\n".join(part for part in parts if part)


def _parameters(recipe: Recipe) -> Iterator[str]:
    yield "## Parameters"
    if not recipe.parameters:
        yield "None."
        return
    # what must be given first; the rest as the recipe has it
    ordered = sorted(recipe.parameters.items(), key=lambda item: not item[1].required)
    rows = [(f"`{name}`", _default(spec), spec.expected(), spec.description) for name, spec in ordered]
    yield _table(("parameter", "default", "value", "meaning"), rows)


def _default(spec: Parameter) -> str:
    if spec.required:
        return "required"
    return "none" if spec.default is None else f"`{json.dumps(spec.default, ensure_ascii=False)}`"


def _rules(recipe: Recipe) -> Iterator[str]:
    if recipe.rules:
        yield "Between them:"
        yield _list(f"`{rule.fields[0]}` {rule.message}. {rule.remedy}" for rule in recipe.rules)


def _needs(recipe: Recipe) -> Iterator[str]:
    needs = recipe.requirements
    said = [
        *([f"GPU memory: {needs.min_vram_gib:g} GiB"] if needs.min_vram_gib else []),
        *([f"disk: {needs.min_disk_gib:g} GiB"] if needs.min_disk_gib else []),
        *([f"GPUs: {needs.min_gpus}"] if needs.min_gpus else []),
        *([f"one of {', '.join(needs.gpu_models)}"] if needs.gpu_models else []),
        *([f"the image `{needs.image}`"] if needs.image else []),
    ]
    if recipe.health.check is not None:
        said.append(f"a machine on which {_command(recipe.health.check)} succeeds")
    if recipe.health.no_progress_timeout_s is not None:
        said.append(f"progress at least every {recipe.health.no_progress_timeout_s} s")
    if said:
        yield "## Needs"
        yield _list(said)


def _inputs(recipe: Recipe) -> Iterator[str]:
    if recipe.inputs:
        yield "## Inputs"
        rows = [
            (f"`{one.into}`" if one.into else "(the data directory)", "yes" if one.required else "no", one.description)
            for one in recipe.inputs
        ]
        yield _table(("into", "required", "what"), rows)


def _steps(recipe: Recipe) -> Iterator[str]:
    yield "## Steps"
    yield "\n".join(f"{number}. {_step(step)}" for number, step in enumerate(recipe.steps, 1))
    if recipe.cleanup:
        yield "In the end, however it went:"
        yield _list(map(_command, recipe.cleanup))


def _step(step: Step) -> str:
    said = [f"**{step.name}**: {_command(step)}"]
    if step.description:
        said.append(_line(step.description))
    if step.when:
        said.append(f"Only when `{step.when}`.")
    if step.timeout_s:
        said.append(f"At most {step.timeout_s} s.")
    if step.retries:
        said.append(f"Tried again {step.retries} times.")
    if step.checkpoints == "none":
        said.append("Begins anew after an interruption.")
    return " ".join(said)


def _outputs(recipe: Recipe) -> Iterator[str]:
    if recipe.outputs:
        yield "## Outputs"
        yield _table(("path", "checked", "what"), [(f"`{o.path}`", _checks(o), o.description) for o in recipe.outputs])
    if recipe.shared:
        yield "## Shared with later jobs"
        rows = [(f"`{one.path}`", ", ".join(f"`{name}`" for name in one.key), one.description) for one in recipe.shared]
        yield _table(("path", "with jobs that have the same", "what"), rows)


def _checks(output: Output) -> str:
    said = [
        *([f"only when `{output.when}`"] if output.when else []),
        *([] if output.required else ["may be missing"]),
        *([f"at least {output.min_bytes} bytes"] if output.min_bytes else []),
        *([f"at least {output.min_files} files"] if output.min_files else []),
        *([output.format] if output.format else []),
    ]
    return ", ".join(said) or "is there"


def _usage(recipe: Recipe) -> str:
    required = {name: spec for name, spec in recipe.parameters.items() if spec.required}
    words = ["baton submit --recipe", recipe.id]
    # a list is written as JSON, which the shell must leave alone
    words += [
        f"--set {name}=" + ("""'["...", "..."]'""" if spec.type == "strings" else "...")
        for name, spec in required.items()
    ]
    words += [f"--input PREFIX/:{one.into}" if one.into else "--input PREFIX/" for one in recipe.inputs if one.required]
    return f"## Submit\n\n    {' '.join(words)}"


def _command(command: Command) -> str:
    return f"`{' '.join(command.run)}`"


def _list(items: Iterable[str]) -> str:
    return "\n".join(f"- {_line(item)}" for item in items)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(_line(cell).replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _line(text: str) -> str:
    return " ".join(text.split())
