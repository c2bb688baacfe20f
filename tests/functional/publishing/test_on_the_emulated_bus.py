"""Test the real clients against the emulated EventBridge, SQS and DynamoDB Streams."""

from __future__ import annotations

import json
from typing import Any

import pytest
from botocore.exceptions import ClientError

from baton.contract.jobs.events import JobEvent
from functions.domain.errors import StorageUnavailable
from functions.local.emulator import Emulator
from functions.local.triggers.stream_feed import StreamFeed
from functions.publishing.bus import DeadLetterQueue, EventBridgeBus
from functions.publishing.outbox import publish
from functions.storage.tables import JOBS, STREAM, create_tables
from tests.kits.api.harness import Api, emulated_api
from tests.kits.api.stream_records import FakeBus, FakeDeadLetters, no_wait, stream_record
from tests.kits.clouds.emulator import unique
from tests.kits.clouds.store_sets import moto_cloud

pytestmark = pytest.mark.emulator


def stream_of(dynamodb: Any, api: Api) -> str:
    arn: str = dynamodb.describe_table(TableName=JOBS.name(api.context.settings.table_prefix))["Table"][
        "LatestStreamArn"
    ]
    return arn


def received(sqs: Any, queue: str) -> list[dict[str, Any]]:
    """Receive and delete all messages; return their bodies in order."""
    found = []
    while messages := sqs.receive_message(QueueUrl=queue, MaxNumberOfMessages=10).get("Messages", []):
        for message in messages:
            sqs.delete_message(QueueUrl=queue, ReceiptHandle=message["ReceiptHandle"])
            found.append(json.loads(message["Body"]))
    return found


def test_what_the_bus_is_given_arrives_at_a_rule_s_target(emulator: Emulator) -> None:
    events, sqs = emulator.client("events"), emulator.client("sqs")
    name = unique("bus")
    events.create_event_bus(Name=name)
    queue = sqs.create_queue(QueueName=name)["QueueUrl"]
    arn = sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
    events.put_rule(Name="all", EventBusName=name, EventPattern='{"detail": {"tenant": ["acme"], "seq": [2]}}')
    events.put_targets(Rule="all", EventBusName=name, Targets=[{"Id": "seen", "Arn": arn}])
    records = [stream_record(seq, data={"message": "grün ☃"}) for seq in (1, 2)]
    assert publish(records, EventBridgeBus(events, name), FakeDeadLetters(), no_wait) == {"batchItemFailures": []}
    (message,) = received(sqs, queue)
    assert (message["source"], message["detail-type"]) == ("baton", "job.started")
    event = JobEvent.model_validate(message["detail"])
    assert (event.seq, event.data) == (2, {"message": "grün ☃"})


def test_a_bus_that_cannot_be_reached_is_away(emulator: Emulator) -> None:
    client = emulator.client("events", connect_timeout=1, retries={"total_max_attempts": 1})
    client.meta.events.register("before-send.events.PutEvents", lambda **_: _drop())
    waits_s: list[float] = []
    answer = publish([stream_record(1)], EventBridgeBus(client, "any"), FakeDeadLetters(), waits_s.append)
    assert len(answer["batchItemFailures"]) == 1 and len(waits_s) == 2


def _drop() -> None:
    from botocore.exceptions import EndpointConnectionError

    raise EndpointConnectionError(endpoint_url="http://nowhere")


def test_dead_letters_name_the_item_and_a_missing_queue_is_a_fault(emulator: Emulator) -> None:
    sqs = emulator.client("sqs")
    queue = sqs.create_queue(QueueName=unique("letters"))["QueueUrl"]
    DeadLetterQueue(queue, sqs).put({"pk": "JOB#1", "sk": "EVENT#1"}, "it has no 'doc'")
    assert received(sqs, queue) == [{"why": "it has no 'doc'", "keys": {"pk": "JOB#1", "sk": "EVENT#1"}}]
    with pytest.raises(ClientError):
        DeadLetterQueue(f"{queue}-gone", sqs).put({"pk": "1"}, "why")
    sqs.meta.events.register("before-send.sqs.SendMessage", lambda **_: _drop())
    with pytest.raises(StorageUnavailable):
        DeadLetterQueue(queue, sqs).put({"pk": "1"}, "why")


def test_without_a_queue_dead_letters_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    DeadLetterQueue(None).put({"pk": "JOB#1", "sk": "EVENT#1"}, "it has no 'doc'")
    assert "no queue for dead letters" in caplog.text


def test_a_table_of_an_earlier_version_gets_its_stream(emulator: Emulator) -> None:
    prefix = unique("old") + "-"
    dynamodb = emulator.client("dynamodb")
    without = {name: value for name, value in JOBS.definition(prefix).items() if name != "StreamSpecification"}
    dynamodb.create_table(**without)
    for _ in range(2):
        create_tables(dynamodb, prefix)
        described = dynamodb.describe_table(TableName=JOBS.name(prefix))["Table"]
        assert described["StreamSpecification"] == STREAM
    with moto_cloud() as cloud:
        described = cloud.dynamodb.describe_table(TableName=JOBS.name(cloud.prefix))["Table"]
        assert described["StreamSpecification"] == STREAM


@pytest.mark.parametrize("refusals", [(), (None, *["InternalFailure"] * 3), ("InternalFailure",) * 9])
def test_the_local_feed_hands_over_every_event_of_the_emulated_table(
    emulator: Emulator, refusals: tuple[str | None, ...]
) -> None:
    api = emulated_api(emulator)
    bus = FakeBus(*refusals)
    feed = StreamFeed(
        lambda event, _: publish(event["Records"], bus, FakeDeadLetters(), lambda _: None),
        emulator.client("dynamodbstreams"),
        stream_of(emulator.client("dynamodb"), api),
    )
    jobs = [api.submit(queue="fed")["id"] for _ in range(3)]
    feed.tick()
    for job in jobs:
        api.post(f"/job/{job}/pause").ok()
        api.post(f"/job/{job}/stop").ok()
    for _ in range(8):
        feed.tick()
    for job in jobs:
        told = [JobEvent.model_validate_json(entry.detail) for entry in bus.accepted if entry.job_id == job]
        firsts = list(dict.fromkeys((event.seq, event.type.value) for event in told))
        assert firsts == list(enumerate(api.events(job), start=1))
        assert {event.tenant for event in told} == {"acme"}
    assert feed.tick() == 0, "nothing is left"


def test_the_local_feed_outlives_a_publisher_that_fails(emulator: Emulator, caplog: pytest.LogCaptureFixture) -> None:
    api = emulated_api(emulator)
    handed: list[list[dict[str, Any]]] = []

    def fail_once(event: dict[str, Any], context: Any) -> dict[str, Any]:
        handed.append(event["Records"])
        if len(handed) == 1:
            raise RuntimeError(f"no {context.function_name}")
        return {"batchItemFailures": []}

    feed = StreamFeed(fail_once, emulator.client("dynamodbstreams"), stream_of(emulator.client("dynamodb"), api))
    api.submit()
    for _ in range(3):
        feed.tick()
    assert "no publisher" in caplog.text
    first, second = handed
    assert [record["dynamodb"]["SequenceNumber"] for record in first] == [
        record["dynamodb"]["SequenceNumber"] for record in second
    ]
    (record,) = second
    made = stream_record(1)
    assert set(record) == set(made) and set(record["dynamodb"]) == set(made["dynamodb"])
    assert isinstance(record["dynamodb"]["ApproximateCreationDateTime"], float)


def test_the_local_feed_goes_on_when_the_stream_is_away(emulator: Emulator, caplog: pytest.LogCaptureFixture) -> None:
    api = emulated_api(emulator)
    client = emulator.client("dynamodbstreams", retries={"total_max_attempts": 1})
    bus = FakeBus()
    feed = StreamFeed(
        lambda event, _: publish(event["Records"], bus, FakeDeadLetters(), no_wait),
        client,
        stream_of(emulator.client("dynamodb"), api),
    )
    api.submit(queue="one")
    feed.tick()
    client.meta.events.register("before-send.dynamodbstreams", _drop_once := _Once())
    api.submit(queue="two")
    feed.tick()
    assert _drop_once.dropped and "the stream cannot be read" in caplog.text
    feed.tick()
    assert len(bus.accepted) == 2, "each once"


class _Once:
    """Drop one request."""

    def __init__(self) -> None:
        self.dropped = False

    def __call__(self, **_: Any) -> None:
        if not self.dropped:
            self.dropped = True
            _drop()
