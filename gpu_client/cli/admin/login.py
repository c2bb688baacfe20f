"""Command `baton login`: check an address and a key, store them as a profile."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from pydantic import ValidationError

from baton.contract.names import Scope
from gpu_client.cli.admin.keys import probe_scopes
from gpu_client.cli.core.errors import CliError, ExitCode
from gpu_client.cli.core.formats import require_finite
from gpu_client.cli.core.profiles import ConnectionProfile, ProfileFile, load_profiles, profile_path, save_profiles
from gpu_client.cli.core.session import AsJson, connect, session_of

MAX_KEY_CHARACTERS = 512


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("login")(login)


def login(
    context: typer.Context,
    url: Annotated[str, typer.Argument(metavar="URL", help="Address of the API.", show_default=False)],
    name: Annotated[str, typer.Option("--name", help="Name of the profile.")] = "default",
    price_per_hour: Annotated[
        float | None,
        typer.Option(min=0, help="Price of one machine per hour, from which baton watch computes costs."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Store an address and a key as the current profile.

    Prompts for the key, or reads the key from standard input. The key is not an argument because other users of the
    machine can read arguments.
    """
    session = session_of(context)
    path = profile_path(session.environ)
    stored = load_profiles(path)
    price = require_finite(price_per_hour, "--price-per-hour")
    if price is None and name in stored.profiles:
        price = stored.profiles[name].price_per_hour
    try:
        profile = ConnectionProfile(url=url.strip().rstrip("/"), api_key=_read_key(), price_per_hour=price)
        changed = ProfileFile(current=name, profiles={**stored.profiles, name: profile})
    except ValidationError:
        # The message of pydantic would quote the key.
        raise CliError(f"{name!r} is not a profile name", "Use letters, digits, '.', '_' and '-'.") from None
    with connect(profile) as client:
        scopes = probe_scopes(client)
    try:
        save_profiles(path, changed)
    except OSError as error:
        raise CliError(
            f"the profile file {path} cannot be written: {error.strerror}",
            "Set XDG_CONFIG_HOME to a writable directory.",
            exit_code=ExitCode.FAILED,
        ) from error
    names = [scope.value for scope in Scope if scope in scopes]
    if as_json:
        session.output.json({"profile": name, "url": profile.url, "scopes": names, "file": str(path)})
    else:
        session.output.line(
            f"Profile {name} for {profile.url} is stored in {path}. Scopes of the key: {', '.join(names)}."
        )


def _read_key() -> str:
    if sys.stdin is not None and sys.stdin.isatty():
        key: str = typer.prompt("API key", hide_input=True, err=True)
    else:
        key = sys.stdin.readline(MAX_KEY_CHARACTERS) if sys.stdin is not None else ""
    if not key.strip():
        raise CliError(
            "no API key was given", "Paste the key at the prompt, or redirect a file: baton login URL < key-file"
        )
    return key.strip()
