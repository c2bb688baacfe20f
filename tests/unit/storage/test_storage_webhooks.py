"""Test the requests of the webhook store and of the delivery queue to AWS."""

from __future__ import annotations

import json
from typing import Any

from baton.contract.admin.webhooks import DeliveryState
from functions.domain.webhooks import Delivery
from functions.storage.dynamodb.webhooks import DynamoWebhookStore
from functions.storage.tables import WEBHOOKS
from functions.webhooks.event_queue import QueuedEvent, SqsDeliveryQueue
from tests.kits.api.stream_records import AT, JOB_ID, OTHER_JOB
from tests.kits.api.webhooks import HOOK_ID, SECRET, make_event, make_webhook


class Recorder:
    """A client that records its requests."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def __getattr__(self, _name: str) -> Any:
        return lambda **parameters: self.asked.append(parameters) or {}


def test_a_delivery_is_forgotten_thirty_days_after_its_last_try() -> None:
    client = Recorder()
    place = {"webhook_id": HOOK_ID, "job_id": JOB_ID, "seq": 1, "type": "job.started", "at": AT}
    DynamoWebhookStore(client, "baton-").record(
        Delivery(**place, state=DeliveryState.DELIVERED, attempts=1, last_at=AT + 60)
    )
    (item,) = [asked["Item"] for asked in client.asked]
    assert WEBHOOKS.ttl_attribute is not None
    assert item[WEBHOOKS.ttl_attribute] == {"N": str(AT + 60 + 30 * 86_400)}


def test_a_webhook_is_not_forgotten() -> None:
    client = Recorder()
    DynamoWebhookStore(client, "baton-").put(make_webhook())
    assert "ttl" not in client.asked[0]["Item"]


def test_the_line_has_a_group_for_each_webhook_and_job_and_knows_repeats() -> None:
    client = Recorder()
    line = SqsDeliveryQueue("https://queue", client)
    other_hook = make_webhook(id="0" * 20)
    for webhook, event, repetition in (
        (make_webhook(), make_event(1), ""),
        (make_webhook(), make_event(1), ""),
        (make_webhook(), make_event(2), ""),
        (make_webhook(), make_event(2), "again"),
        (make_webhook(), make_event(1, job_id=OTHER_JOB), ""),
        (other_hook, make_event(1), ""),
    ):
        line.put(webhook, event, repetition=repetition)
    groups = [asked["MessageGroupId"] for asked in client.asked]
    assert groups == [f"{HOOK_ID}.{JOB_ID}"] * 4 + [f"{HOOK_ID}.{OTHER_JOB}", f"{'0' * 20}.{JOB_ID}"]
    repeats = [asked["MessageDeduplicationId"] for asked in client.asked]
    assert repeats[0] == repeats[1], "what the publisher puts twice is one message"
    assert len(set(repeats)) == 5 and all(len(one) <= 128 for one in repeats)
    for asked in client.asked:
        assert SECRET not in json.dumps(asked), "it waits in nobody's queue"
        assert asked["QueueUrl"] == "https://queue" and QueuedEvent.from_json(asked["MessageBody"]).event.seq in (1, 2)


def test_without_a_line_nobody_is_told() -> None:
    client = Recorder()
    SqsDeliveryQueue(None, client).put(make_webhook(), make_event(1))
    assert client.asked == []
