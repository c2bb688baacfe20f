"""Command `baton local`: run the control plane on this machine, where it is installed."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from gpu_client.cli.core.errors import CliError, ExitCode
from gpu_client.cli.core.session import AsJson

_NEEDED = ("functions", "botocore", "starlette", "uvicorn")
"""Packages that `python -m functions.local` requires. The client locates but never imports them."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("local")(local)


def local(
    port: Annotated[int, typer.Option(min=0, max=65_535, help="TCP port; 0 selects a free port.")] = 8787,
    state_dir: Annotated[
        Path | None, typer.Option(help="Directory of the persistent state. Default: .baton/local")
    ] = None,
    forget: Annotated[bool, typer.Option("--forget", help="Do not persist any state.")] = False,
    fleet_budget: Annotated[
        str | None,
        typer.Option(metavar="JSON", help="Budget of all fleets, kept until changed: '{\"per_day_usd\": 5}', or none."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run the control plane on this machine until Ctrl-C.

    Prints the address and the keys.
    """
    require_local_stack()
    command = [sys.executable, "-m", "functions.local", "--port", str(port)]
    command += ["--state-dir", str(state_dir)] if state_dir else []
    command += ["--forget"] if forget else []
    command += ["--fleet-budget", fleet_budget] if fleet_budget is not None else []
    command += ["--json"] if as_json else []
    sys.stdout.flush()
    # Replace this process, so that the control plane receives signals and sets the exit code.
    os.execv(sys.executable, command)  # noqa: S606 - no shell, and nothing of it comes from elsewhere


def require_local_stack() -> None:
    """Raise CliError if the control plane is not installed."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise CliError(
            f"the local control plane is not installed ({', '.join(missing)} missing)",
            "In a checkout of the repository, run: make local",
            exit_code=ExitCode.FAILED,
        )


def read_built_in_recipe(name: str) -> str | None:
    """Return the document of a built-in recipe `name@version`; without a version, of the highest version.

    Returns None if the control plane is not installed or has no such recipe. Raises OSError.
    """
    known = _find_built_in_recipes()
    if "@" not in name:
        versions = [
            int(version) for known_name, _, version in (one.partition("@") for one in known) if known_name == name
        ]
        name = f"{name}@{max(versions, default=0)}"
    found = known.get(name)
    return found.read_text(encoding="utf-8") if found is not None else None


def _find_built_in_recipes() -> dict[str, Path]:
    """Return the recipe files by `name@version`. Locates the package without importing it."""
    package = find_spec("functions")
    places = package.submodule_search_locations if package is not None else None
    return {file.stem: file for place in places or () for file in Path(place, "recipes").glob("*@*.yaml")}
