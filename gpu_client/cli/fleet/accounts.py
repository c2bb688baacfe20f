"""Commands `baton fleet login`, `logout` and `providers`: the accounts at providers of machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from baton.contract.fleets.providers import ProviderView
from gpu_client.cli.core.formats import moment
from gpu_client.cli.core.output import FOLDED, TableColumn
from gpu_client.cli.core.session import AsJson, session_of
from gpu_client.cli.fleet.account_document import find_provider, read_account

PROVIDERS = ("provider", "account", TableColumn("credit USD", right=True), "as of", TableColumn("problems", FOLDED))
OPEN_BITS = 0o077
ProviderArgument = Annotated[str, typer.Argument(metavar="PROVIDER", help="Name of the provider.", show_default=False)]


def register(fleet: typer.Typer) -> None:
    """Add the commands."""
    fleet.command("login")(login)
    fleet.command("logout")(logout)
    fleet.command("providers")(list_providers)


def login(
    context: typer.Context,
    provider: ProviderArgument,
    file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="YAML document with accounts by provider.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check an account at a provider and store it; asks on a terminal, else reads standard input or --file."""
    session = session_of(context)
    account = read_account(find_provider(provider), file)
    if file is not None and file.stat().st_mode & OPEN_BITS:
        session.output.note(f"Other users of this machine can read {file}: chmod 600 {file}")
    with session.client() as client:
        view = client.put_provider(find_provider(provider), account)
    if as_json:
        session.output.json(view)
        return
    credit = "" if view.balance_usd is None else f", credit {view.balance_usd:.2f} USD"
    session.output.line(f"The account {view.account} at {provider} is stored{credit}.")
    for problem in view.problems:
        session.output.note(f"{provider}: {problem}")


def logout(context: typer.Context, provider: ProviderArgument, as_json: AsJson = False) -> None:
    """Remove the account at a provider; refused while machines of Baton run there."""
    session = session_of(context)
    with session.client() as client:
        client.remove_provider(find_provider(provider))
    if as_json:
        session.output.json({"provider": provider})
    else:
        session.output.line(f"The account at {provider} is removed.")


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


def _row(view: ProviderView) -> list[str]:
    credit = "" if view.balance_usd is None else f"{view.balance_usd:.2f}"
    return [view.provider, view.account, credit, moment(view.checked_at), "; ".join(view.problems)]
