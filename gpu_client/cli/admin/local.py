"""`baton local`: the control plane on this machine, if it is installed."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from gpu_client.cli.core.errors import CliError, ExitCode
from gpu_client.cli.core.session import AsJson

_NEEDED = ("functions", "boto3", "starlette", "uvicorn")
"""What `python -m functions.local` cannot do without. Looked for, never imported: the client knows nothing of them."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("local")(local)


def local(
    port: Annotated[int, typer.Option(min=0, max=65_535, help="0 takes a free one.")] = 8787,
    state_dir: Annotated[Path | None, typer.Option(help="Kept across restarts. Default: .baton/local")] = None,
    forget: Annotated[bool, typer.Option("--forget", help="Keep nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run the control plane on this machine until Ctrl-C.

    Prints its address and keys.
    """
    require_local_stack()
    command = [sys.executable, "-m", "functions.local", "--port", str(port)]
    command += ["--state-dir", str(state_dir)] if state_dir else []
    command += ["--forget"] if forget else []
    command += ["--json"] if as_json else []
    sys.stdout.flush()
    # In place of this process: signals and the exit code are its own.
    os.execv(sys.executable, command)  # noqa: S606 - no shell, and nothing of it comes from elsewhere


def require_local_stack() -> None:
    """Raises CliError where the control plane is not installed."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise CliError(
            f"the local control plane is not installed ({', '.join(missing)} missing)",
            "In a checkout of the repository: make local",
            exit_code=ExitCode.FAILED,
        )


def built_in_document(name: str) -> str | None:
    """The text of `name@version`, or without a version of the highest one; None if there is none here.

    Raises OSError if it cannot be read.
    """
    known = _documents()
    if "@" not in name:
        versions = [
            int(version) for known_name, _, version in (one.partition("@") for one in known) if known_name == name
        ]
        name = f"{name}@{max(versions, default=0)}"
    found = known.get(name)
    return found.read_text(encoding="utf-8") if found is not None else None


def _documents() -> dict[str, Path]:
    """The files by `name@version`. The package is looked for, never imported: the client knows nothing of it."""
    package = find_spec("functions")
    places = package.submodule_search_locations if package is not None else None
    return {file.stem: file for place in places or () for file in Path(place, "recipes").glob("*@*.yaml")}
