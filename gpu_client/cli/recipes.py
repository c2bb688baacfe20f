"""`baton recipes`: training tools, described: written, checked, registered, tried on this machine."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import typer
from gpu_client.cli.built_in import built_in_document
from gpu_client.cli.documents import raise_faults, read_text, told
from gpu_client.cli.errors import CliError, ExitCode
from gpu_client.cli.formats import moment
from gpu_client.cli.output import FOLDED, Column
from gpu_client.cli.profiles import NoProfileError
from gpu_client.cli.recipe_page import page_of
from gpu_client.cli.recipe_run import LocalRun
from gpu_client.cli.session import AsJson, Session, session_of

from baton.contract.documents import MAX_DOCUMENT_BYTES
from baton.contract.recipes.calls import RecipeSummary
from baton.contract.recipes.lint import Linted, lint
from baton.contract.recipes.model import Recipe
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
