"""`baton webhooks`: who is told of events by HTTP. Needs a key of the scope admin."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from pydantic import ValidationError

from baton.contract.history import EventType
from baton.contract.webhooks import DeliveryView, WebhookCreate, WebhookCreated, WebhookView
from gpu_client.cli.core.errors import CliError
from gpu_client.cli.core.formats import count, moment
from gpu_client.cli.core.output import FOLDED, Column
from gpu_client.cli.core.session import AsJson, full_id, making, named, session_of
from gpu_client.transport.api.client import BatonClient
from gpu_client.transport.errors import NotFound

PER_PAGE = 1000
DEFAULT_LIMIT = 50
MAX_ADDRESS = 4096

webhooks = typer.Typer(help="Who is told of events by HTTP (for admins).", no_args_is_help=True)
WebhookIdArgument = Annotated[
    str, typer.Argument(metavar="ID", help="Webhook id, or the beginning of one.", show_default=False)
]


def register(app: typer.Typer) -> None:
    """Add the group."""
    app.add_typer(webhooks, name="webhooks")


@webhooks.command("create")
def create(
    context: typer.Context,
    url: Annotated[
        str,
        typer.Argument(
            metavar="URL", help="Where events are POSTed: https. '-' reads it from standard input.", show_default=False
        ),
    ],
    types: Annotated[
        list[EventType] | None,
        typer.Option("--type", metavar="TYPE", help="Only this type, such as job.completed; may be repeated."),
    ] = None,
    only_named: Annotated[
        bool, typer.Option("--only-named", help="Only of jobs that name it when they are submitted.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make a webhook and print the secret that its deliveries are signed with: it is shown nowhere again."""
    session = session_of(context)
    # addresses of chat services are secrets, and arguments are there for everybody to see
    address = sys.stdin.readline(MAX_ADDRESS).strip() if url == "-" and sys.stdin is not None else url
    try:
        wanted = WebhookCreate(url=address, types=list(dict.fromkeys(types or [])), every_job=not only_named)
    except ValidationError as error:
        raise CliError(f"{address[:80]!r} is no address", "Write it like https://hooks.example.com/baton") from error
    with session.client() as client:
        made = _create(client, wanted)
    if as_json:
        session.screen.json(made)
        return
    session.screen.say(f"Webhook {made.id} is told of {_told_of(made)}. Its secret is shown only now:")
    session.screen.raw(made.secret)


@webhooks.command("list")
def list_webhooks(context: typer.Context, as_json: AsJson = False) -> None:
    """List all webhooks, without their secrets."""
    session = session_of(context)
    with session.client() as client:
        found = client.list_webhooks()
    if as_json:
        session.screen.json(found)
    elif not found:
        session.screen.say("No webhooks. Make one: baton webhooks create URL")
    else:
        rows = [
            [one.id, one.url, _told_of(one), ", ".join(one.types) or "all", moment(one.created_at)] for one in found
        ]
        session.screen.table(("id", Column("url", FOLDED), "told of", Column("types", FOLDED), "created"), rows)


@webhooks.command("delete")
def delete(context: typer.Context, webhook_id: WebhookIdArgument, as_json: AsJson = False) -> None:
    """Tell it nothing more; what waits for it is dropped."""
    session = session_of(context)
    with session.client() as client:
        found = _webhook(client, webhook_id)
        try:
            client.delete_webhook(found.id)
        except NotFound as error:
            # an earlier try whose answer was lost, or somebody else: it is gone, as was asked for
            if error.foreign:
                raise
    if as_json:
        session.screen.json({"id": found.id, "deleted": True})
    else:
        session.screen.line(f"Webhook {found.id} is deleted.")


@webhooks.command("deliveries")
def deliveries(
    context: typer.Context,
    webhook_id: WebhookIdArgument,
    limit: Annotated[int, typer.Option(min=1, help="The newest so many.")] = DEFAULT_LIMIT,
    as_json: AsJson = False,
) -> None:
    """How the delivery of each event stands, the newest first; of the last 30 days."""
    session = session_of(context)
    with session.client() as client:
        found = _deliveries(client, _webhook(client, webhook_id).id, limit)
    if as_json:
        session.screen.json(found)
    elif not found:
        session.screen.say("Nothing was delivered to it in the last 30 days, nor tried.")
    else:
        rows = [
            [one.event_id, one.type, one.state, str(one.attempts), moment(one.last_at), one.problem] for one in found
        ]
        columns = ("event", "type", "state", Column("attempts", right=True), "last", Column("problem", FOLDED))
        session.screen.table(columns, rows)


@webhooks.command("replay")
def replay(
    context: typer.Context,
    webhook_id: WebhookIdArgument,
    job_id: Annotated[str, typer.Argument(metavar="JOB", help="Job id, or the beginning of one.", show_default=False)],
    from_seq: Annotated[int, typer.Option(min=1, help="The first event that comes again.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Tell a webhook a job's events again, those of the types that it wants."""
    session = session_of(context)
    with session.client() as client:
        webhook = _webhook(client, webhook_id)
        job = full_id(client, job_id)
        queued, next_seq = 0, from_seq
        while next_seq:
            answer = client.replay_webhook(webhook.id, job, next_seq)
            queued, next_seq = queued + answer.queued, answer.next_seq or 0
    if as_json:
        session.screen.json({"id": webhook.id, "job_id": job, "queued": queued})
    else:
        verb = "is" if queued == 1 else "are"
        session.screen.line(f"{count(queued, 'event')} of {job} {verb} told to {webhook.id} again.")


def _create(client: BatonClient, wanted: WebhookCreate) -> WebhookCreated:
    with making("webhook", "delete it, for nobody has its secret"):
        return client.create_webhook(wanted)


def _webhook(client: BatonClient, given: str) -> WebhookView:
    """The webhook that an id, or its beginning, names. Raises CliError."""
    return named("webhook", client.list_webhooks(), given)


def _deliveries(client: BatonClient, webhook_id: str, limit: int) -> list[DeliveryView]:
    found: list[DeliveryView] = []
    cursor: str | None = None
    while len(found) < limit:
        page = client.deliveries(webhook_id, limit=min(PER_PAGE, limit - len(found)), cursor=cursor)
        found += page.deliveries
        cursor = page.next_cursor
        if cursor is None:
            break
    return found


def _told_of(webhook: WebhookView) -> str:
    return "every job" if webhook.every_job else "jobs that name it"
