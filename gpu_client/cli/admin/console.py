"""Commands `baton console` and `baton share`: links to the web console."""

from __future__ import annotations

import webbrowser
from typing import Annotated

import typer

from baton.contract.admin.shares import ShareRequest
from gpu_client.cli.core.errors import CliError
from gpu_client.cli.core.formats import moment, parse_duration
from gpu_client.cli.core.session import AsJson, JobIdArgument, guard_creation, resolve_job_id, session_of

_MIN_LIFE_S, _MAX_LIFE_S = 60, 30 * 86_400


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("console")(console)
    app.command("share")(share)


def console(
    context: typer.Context,
    no_open: Annotated[bool, typer.Option("--no-open", help="Print the link without opening a browser.")] = False,
    as_json: AsJson = False,
) -> None:
    """Open the web console.

    Prints a link that signs in once, within a minute, with the permissions of this profile's key.
    """
    session = session_of(context)
    with session.client() as client:
        link = client.make_session_link()
    if as_json:
        session.output.json(link)
    else:
        session.output.raw(link.url)
    if not no_open and not webbrowser.open(link.url):
        session.output.note("No browser was found here. Open the link within a minute.")


def share(
    context: typer.Context,
    job_id: JobIdArgument,
    expires_in: Annotated[str, typer.Option(metavar="TIME", help="Lifetime of the link, 60s to 30d.")] = "7d",
    as_json: AsJson = False,
) -> None:
    """Print a link that shows one job.

    Everyone who has the link reads the job until the link expires; `baton keys revoke` ends the link earlier.
    """
    session = session_of(context)
    life_s = parse_duration(expires_in)
    if not _MIN_LIFE_S <= life_s <= _MAX_LIFE_S:
        raise CliError(f"--expires-in {expires_in} is out of range", "Give 60s to 30d.")
    with session.client() as client:
        job = resolve_job_id(client, job_id)
        with guard_creation("key", "revoke a key that you do not know"):
            made = client.share_job(job, ShareRequest(expires_in_s=life_s))
    if as_json:
        session.output.json(made)
        return
    until = f" until {moment(made.expires_at)}" if made.expires_at else ""
    session.output.note(f"The link shows job {job}{until}; baton keys revoke {made.id} ends the link:")
    session.output.raw(made.url)
