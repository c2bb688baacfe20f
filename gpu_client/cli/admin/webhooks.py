"""Command group `baton webhooks`: send events to HTTP endpoints. Needs the scope admin."""

from __future__ import annotations

import sys
from datetime import datetime
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from baton.contract.admin.webhooks import DeliveryView, WebhookCreate, WebhookCreated, WebhookView
from baton.contract.fleets.events import FleetEventType
from baton.contract.jobs.history import EventType
from gpu_client.cli.core.errors import CliError
from gpu_client.cli.core.formats import count, moment
from gpu_client.cli.core.output import FOLDED, TableColumn
from gpu_client.cli.core.session import AsJson, find_by_id, guard_creation, resolve_job_id, session_of
from gpu_client.transport.api.client import BatonClient
from gpu_client.transport.errors import NotFound

PER_PAGE = 1000
DEFAULT_LIMIT = 50
MAX_ADDRESS = 4096

webhooks = typer.Typer(help="Send events to HTTP endpoints (scope admin).", no_args_is_help=True)
WebhookIdArgument = Annotated[
    str, typer.Argument(metavar="ID", help="Webhook id or unique prefix.", show_default=False)
]


def _read_type(text: str) -> EventType | FleetEventType:
    """Return the type of an event by its name."""
    types: dict[str, EventType | FleetEventType] = {one.value: one for one in (*EventType, *FleetEventType)}
    if text not in types:
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(types)}.")
    return types[text]


def register(app: typer.Typer) -> None:
    """Add the command group."""
    app.add_typer(webhooks, name="webhooks")


@webhooks.command("create")
def create(
    context: typer.Context,
    url: Annotated[
        str,
        typer.Argument(
            metavar="URL",
            help="HTTPS endpoint that receives events by POST; - reads the URL from standard input.",
            show_default=False,
        ),
    ],
    types: Annotated[
        list[Any] | None,
        typer.Option(
            "--type",
            metavar="TYPE",
            parser=_read_type,
            help="Send only this event type, for example job.completed or machine.gone; repeatable.",
        ),
    ] = None,
    only_named: Annotated[
        bool,
        typer.Option("--only-named", help="Send only events of jobs that name this webhook (baton submit --webhook)."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Create a webhook and print its secret.

    The secret signs the deliveries and cannot be shown again.
    """
    session = session_of(context)
    # Endpoints of chat services are secrets, and other users can read arguments: accept standard input.
    address = sys.stdin.readline(MAX_ADDRESS).strip() if url == "-" and sys.stdin is not None else url
    try:
        wanted = WebhookCreate(
            url=address,
            types=list(dict.fromkeys(types or [])),
            every_job=not only_named,
        )
    except ValidationError as error:
        raise CliError(
            f"{address[:80]!r} is not an HTTPS URL", "Write the URL like https://hooks.example.com/baton"
        ) from error
    with session.client() as client:
        made = _create_webhook(client, wanted)
    if as_json:
        session.output.json(made)
        return
    session.output.note(f"Webhook {made.id} receives events of {_format_scope(made)}. Its secret is shown only once:")
    session.output.raw(made.secret)


@webhooks.command("list")
def list_webhooks(context: typer.Context, as_json: AsJson = False) -> None:
    """List all webhooks without their secrets."""
    session = session_of(context)
    with session.client() as client:
        found = client.list_webhooks()
    if as_json:
        session.output.json(found)
    elif not found:
        session.output.note("No webhooks. Create one with: baton webhooks create URL")
    else:
        rows = [
            [one.id, one.url, _format_scope(one), ", ".join(one.types) or "all", moment(one.created_at)]
            for one in found
        ]
        session.output.table(("id", TableColumn("url", FOLDED), "jobs", TableColumn("types", FOLDED), "created"), rows)


@webhooks.command("delete")
def delete(context: typer.Context, webhook_id: WebhookIdArgument, as_json: AsJson = False) -> None:
    """Delete a webhook and discard its queued events."""
    session = session_of(context)
    with session.client() as client:
        found = _find_webhook(client, webhook_id)
        try:
            client.delete_webhook(found.id)
        except NotFound as error:
            # An earlier try with a lost answer, or another user, deleted the webhook: success.
            if error.foreign:
                raise
    if as_json:
        session.output.json({"id": found.id, "deleted": True})
    else:
        session.output.line(f"Webhook {found.id} is deleted.")


@webhooks.command("deliveries")
def deliveries(
    context: typer.Context,
    webhook_id: WebhookIdArgument,
    limit: Annotated[int, typer.Option(min=1, help="Number of deliveries to list.")] = DEFAULT_LIMIT,
    as_json: AsJson = False,
) -> None:
    """List the deliveries of the last 30 days, newest first."""
    session = session_of(context)
    with session.client() as client:
        found = _list_deliveries(client, _find_webhook(client, webhook_id).id, limit)
    if as_json:
        session.output.json(found)
    elif not found:
        session.output.note("No delivery was attempted in the last 30 days.")
    else:
        rows = [
            [one.event_id, one.type, one.state, str(one.attempts), moment(one.last_at), one.problem] for one in found
        ]
        columns = (
            "event",
            "type",
            "state",
            TableColumn("attempts", right=True),
            "last",
            TableColumn("problem", FOLDED),
        )
        session.output.table(columns, rows)


@webhooks.command("replay")
def replay(
    context: typer.Context,
    webhook_id: WebhookIdArgument,
    job_id: Annotated[
        str | None, typer.Argument(metavar="JOB", help="Job id or unique prefix.", show_default=False)
    ] = None,
    *,
    from_seq: Annotated[int, typer.Option(min=1, help="Sequence number of the job's first event to send again.")] = 1,
    fleet: Annotated[
        str | None, typer.Option("--fleet", metavar="NAME", help="Fleet, instead of a job.", show_default=False)
    ] = None,
    since: Annotated[
        datetime | None,
        typer.Option(
            "--since",
            formats=["%Y-%m-%d %H:%M:%S", "%Y-%m-%d"],
            help="Time of the fleet's first event to send again, as `baton fleet events` prints the time.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Send the events of a job or a fleet to a webhook again."""
    if (job_id is None) == (fleet is None):
        raise CliError("name either a job or a fleet", "For a fleet: baton webhooks replay ID --fleet NAME")
    session = session_of(context)
    with session.client() as client:
        webhook = _find_webhook(client, webhook_id)
        if fleet is not None:
            subject, kind = fleet, "fleet"
            queued = _replay_fleet(client, webhook.id, fleet, 0 if since is None else int(since.timestamp()))
        else:
            subject, kind = resolve_job_id(client, job_id or ""), "job_id"
            queued = _replay_job(client, webhook.id, subject, from_seq)
    if as_json:
        session.output.json({"id": webhook.id, kind: subject, "queued": queued})
    else:
        verb = "is" if queued == 1 else "are"
        session.output.line(f"{count(queued, 'event')} of {subject} {verb} queued for {webhook.id} again.")
    if fleet is not None and not any(isinstance(one, FleetEventType) for one in webhook.types):
        session.output.note("The webhook receives no events of fleets: none of their types is among its types.")


def _replay_job(client: BatonClient, webhook_id: str, job_id: str, from_seq: int) -> int:
    queued, next_seq = 0, from_seq
    while next_seq:
        answer = client.replay_webhook(webhook_id, job_id, next_seq)
        queued, next_seq = queued + answer.queued, answer.next_seq or 0
    return queued


def _replay_fleet(client: BatonClient, webhook_id: str, fleet: str, from_at: int) -> int:
    queued, next_at = 0, from_at
    while True:
        answer = client.replay_fleet(webhook_id, fleet, next_at)
        queued += answer.queued
        if answer.next_at is None:
            return queued
        next_at = answer.next_at


def _create_webhook(client: BatonClient, wanted: WebhookCreate) -> WebhookCreated:
    with guard_creation("webhook", "delete a webhook whose secret you do not know"):
        return client.create_webhook(wanted)


def _find_webhook(client: BatonClient, given: str) -> WebhookView:
    """Return the webhook with an id or unique prefix. Raises CliError."""
    return find_by_id("webhook", client.list_webhooks(), given)


def _list_deliveries(client: BatonClient, webhook_id: str, limit: int) -> list[DeliveryView]:
    found: list[DeliveryView] = []
    cursor: str | None = None
    while len(found) < limit:
        page = client.deliveries(webhook_id, limit=min(PER_PAGE, limit - len(found)), cursor=cursor)
        found += page.deliveries
        cursor = page.next_cursor
        if cursor is None:
            break
    return found


def _format_scope(webhook: WebhookView) -> str:
    return "all jobs" if webhook.every_job else "jobs that name the webhook"
