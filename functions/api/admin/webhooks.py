"""Webhooks: making, listing and deleting them; how their deliveries went; delivering again."""

from __future__ import annotations

from baton.contract.errors import ErrorCode
from baton.contract.events import JobEvent, event_id
from baton.contract.webhooks import (
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
from functions.api.http.context import Call, Context, NoContent, job_of
from functions.domain.access.webhooks import Delivery, Webhook, parse_target
from functions.domain.errors import Refusal
from functions.domain.records import Event, Job

REPLAY_EVENTS = 500
"""At most so many are looked at by one call: each that is put in line takes a request, and the call ends in time."""


def create_webhook(context: Context, call: Call) -> WebhookCreated:
    """Make a webhook; the answer is the only place that ever shows its secret."""
    body: WebhookCreate = call.body
    parse_target(body.url, context.settings.webhook_test_origin)
    if len(context.webhooks.of_tenant(call.tenant)) >= MAX_WEBHOOKS:
        raise Refusal(ErrorCode.CONFLICT, f"There are {MAX_WEBHOOKS} webhooks already; delete one that is not needed.")
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


def list_webhooks(context: Context, call: Call) -> WebhookList:
    """All of the tenant's, without their secrets."""
    return WebhookList(
        webhooks=[WebhookView(**webhook.model_dump()) for webhook in context.webhooks.of_tenant(call.tenant)]
    )


def delete_webhook(context: Context, call: Call) -> NoContent:
    """Tell somebody nothing more: what waits for it is dropped."""
    if not context.webhooks.delete(call.tenant, call.path["id"]):
        raise _unknown(call)
    return NoContent()


def list_deliveries(context: Context, call: Call) -> DeliveryPage:
    """How each event's delivery stands, newest event first."""
    query: DeliveryQuery = call.query
    webhook = _own(context, call)
    page = context.webhooks.deliveries(webhook.id, limit=query.limit, cursor=query.cursor)
    return DeliveryPage(deliveries=[_view(delivery) for delivery in page.items], next_cursor=page.cursor)


def replay(context: Context, call: Call) -> ReplayAnswer:
    """Put a job's events in line again for one webhook: those of the types that it wants, whatever job it wants."""
    body: ReplayRequest = call.body
    webhook = _own(context, call)
    job = job_of(context, call, body.job_id)
    events, next_seq = _events_from(context, job, body.from_seq)
    wanted = [event for event in events if webhook.wants(event.type, webhook.id)]
    repetition = context.random.key_id()
    for event in wanted:
        context.line.put(webhook, _published(job, event), repetition=repetition)
    return ReplayAnswer(queued=len(wanted), next_seq=next_seq)


def _events_from(context: Context, job: Job, seq: int) -> tuple[list[Event], int | None]:
    """The job's next events from `seq` on, and the number of the first that is left, if any is."""
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


def _published(job: Job, event: Event) -> JobEvent:
    return JobEvent(id=event_id(job.id, event.seq), job_id=job.id, tenant=job.tenant, **event.model_dump())


def _view(delivery: Delivery) -> DeliveryView:
    return DeliveryView(event_id=event_id(delivery.job_id, delivery.seq), **delivery.model_dump())


def _own(context: Context, call: Call) -> Webhook:
    webhook = context.webhooks.get(call.tenant, call.path["id"])
    if webhook is None:
        raise _unknown(call)
    return webhook


def _unknown(call: Call) -> Refusal:
    return Refusal(ErrorCode.WEBHOOK_NOT_FOUND, f"No webhook {call.path['id']}.", field="id")
