"""`baton login`: check an address and a key, and keep them."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from pydantic import ValidationError

from baton.contract.names import Scope
from gpu_client.cli.admin.keys import scopes_of
from gpu_client.cli.core.errors import CliError, ExitCode
from gpu_client.cli.core.formats import finite
from gpu_client.cli.core.profiles import Profile, ProfileFile, load_profiles, profile_path, save_profiles
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
        float | None, typer.Option(min=0, help="What an hour of one machine costs, for: baton watch")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Store an address and a key as a profile, used from now on.

    The key is asked for, or read from standard input; it is never an argument, where others could see it.
    """
    session = session_of(context)
    path = profile_path(session.environ)
    stored = load_profiles(path)
    price = finite(price_per_hour, "--price-per-hour")
    if price is None and name in stored.profiles:
        price = stored.profiles[name].price_per_hour
    try:
        profile = Profile(url=url.strip().rstrip("/"), api_key=_read_key(), price_per_hour=price)
        changed = ProfileFile(current=name, profiles={**stored.profiles, name: profile})
    except ValidationError:
        # the message would quote the input, of which the key is a part
        raise CliError(f"{name!r} cannot name a profile", "Use letters, digits, '.', '_' and '-'.") from None
    with connect(profile) as client:
        scopes = scopes_of(client)
    try:
        save_profiles(path, changed)
    except OSError as error:
        raise CliError(
            f"the profile file {path} cannot be written: {error.strerror}",
            "Set XDG_CONFIG_HOME to a directory that can be.",
            exit_code=ExitCode.FAILED,
        ) from error
    said = [scope.value for scope in Scope if scope in scopes]
    if as_json:
        session.screen.json({"profile": name, "url": profile.url, "scopes": said, "file": str(path)})
    else:
        session.screen.line(f"Profile {name} for {profile.url} is stored in {path}. The key may: {', '.join(said)}.")


def _read_key() -> str:
    if sys.stdin is not None and sys.stdin.isatty():
        key: str = typer.prompt("API key", hide_input=True, err=True)
    else:
        key = sys.stdin.readline(MAX_KEY_CHARACTERS) if sys.stdin is not None else ""
    if not key.strip():
        raise CliError("no API key was given", "Paste it when asked, or pipe it in: baton login URL < key-file")
    return key.strip()
