"""The calls for webhooks: create, list, delete, list deliveries, replay events."""

from __future__ import annotations

from baton.contract.admin.webhooks import (
    MAX_WEBHOOKS,
    DeliveryPage,
    DeliveryQuery,
    DeliveryView,
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
    """Queue a job's events again for one webhook: the events of the webhook's types, also of jobs not subscribed to."""
    body: ReplayRequest = call.body
    webhook = _require_webhook(context, call)
    job = require_job(context, call, body.job_id)
    events, next_seq = _read_events(context, job, body.from_seq)
    wanted = [event for event in events if webhook.wants(event.type, webhook.id)]
    repetition = context.random.key_id()
    for event in wanted:
        context.delivery_queue.put(webhook, _rebuild_event(job, event), repetition=repetition)
    return ReplayAnswer(queued=len(wanted), next_seq=next_seq)


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
