"""Webhooks, events and queue messages for tests."""

from __future__ import annotations

from typing import Any

from baton.contract.jobs.events import JobEvent, event_id
from baton.contract.jobs.history import EventType
from functions.domain.webhooks import Webhook
from functions.webhooks.event_queue import QueuedEvent
from tests.kits.api.stream_records import AT, JOB_ID, TENANT

SECRET = "c2VjcmV0LW9mLWEtd2ViaG9vay1mb3ItdGVzdHMtb25seQ"
HOOK_ID = "9f2c41d07be83a5610cd"


def make_webhook(**fields: Any) -> Webhook:
    """Build a webhook that wants all events."""
    given = {"id": HOOK_ID, "tenant": TENANT, "url": "https://hooks.example.com/baton", "secret": SECRET}
    return Webhook(**{**given, "created_at": AT, **fields})


def make_event(seq: int = 1, *, job_id: str = JOB_ID, **fields: Any) -> JobEvent:
    """Build a published event."""
    given = {"id": event_id(job_id, seq), "type": EventType.STARTED, "job_id": job_id, "tenant": TENANT, "seq": seq}
    return JobEvent(**{**given, "epoch": 1, "at": AT + seq, **fields})


def line_record(
    event: JobEvent | None = None, *, webhook_id: str = HOOK_ID, attempts: int = 1, sent_at: int = AT, place: int = 0
) -> dict[str, Any]:
    """Build a message of the delivery queue in the form of Lambda."""
    event = event or make_event()
    return {
        "messageId": f"{place:08d}-1f3e-4d6c-9b1a-2f5d8c7e4a90",
        "receiptHandle": f"receipt-{place}",
        "body": QueuedEvent(event.tenant, webhook_id, event).as_json(),
        "attributes": {
            "ApproximateReceiveCount": str(attempts),
            "SentTimestamp": str(sent_at * 1000),
            "SequenceNumber": f"188{place:017d}",
            "MessageGroupId": f"{webhook_id}.{event.job_id}",
            "SenderId": "AROAEXAMPLE:baton-prod-publisher",
            "MessageDeduplicationId": f"{webhook_id}.{event.job_id}.{event.seq}",
            "ApproximateFirstReceiveTimestamp": str(sent_at * 1000),
        },
        "messageAttributes": {},
        "md5OfBody": "d41d8cd98f00b204e9800998ecf8427e",
        "eventSource": "aws:sqs",
        "eventSourceARN": "arn:aws:sqs:eu-central-1:123456789012:baton-prod-webhooks.fifo",
        "awsRegion": "eu-central-1",
    }
