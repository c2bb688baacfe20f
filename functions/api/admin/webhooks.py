"""The calls for webhooks: create, list, delete, list deliveries, replay events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from baton.contract.admin.webhooks import (
    MAX_WEBHOOKS,
    DeliveryPage,
    DeliveryQuery,
    DeliveryView,
    FleetReplayRequest,
    ReplayAnswer,
    ReplayRequest,
    WebhookCreate,
    WebhookCreated,
    WebhookList,
    WebhookView,
)
from baton.contract.errors import ErrorCode
from baton.contract.jobs.events import JobEvent, event_id
from functions.api.http.context import ApiCall, Context, NoContent, require_job
from functions.domain.errors import Refusal
from functions.domain.records import Event, Job
from functions.domain.webhooks import Delivery, Webhook, parse_target

if TYPE_CHECKING:
    from functions.fleet.records import FleetEvent
    from functions.fleet.store import FleetStore

REPLAY_EVENTS = 500
"""Limit of the events that one call reads: each queued event costs a request, and the call has a time limit."""


def create_webhook(context: Context, call: ApiCall) -> WebhookCreated:
    """Create a webhook; only this answer shows the webhook's secret."""
    body: WebhookCreate = call.body
    parse_target(body.url, context.settings.webhook_test_origin)
    if len(context.webhooks.of_tenant(call.tenant)) >= MAX_WEBHOOKS:
        raise Refusal(
            ErrorCode.CONFLICT, f"The tenant has {MAX_WEBHOOKS} webhooks, the maximum; delete an unused webhook."
        )
    webhook = Webhook(
        id=context.random.key_id(),
        tenant=call.tenant,
        url=body.url,
        secret=context.random.token(),
        types=list(dict.fromkeys(body.types)),
        every_job=body.every_job,
        created_at=call.now,
    )
    context.webhooks.put(webhook)
    return WebhookCreated(**webhook.model_dump())


def list_webhooks(context: Context, call: ApiCall) -> WebhookList:
    """List the tenant's webhooks without their secrets."""
    return WebhookList(
        webhooks=[WebhookView(**webhook.model_dump()) for webhook in context.webhooks.of_tenant(call.tenant)]
    )


def delete_webhook(context: Context, call: ApiCall) -> NoContent:
    """Delete a webhook; the deliverer drops the events that wait for the webhook."""
    if not context.webhooks.delete(call.tenant, call.path["id"]):
        raise _not_found(call)
    return NoContent()


def list_deliveries(context: Context, call: ApiCall) -> DeliveryPage:
    """List the delivery state of each event, newest event first."""
    query: DeliveryQuery = call.query
    webhook = _require_webhook(context, call)
    page = context.webhooks.deliveries(webhook.id, limit=query.limit, cursor=query.cursor)
    return DeliveryPage(deliveries=[_view(delivery) for delivery in page.items], next_cursor=page.cursor)


def replay(context: Context, call: ApiCall) -> ReplayAnswer:
    """Queue the events of a job or a fleet again for one webhook.

    Those of the webhook's types, also of jobs and fleets that the webhook is not subscribed to.
    """
    body: ReplayRequest | FleetReplayRequest = call.body
    webhook = _require_webhook(context, call)
    if isinstance(body, FleetReplayRequest):
        return _replay_fleet(context, call, webhook, body)
    job = require_job(context, call, body.job_id)
    events, next_seq = _read_events(context, job, body.from_seq)
    wanted = [event for event in events if webhook.wants(event.type, webhook.id)]
    repetition = context.random.key_id()
    for event in wanted:
        context.delivery_queue.put(webhook, _rebuild_event(job, event), repetition=repetition)
    return ReplayAnswer(queued=len(wanted), next_seq=next_seq)


def _replay_fleet(context: Context, call: ApiCall, webhook: Webhook, body: FleetReplayRequest) -> ReplayAnswer:
    if context.fleet is None:
        raise RuntimeError("this function has no store of fleets")
    if context.fleet.fleet(call.tenant, body.fleet) is None:
        raise Refusal(ErrorCode.FLEET_NOT_FOUND, f"No fleet {body.fleet}.", field="fleet")
    events, next_at = _read_fleet_events(context.fleet, call.tenant, body)
    wanted = [(number, event) for number, event in events if event.type in webhook.types]
    repetition = context.random.key_id()
    for number, event in wanted:
        context.delivery_queue.put(webhook, event.published(call.tenant, body.fleet, number), repetition=repetition)
    return ReplayAnswer(queued=len(wanted), next_at=next_at)


def _read_fleet_events(
    store: FleetStore, tenant: str, body: FleetReplayRequest
) -> tuple[Sequence[tuple[int, FleetEvent]], int | None]:
    """Return the fleet's events from a time on, and the time of the first event beyond the limit, if any.

    A call ends between two seconds, because the next call begins with a second.
    """
    limit = REPLAY_EVENTS
    while True:
        found = store.history(tenant, body.fleet, since=body.from_at, limit=limit + 1)
        if len(found) <= limit:
            return found, None
        next_at = found[-1][1].at
        earlier = [each for each in found if each[1].at < next_at]
        if earlier:
            return earlier, next_at
        limit *= 2


def _read_events(context: Context, job: Job, seq: int) -> tuple[list[Event], int | None]:
    """Return the job's events from number `seq` on, and the number of the first event beyond the limit, if any."""
    found: list[Event] = []
    cursor: str | None = None
    while True:
        page = context.jobs.history(Event, job.id, limit=REPLAY_EVENTS, cursor=cursor)
        found += [event for event in page.items if event.seq >= seq]
        cursor = page.cursor
        if len(found) > REPLAY_EVENTS:
            return found[:REPLAY_EVENTS], found[REPLAY_EVENTS].seq
        if cursor is None:
            return found, None


def _rebuild_event(job: Job, event: Event) -> JobEvent:
    return JobEvent(id=event_id(job.id, event.seq), job_id=job.id, tenant=job.tenant, **event.model_dump())


def _view(delivery: Delivery) -> DeliveryView:
    return DeliveryView(event_id=event_id(delivery.job_id, delivery.seq), **delivery.model_dump())


def _require_webhook(context: Context, call: ApiCall) -> Webhook:
    webhook = context.webhooks.get(call.tenant, call.path["id"])
    if webhook is None:
        raise _not_found(call)
    return webhook


def _not_found(call: ApiCall) -> Refusal:
    return Refusal(ErrorCode.WEBHOOK_NOT_FOUND, f"No webhook {call.path['id']}.", field="id")
