"""`baton keys`: API keys. Needs a key of the scope admin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from baton.contract.errors import ErrorCode
from baton.contract.keys import KeyCreate, KeyCreated, KeyView
from baton.contract.names import Scope
from baton.contract.rings import RecordsRequest
from baton.contract.work import WorkQuery
from gpu_client.cli.core.errors import CliError
from gpu_client.cli.core.formats import day, moment, parse_duration
from gpu_client.cli.core.output import CUT, FOLDED, Column
from gpu_client.cli.core.session import AsJson, Session, making, named, session_of
from gpu_client.transport.api.calls import pages
from gpu_client.transport.api.client import BatonClient
from gpu_client.transport.errors import NotFound, Unauthorized

_MIN_LIFE_S, _MAX_LIFE_S = 60, 10 * 365 * 86_400
_MAX_OVERLAP_S = 30 * 86_400
_SOON_S = 2 * 86_400

keys = typer.Typer(help="API keys (for admins).", no_args_is_help=True)
KeyId = Annotated[str, typer.Argument(metavar="ID", help="Key id, or the beginning of one.", show_default=False)]
ExpiresIn = Annotated[str | None, typer.Option(metavar="TIME", help="Such as 12h or 90d.")]


def register(app: typer.Typer) -> None:
    """Add the group."""
    app.add_typer(keys, name="keys")


@keys.command("create")
def create(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Who or what uses it.", show_default=False)],
    scopes: Annotated[
        list[Scope],
        typer.Option(
            "--scope",
            metavar="SCOPE",
            help="What it may do: submit, worker, ring or admin; may be repeated. A client of the original Dreambooth"
            " orchestrator has one key for everything: --scope submit --scope worker.",
        ),
    ],
    expires_in: ExpiresIn = None,
    as_json: AsJson = False,
) -> None:
    """Make a key and print it: this once, it is shown nowhere again."""
    session = session_of(context)
    wanted = KeyCreate(name=_checked_name(name), scopes=list(dict.fromkeys(scopes)), expires_in_s=_life_s(expires_in))
    with session.client() as client:
        made = _create(client, wanted)
    _show_new(session, made, as_json)


@keys.command("list")
def list_keys(context: typer.Context, as_json: AsJson = False) -> None:
    """List all keys, without their secrets."""
    session = session_of(context)
    with session.client() as client:
        found = _all_keys(client)
    if as_json:
        session.screen.json(found)
        return
    now = session.clock()
    rows = [
        [one.id, one.name, ", ".join(one.scopes), day(one.created_at), _expiry(one, now), _standing(one, now)]
        for one in found
    ]
    columns = ("id", Column("name", CUT), Column("scopes", FOLDED), "created", "expires", "state")
    session.screen.table(columns, rows)


@keys.command("revoke")
def revoke(context: typer.Context, key_id: KeyId, as_json: AsJson = False) -> None:
    """Refuse a key from now on. Repeating it changes nothing."""
    session = session_of(context)
    with session.client() as client:
        found = _key(client, key_id)
        client.revoke_key(found.id)
    if as_json:
        session.screen.json({"id": found.id, "name": found.name, "revoked": True})
    else:
        session.screen.line(f"Key {found.id} ({found.name}) is revoked.")


@keys.command("rotate")
def rotate(
    context: typer.Context,
    key_id: KeyId,
    overlap: Annotated[str, typer.Option(metavar="TIME", help="How long the old key still works.")] = "1h",
    expires_in: ExpiresIn = None,
    as_json: AsJson = False,
) -> None:
    """Replace a key by a new one of the same name, scopes and life, and print that."""
    session = session_of(context)
    overlap_s = parse_duration(overlap)
    if overlap_s > _MAX_OVERLAP_S:
        raise CliError(f"--overlap {overlap} is too long", "At most 30d are allowed.")
    life_s = _life_s(expires_in)
    with session.client() as client:
        old = _key(client, key_id)
        if old.revoked_at is not None:
            raise CliError(f"key {old.id} is revoked; there is nothing to rotate", "Make a new one: baton keys create")
        if life_s is None and old.expires_at is not None:
            life_s = max(_MIN_LIFE_S, old.expires_at - old.created_at)
        wanted = KeyCreate(name=old.name, scopes=old.scopes, expires_in_s=life_s, replaces=old.id, overlap_s=overlap_s)
        made = _create(client, wanted)
    session.screen.say(f"The old key {old.id} works for another {overlap} at most.")
    _show_new(session, made, as_json)


def _create(client: BatonClient, wanted: KeyCreate) -> KeyCreated:
    with making("key", "revoke what nobody has"):
        return client.create_key(wanted)


def _show_new(session: Session, made: KeyCreated, as_json: bool) -> None:
    """The one place where a key is printed."""
    if as_json:
        session.screen.json(made)
        return
    until = f" until {_until(made.expires_at)}" if made.expires_at else ""
    session.screen.say(f"Key {made.id} ({made.name}) may {', '.join(made.scopes)}{until}. It is shown only now:")
    session.screen.raw(made.key)


def _all_keys(client: BatonClient) -> list[KeyView]:
    return [key for page in pages(lambda cursor: client.list_keys(limit=1000, cursor=cursor)) for key in page.keys]


def _key(client: BatonClient, given: str) -> KeyView:
    """The key that an id, or its beginning, names. Raises CliError."""
    if given.startswith("baton_"):
        raise CliError("that looks like a whole key", "Give its id only: the part between the underscores.")
    return named("key", _all_keys(client), given)


def _checked_name(name: str) -> str:
    if not 1 <= len(name) <= 64:
        raise CliError(f"a key's name has 1 to 64 characters, this one has {len(name)}")
    return name


def _life_s(text: str | None) -> int | None:
    if text is None:
        return None
    life_s = parse_duration(text)
    if not _MIN_LIFE_S <= life_s <= _MAX_LIFE_S:
        raise CliError(f"--expires-in {text} is out of bounds", "A key lives from 60s to 3650d.")
    return life_s


def _until(at: int | None) -> str:
    return moment(at) if at is not None else ""


def _expiry(key: KeyView, now: float) -> str:
    """When a key ends: the minute, where that is soon."""
    if key.expires_at is None:
        return ""
    return _until(key.expires_at) if abs(key.expires_at - now) < _SOON_S else day(key.expires_at)


def _standing(key: KeyView, now: float) -> str:
    if key.revoked_at is not None:
        return "revoked"
    return "expired" if key.expires_at is not None and key.expires_at <= now else "valid"


def scopes_of(client: BatonClient) -> frozenset[Scope]:
    """The scopes of the client's key. Raises Unauthorized if it has none, for it is unknown, revoked or expired."""
    asked: dict[Scope, Callable[[], object]] = {
        Scope.SUBMIT: lambda: client.jobs(limit=1),
        Scope.WORKER: lambda: client.peek(WorkQuery()),
        Scope.ADMIN: lambda: client.list_keys(limit=1),
    }
    found = frozenset(scope for scope, ask in asked.items() if _allowed(ask))
    # Who may do nothing of that may have a key for rings alone.
    return found or frozenset({Scope.RING} if _allowed(lambda: client.ring_records("any", RecordsRequest())) else ())


def _allowed(ask: Callable[[], object]) -> bool:
    try:
        ask()
    except Unauthorized as error:
        if error.code != ErrorCode.WRONG_SCOPE:
            raise
        return False
    except NotFound as error:
        return not error.foreign  # there is no such thing, which only those learn who may ask
    return True
