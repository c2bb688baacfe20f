"""Commands `baton fleet login`, `logout`, `providers` and `registries`: accounts at providers, logins at registries."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from baton.contract.fleets.providers import ProviderView
from gpu_client.cli.core.formats import moment
from gpu_client.cli.core.output import FOLDED, TableColumn
from gpu_client.cli.core.session import AsJson, CliSession, session_of
from gpu_client.cli.fleet.account_document import find_provider, is_registry, read_account, read_login

PROVIDERS = ("provider", "account", TableColumn("credit USD", right=True), "as of", TableColumn("problems", FOLDED))
OPEN_BITS = 0o077
REGISTRIES = ("registry", "user", "as of")
PlaceArgument = Annotated[
    str,
    typer.Argument(
        metavar="PROVIDER|REGISTRY", help="Name of a provider, or host of a registry like ghcr.io.", show_default=False
    ),
]


def register(fleet: typer.Typer) -> None:
    """Add the commands."""
    fleet.command("login")(login)
    fleet.command("logout")(logout)
    fleet.command("providers")(list_providers)
    fleet.command("registries")(list_registries)


def login(
    context: typer.Context,
    place: PlaceArgument,
    file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="YAML document with accounts by provider and logins by registry.", show_default=False
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Store an account at a provider, after a check, or a login at the registry of private images.

    Asks on a terminal, else reads standard input or --file.
    """
    session = session_of(context)
    if is_registry(place):
        _log_in_registry(session, place, file, as_json)
        return
    provider = find_provider(place)
    account = read_account(provider, file)
    _note_readable(session, file)
    with session.client() as client:
        view = client.put_provider(provider, account)
    if as_json:
        session.output.json(view)
        return
    credit = "" if view.balance_usd is None else f", credit {view.balance_usd:.2f} USD"
    session.output.line(f"The account {view.account} at {provider} is stored{credit}.")
    for problem in view.problems:
        session.output.note(f"{provider}: {problem}")


def _log_in_registry(session: CliSession, registry: str, file: Path | None, as_json: bool) -> None:
    found = read_login(registry, file)
    _note_readable(session, file)
    with session.client() as client:
        view = client.put_registry(registry, found)
    if as_json:
        session.output.json(view)
        return
    session.output.line(f"The login of {view.username} at {registry} is stored.")
    session.output.note("Providers and hosts of machines can read the login: use a token that only reads the images.")


def _note_readable(session: CliSession, file: Path | None) -> None:
    if file is not None and file.stat().st_mode & OPEN_BITS:
        session.output.note(f"Other users of this machine can read {file}: chmod 600 {file}")


def logout(context: typer.Context, place: PlaceArgument, as_json: AsJson = False) -> None:
    """Remove an account, refused while machines of Baton run there; or remove the login at a registry."""
    session = session_of(context)
    registry = is_registry(place)
    with session.client() as client:
        if registry:
            client.remove_registry(place)
        else:
            client.remove_provider(find_provider(place))
    if as_json:
        session.output.json({"registry" if registry else "provider": place})
    else:
        session.output.line(f"The {'login' if registry else 'account'} at {place} is removed.")


def list_providers(context: typer.Context, as_json: AsJson = False) -> None:
    """List the stored accounts as of their last check, without their secrets."""
    session = session_of(context)
    with session.client() as client:
        found = client.providers()
    if as_json:
        session.output.json(found)
    elif not found:
        session.output.note("No account is stored. Store one with: baton fleet login PROVIDER")
    else:
        session.output.table(PROVIDERS, map(_row, found))
        if any(one.balance_usd is not None for one in found):
            session.output.note("The credit is that of the last login; of this moment: baton fleet doctor")


def list_registries(context: typer.Context, as_json: AsJson = False) -> None:
    """List the registries at which machines log in to pull private images, without the passwords."""
    session = session_of(context)
    with session.client() as client:
        found = client.registries()
    if as_json:
        session.output.json(found)
    elif not found:
        session.output.note("No login is stored. Store one with: baton fleet login REGISTRY")
    else:
        session.output.table(REGISTRIES, ([one.registry, one.username, moment(one.stored_at)] for one in found))


def _row(view: ProviderView) -> list[str]:
    credit = "" if view.balance_usd is None else f"{view.balance_usd:.2f}"
    return [view.provider, view.account, credit, moment(view.checked_at), "; ".join(view.problems)]
