"""Command group `baton keys`: create, list, revoke and rotate API keys. Needs the scope admin, but for share keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from baton.contract.admin.keys import KeyCreate, KeyCreated, KeyView
from baton.contract.errors import ErrorCode
from baton.contract.names import Scope
from baton.contract.objects.rings import RecordsRequest
from baton.contract.worker.calls import WorkQuery
from gpu_client.cli.core.errors import CliError
from gpu_client.cli.core.formats import day, moment, parse_duration
from gpu_client.cli.core.output import CUT, FOLDED, TableColumn
from gpu_client.cli.core.session import AsJson, CliSession, find_by_id, guard_creation, session_of
from gpu_client.transport.api.calls import pages
from gpu_client.transport.api.client import BatonClient
from gpu_client.transport.errors import NotFound, Unauthorized

_MIN_LIFE_S, _MAX_LIFE_S = 60, 10 * 365 * 86_400
_MAX_OVERLAP_S = 30 * 86_400
_SOON_S = 2 * 86_400

keys = typer.Typer(help="Manage API keys (scope admin).", no_args_is_help=True)
KeyId = Annotated[str, typer.Argument(metavar="ID", help="Key id or unique prefix.", show_default=False)]
ExpiresIn = Annotated[
    str | None, typer.Option(metavar="TIME", help="Lifetime of the key, for example 12h or 90d. Default: no expiry.")
]


def register(app: typer.Typer) -> None:
    """Add the command group."""
    app.add_typer(keys, name="keys")


@keys.command("create")
def create(
    context: typer.Context,
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the user or program that gets the key.", show_default=False)
    ],
    scopes: Annotated[
        list[Scope],
        typer.Option(
            "--scope",
            metavar="SCOPE",
            help="Permission of the key: submit, worker, ring or admin; repeatable. A client of the original Dreambooth"
            " orchestrator needs both: --scope submit --scope worker.",
        ),
    ],
    expires_in: ExpiresIn = None,
    as_json: AsJson = False,
) -> None:
    """Create a key and print it. The key cannot be shown again."""
    session = session_of(context)
    wanted = KeyCreate(
        name=_checked_name(name), scopes=list(dict.fromkeys(scopes)), expires_in_s=_parse_lifetime(expires_in)
    )
    with session.client() as client:
        made = _create_key(client, wanted)
    _show_new(session, made, as_json)


@keys.command("list")
def list_keys(context: typer.Context, as_json: AsJson = False) -> None:
    """List all keys without their secrets."""
    session = session_of(context)
    with session.client() as client:
        found = _list_keys(client)
    if as_json:
        session.output.json(found)
        return
    now = session.clock()
    rows = [
        [
            one.id,
            one.name,
            ", ".join(one.scopes),
            day(one.created_at),
            _format_expiry(one, now),
            _format_state(one, now),
        ]
        for one in found
    ]
    columns = ("id", TableColumn("name", CUT), TableColumn("scopes", FOLDED), "created", "expires", "state")
    session.output.table(columns, rows)


@keys.command("revoke")
def revoke(context: typer.Context, key_id: KeyId, as_json: AsJson = False) -> None:
    """Revoke a key. Idempotent. A key of scope submit revokes share keys, by the whole id."""
    session = session_of(context)
    with session.client() as client:
        name = None
        try:
            found = _find_key(client, key_id)
            key_id, name = found.id, found.name
        except Unauthorized as refusal:
            # A submitter may end a shared link, and may not list keys.
            if refusal.code != ErrorCode.WRONG_SCOPE:
                raise
        client.revoke_key(key_id)
    if as_json:
        session.output.json({"id": key_id, "name": name, "revoked": True})
    else:
        session.output.line(f"Key {key_id}{f' ({name})' if name else ''} is revoked.")


@keys.command("rotate")
def rotate(
    context: typer.Context,
    key_id: KeyId,
    overlap: Annotated[str, typer.Option(metavar="TIME", help="Time until the old key expires, at most 30d.")] = "1h",
    expires_in: ExpiresIn = None,
    as_json: AsJson = False,
) -> None:
    """Replace a key.

    Creates a key with the name, scopes and lifetime of the old key, prints the new key, and expires the old key.
    """
    session = session_of(context)
    overlap_s = parse_duration(overlap)
    if overlap_s > _MAX_OVERLAP_S:
        raise CliError(f"--overlap {overlap} is too long", "Give at most 30d.")
    life_s = _parse_lifetime(expires_in)
    with session.client() as client:
        old = _find_key(client, key_id)
        if old.revoked_at is not None:
            raise CliError(f"key {old.id} is revoked and cannot be rotated", "Create a new key: baton keys create")
        if life_s is None and old.expires_at is not None:
            life_s = max(_MIN_LIFE_S, old.expires_at - old.created_at)
        wanted = KeyCreate(name=old.name, scopes=old.scopes, expires_in_s=life_s, replaces=old.id, overlap_s=overlap_s)
        made = _create_key(client, wanted)
    session.output.note(f"The old key {old.id} expires within {overlap}.")
    _show_new(session, made, as_json)


def _create_key(client: BatonClient, wanted: KeyCreate) -> KeyCreated:
    with guard_creation("key", "revoke a key that you do not know"):
        return client.create_key(wanted)


def _show_new(session: CliSession, made: KeyCreated, as_json: bool) -> None:
    """Print a new key. No other function prints keys."""
    if as_json:
        session.output.json(made)
        return
    until = f" until {_format_until(made.expires_at)}" if made.expires_at else ""
    scopes = f"scope{'s' if len(made.scopes) > 1 else ''} {', '.join(made.scopes)}"
    session.output.note(f"Key {made.id} ({made.name}) has the {scopes}{until}. It is shown only once:")
    session.output.raw(made.key)


def _list_keys(client: BatonClient) -> list[KeyView]:
    return [key for page in pages(lambda cursor: client.list_keys(limit=1000, cursor=cursor)) for key in page.keys]


def _find_key(client: BatonClient, given: str) -> KeyView:
    """Return the key with an id or unique prefix. Raises CliError."""
    if given.startswith("baton_"):
        raise CliError("this is a secret key, not a key id", "Give the id only: the part between the underscores.")
    return find_by_id("key", _list_keys(client), given)


def _checked_name(name: str) -> str:
    if not 1 <= len(name) <= 64:
        raise CliError(f"a key name has 1 to 64 characters; this name has {len(name)}")
    return name


def _parse_lifetime(text: str | None) -> int | None:
    if text is None:
        return None
    life_s = parse_duration(text)
    if not _MIN_LIFE_S <= life_s <= _MAX_LIFE_S:
        raise CliError(f"--expires-in {text} is out of range", "Give 60s to 3650d.")
    return life_s


def _format_until(at: int | None) -> str:
    return moment(at) if at is not None else ""


def _format_expiry(key: KeyView, now: float) -> str:
    """Format the expiry of a key: date and time within two days, else the date."""
    if key.expires_at is None:
        return ""
    return _format_until(key.expires_at) if abs(key.expires_at - now) < _SOON_S else day(key.expires_at)


def _format_state(key: KeyView, now: float) -> str:
    if key.revoked_at is not None:
        return "revoked"
    return "expired" if key.expires_at is not None and key.expires_at <= now else "valid"


def probe_scopes(client: BatonClient) -> frozenset[Scope]:
    """Determine the scopes of the client's key by calls without side effects.

    Raises Unauthorized for an unknown, revoked or expired key.
    """
    asked: dict[Scope, Callable[[], object]] = {
        Scope.SUBMIT: lambda: client.jobs(limit=1),
        Scope.WORKER: lambda: client.peek(WorkQuery()),
        Scope.ADMIN: lambda: client.list_keys(limit=1),
    }
    found = frozenset(scope for scope, ask in asked.items() if _is_allowed(ask))
    # A ring key has no other scope, so it is probed only if all others fail.
    return found or frozenset({Scope.RING} if _is_allowed(lambda: client.ring_records("any", RecordsRequest())) else ())


def _is_allowed(ask: Callable[[], object]) -> bool:
    try:
        ask()
    except Unauthorized as error:
        if error.code != ErrorCode.WRONG_SCOPE:
            raise
        return False
    except NotFound as error:
        return not error.foreign  # the API authorizes first, so its own 404 proves the scope
    return True
