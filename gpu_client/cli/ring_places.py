"""`baton ring list|remove`: which rings lie with the control plane; and removing one, wherever it lies."""

from __future__ import annotations

from typing import Annotated

import typer
from gpu_client.cli.errors import CliError
from gpu_client.cli.formats import count, moment
from gpu_client.cli.session import AsJson, Session, session_of

from gpu_client.cli.ring import Place, told
from gpu_client.transport.api.calls import pages


def register(rings: typer.Typer) -> None:
    """Add the commands to the group `ring`, and let all of it use profiles."""
    rings.callback()(_with_profile)
    rings.command(name="list")(list_rings)
    rings.command()(remove)


def _with_profile(context: typer.Context) -> None:
    """A circular cache of generated samples."""
    from gpu_client.ring.access import look_elsewhere

    session = session_of(context)
    look_elsewhere(lambda: _access(session))
    context.call_on_close(lambda: look_elsewhere(None))  # of this command alone, whatever the process does next


def list_rings(context: typer.Context, as_json: AsJson = False) -> None:
    """Those that lie with the control plane: baton:NAME."""
    session = session_of(context)
    with session.client() as client:
        found = [ring for page in pages(lambda cursor: client.rings(cursor=cursor)) for ring in page.rings]
    if as_json:
        session.screen.json({"rings": [ring.model_dump() for ring in found]})
        return
    if not found:
        session.screen.say("No rings. Make one: baton ring make baton:NAME --set cap=1000")
        return
    rows = [(f"baton:{ring.name}", moment(ring.created_at), "being removed" if ring.removing else "") for ring in found]
    session.screen.table(["ring", "made", ""], rows)


def remove(
    context: typer.Context,
    place: Place,
    *,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove a ring with all its samples. Stop what uses it before.

    Repeated after an interruption, it goes on.
    """
    session = session_of(context)
    if not yes and not as_json and not typer.confirm(f"Remove {place} with all that is in it?", err=True):
        raise CliError(f"{place} is as it was")
    with told():
        from gpu_client.ring.removing import remove_ring

        removed = remove_ring(place)
    if as_json:
        session.screen.json({"ring": place, "removed": removed})
        return
    session.screen.say(f"{place} is removed, with {count(removed, 'object')} in it")


def _access(session: Session) -> tuple[str, str] | None:
    from gpu_client.ring.access import TOKEN

    if session.profile_name is None and session.environ.get(TOKEN):
        return None  # one of a job's processes, which is let in by that
    profile = session.profile()
    return profile.url, profile.api_key
