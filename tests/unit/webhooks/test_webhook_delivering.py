"""Test the delivery of one message (request, log, retry) and of a batch (order per job)."""

from __future__ import annotations

import json
import textwrap
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from baton.contract.admin.webhooks import DeliveryState
from baton.contract.jobs.events import JobEvent
from baton.contract.jobs.history import EventType
from functions.domain.errors import StorageUnavailable
from functions.domain.webhooks import BACKOFF_S, GIVE_UP_AFTER_S, WebhookTarget, backoff_s, signature
from functions.publishing.entries import entry_of
from functions.storage.stream import transition_of
from functions.webhooks.batch_consumer import consume_batch
from functions.webhooks.delivery import deliver
from functions.webhooks.event_queue import MAX_MESSAGE_BYTES, WEBHOOK_CACHE_S, QueuedEvent, Subscribers
from functions.webhooks.http_delivery import PostOutcome
from tests.kits.api.fakes import FakeLine
from tests.kits.api.stream_records import AT, OTHER_JOB, TENANT, stream_record
from tests.kits.api.webhooks import HOOK_ID, SECRET, line_record, make_event, make_webhook
from tests.twins.cloud import MemoryCloud

NOW = AT + 60
DOCUMENT = Path(__file__).parents[3] / "docs" / "webhooks.md"


class Wire:
    """Record requests, and answer each with the given outcome."""

    def __init__(self, outcome: PostOutcome) -> None:
        self.outcome = outcome
        self.posts: list[tuple[WebhookTarget, Mapping[str, str], bytes]] = []

    def __call__(self, target: WebhookTarget, headers: Mapping[str, str], body: bytes) -> PostOutcome:
        self.posts.append((target, headers, body))
        return self.outcome


@pytest.fixture
def cloud() -> MemoryCloud:
    made = MemoryCloud()
    made.webhooks.put(make_webhook())
    return made


def test_what_is_sent_is_the_event_signed(cloud: MemoryCloud) -> None:
    wire = Wire(PostOutcome(204))
    event = make_event(3, data={"step": 100})
    assert deliver(line_record(event), cloud.webhooks, wire, NOW) is None
    ((target, headers, body),) = wire.posts
    assert (target.host, target.path) == ("hooks.example.com", "/baton")
    assert JobEvent.model_validate_json(body) == event
    assert headers["baton-signature"] == signature(SECRET, NOW, body)
    assert (headers["baton-event-id"], headers["baton-event-type"]) == (event.id, "job.started")
    assert (headers["baton-webhook-id"], headers["content-type"]) == (HOOK_ID, "application/json")
    assert SECRET not in str(headers) + body.decode()
    (noted,) = cloud.webhooks.deliveries(HOOK_ID, limit=10).items
    assert (noted.state, noted.attempts, noted.status, noted.problem) == (DeliveryState.DELIVERED, 1, 204, "")


def recipe() -> Callable[[str, bytes, str], bool]:
    """Return the verification function of docs/webhooks.md."""
    text = DOCUMENT.read_text()
    code = textwrap.dedent(text[text.index("    import hmac, time") : text.index("`body` is the bytes")])
    names: dict[str, Any] = {}
    exec(code, names)
    checked: Callable[[str, bytes, str], bool] = names["is_ours"]
    return checked


def test_the_documented_check_knows_our_deliveries_from_others(
    cloud: MemoryCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = Wire(PostOutcome(204))
    deliver(line_record(make_event(3, data={"message": "grün"})), cloud.webhooks, wire, NOW)
    ((_, headers, body),) = wire.posts
    signed = headers["baton-signature"]
    is_ours = recipe()
    for now_s, fresh in ((NOW, True), (NOW + 299, True), (NOW - 299, True), (NOW + 300, False), (NOW - 300, False)):
        monkeypatch.setattr(time, "time", lambda at=now_s: at)
        assert is_ours(signed, body, SECRET) is fresh
    monkeypatch.setattr(time, "time", lambda: NOW)
    assert not is_ours(signed, body + b" ", SECRET)
    assert not is_ours(signed, body, SECRET + "x")
    later = signed.replace(f"t={NOW}", f"t={NOW + 1}")
    for forged in (later, "", "t=,v1=", f"t={NOW}", f"t={NOW},v1=", f"t={NOW},v1=ü", "v1=" + "0" * 64, "nonsense,,=="):
        assert is_ours(forged, body, SECRET) is False


def test_each_attempt_is_signed_anew_under_the_same_event(cloud: MemoryCloud) -> None:
    """A receiver bounds the age of the attempt, and recognizes repeats by the id of the event."""
    wire = Wire(PostOutcome(503, "answered 503"))
    for attempts, at in ((1, NOW), (2, NOW + 5), (9, NOW + 80_000)):
        deliver(line_record(attempts=attempts), cloud.webhooks, wire, at)
    sent = [(headers["baton-event-id"], headers["baton-signature"].partition(",")[0]) for _, headers, _ in wire.posts]
    assert sent == [(make_event().id, f"t={at}") for at in (NOW, NOW + 5, NOW + 80_000)]
    assert len({body for _, _, body in wire.posts}) == 1


@pytest.mark.parametrize("attempts", [1, 2, 7, 40])
def test_what_is_not_taken_comes_again_ever_later(cloud: MemoryCloud, attempts: int) -> None:
    wire = Wire(PostOutcome(503, "answered 503"))
    wait_s = deliver(line_record(attempts=attempts), cloud.webhooks, wire, NOW)
    assert wait_s == BACKOFF_S[min(attempts, len(BACKOFF_S)) - 1]
    (noted,) = cloud.webhooks.deliveries(HOOK_ID, limit=10).items
    assert (noted.state, noted.attempts, noted.status) == (DeliveryState.WAITING, attempts, 503)


@pytest.mark.parametrize(
    ("outcome", "age_s"),
    [
        (PostOutcome(503, "answered 503"), GIVE_UP_AFTER_S),
        (PostOutcome(problem="no answer"), GIVE_UP_AFTER_S + 1),
        (PostOutcome(410, "answered 410"), 0),
        (PostOutcome(problem="the host name resolves to a private address", forbidden=True), 0),
    ],
)
def test_it_is_given_up_after_a_day_or_when_nothing_will_help(
    cloud: MemoryCloud, outcome: PostOutcome, age_s: int
) -> None:
    assert deliver(line_record(sent_at=NOW - age_s), cloud.webhooks, Wire(outcome), NOW) is None
    (noted,) = cloud.webhooks.deliveries(HOOK_ID, limit=10).items
    assert (noted.state, noted.problem) == (DeliveryState.FAILED, outcome.problem)


def test_a_second_before_the_day_is_over_it_comes_again(cloud: MemoryCloud) -> None:
    record = line_record(sent_at=NOW - GIVE_UP_AFTER_S + 1)
    assert deliver(record, cloud.webhooks, Wire(PostOutcome(500, "answered 500")), NOW) is not None


def test_a_webhook_that_was_deleted_hears_nothing_more(cloud: MemoryCloud) -> None:
    cloud.webhooks.delete(TENANT, HOOK_ID)
    wire = Wire(PostOutcome(200))
    assert deliver(line_record(), cloud.webhooks, wire, NOW) is None
    assert wire.posts == []


def test_an_address_that_is_refused_today_is_not_tried(cloud: MemoryCloud) -> None:
    cloud.webhooks.put(make_webhook(url="http://127.0.0.1:8000/"))
    wire = Wire(PostOutcome(200))
    assert deliver(line_record(), cloud.webhooks, wire, NOW) is None
    assert wire.posts == []
    (noted,) = cloud.webhooks.deliveries(HOOK_ID, limit=10).items
    assert noted.state is DeliveryState.FAILED and "not https" in noted.problem
    assert deliver(line_record(), cloud.webhooks, wire, NOW, test_origin="http://127.0.0.1:8000") is None
    assert len(wire.posts) == 1, "but for the origin of a test"


def test_what_is_no_message_of_ours_is_a_fault(cloud: MemoryCloud) -> None:
    for body in ("", "{}", '{"tenant": "acme", "webhook_id": "a", "event": {}}'):
        with pytest.raises((ValueError, KeyError)):
            deliver({**line_record(), "body": body}, cloud.webhooks, Wire(PostOutcome(200)), NOW)


def test_a_message_keeps_the_event_and_fits_the_queue() -> None:
    event = make_event(data={"message": "grün ☃"})
    assert QueuedEvent.from_json(QueuedEvent("acme", HOOK_ID, event).as_json()) == QueuedEvent("acme", HOOK_ID, event)
    large = QueuedEvent("acme", HOOK_ID, make_event(data={"message": "x" * MAX_MESSAGE_BYTES}))
    assert len(large.as_json()) < 1000
    assert QueuedEvent.from_json(large.as_json()).event.data_omitted is True


@pytest.mark.parametrize("text", ["x", "ü", "☃", "\U0001f389", '"', "\n", "\x01", "\x7f"])
def test_no_message_is_larger_than_the_queue_takes_whatever_it_is_written_with(text: str) -> None:
    sizes = set()
    for length in (MAX_MESSAGE_BYTES // 12, MAX_MESSAGE_BYTES // 3, MAX_MESSAGE_BYTES - 800):
        waiting = QueuedEvent("acme", HOOK_ID, make_event(data={"message": text * (length // len(text.encode()))}))
        body = waiting.as_json()
        assert len(body.encode()) <= MAX_MESSAGE_BYTES and body.isascii(), "SQS refuses some characters"
        told = QueuedEvent.from_json(body).event
        assert told.data_omitted or told == waiting.event
        sizes.add(told.data_omitted)
    assert False in sizes


class Line:
    """A batch of messages with the result of each attempt by receipt; records attempts and postponements."""

    def __init__(self, **goes: int | None) -> None:
        self.goes = goes
        self.attempted: list[str] = []
        self.postponed: list[tuple[str, int]] = []

    def attempt(self, record: dict[str, Any]) -> int | None:
        self.attempted.append(record["receiptHandle"])
        return self.goes.get(record["receiptHandle"].replace("-", "_"))

    def serve(self, *records: dict[str, Any]) -> list[str]:
        answer = consume_batch(records, self.attempt, lambda receipt, wait_s: self.postponed.append((receipt, wait_s)))
        return [failure["itemIdentifier"] for failure in answer["batchItemFailures"]]


def test_behind_a_failed_delivery_nothing_of_its_group_is_tried_and_others_are() -> None:
    mine = [line_record(make_event(seq), place=seq) for seq in (1, 2, 3)]
    other = line_record(make_event(1, job_id=OTHER_JOB), place=9)
    line = Line(receipt_2=60)
    assert line.serve(*mine, other) == [mine[1]["messageId"], mine[2]["messageId"]]
    assert line.attempted == ["receipt-1", "receipt-2", "receipt-9"]
    assert line.postponed == [("receipt-2", 60)]


@pytest.mark.parametrize("attempts", [1, 3, 100])
def test_a_store_that_is_away_makes_the_message_come_again_ever_later(attempts: int) -> None:
    """An outage of hours would otherwise use up the receives after which SQS moves a message to the dead letters."""
    line = Line()

    def away(record: dict[str, Any]) -> int | None:
        raise StorageUnavailable("GetItem")

    line.attempt = away  # type: ignore[method-assign]
    record = line_record(attempts=attempts)
    assert line.serve(record) == [record["messageId"]]
    assert line.postponed == [("receipt-0", backoff_s(attempts))]


def told(cloud: MemoryCloud, line: FakeLine, at_s: float = 0.0) -> Subscribers:
    return Subscribers(cloud.webhooks, line, lambda: at_s)


def test_events_are_put_in_line_for_those_who_want_them() -> None:
    cloud, line = MemoryCloud(), FakeLine()
    for hook in (
        make_webhook(id="everything1"),
        make_webhook(id="completed1", types=[EventType.COMPLETED]),
        make_webhook(id="named00001", every_job=False),
        make_webhook(id="other00001", tenant="rival"),
    ):
        cloud.webhooks.put(hook)
    records = [
        stream_record(1),
        stream_record(2, type_=EventType.COMPLETED),
        stream_record(1, job_id=OTHER_JOB, webhook="named00001"),
    ]
    told(cloud, line).enqueue([entry_of(transition_of(record), place) for place, record in enumerate(records)])
    assert [(hook, event.job_id == OTHER_JOB, event.seq) for hook, event, _ in line.waiting] == [
        ("everything1", False, 1),
        ("completed1", False, 2),
        ("everything1", False, 2),
        ("everything1", True, 1),
        ("named00001", True, 1),
    ]


def test_webhooks_are_looked_up_once_a_minute() -> None:
    cloud, line, at = MemoryCloud(), FakeLine(), [0.0]
    subscribers = Subscribers(cloud.webhooks, line, lambda: at[0])
    entry = [entry_of(transition_of(stream_record(1)), 0)]
    subscribers.enqueue(entry)
    cloud.webhooks.put(make_webhook())
    subscribers.enqueue(entry)
    assert line.waiting == []
    at[0] += WEBHOOK_CACHE_S + 1
    subscribers.enqueue(entry)
    assert [json.loads(event.model_dump_json())["seq"] for _, event, _ in line.waiting] == [1]


def test_a_webhook_that_a_job_names_hears_of_it_from_its_first_event() -> None:
    cloud, line = MemoryCloud(), FakeLine()
    subscribers = told(cloud, line)
    subscribers.enqueue([entry_of(transition_of(stream_record(1)), 0)])
    cloud.webhooks.put(make_webhook(every_job=False))
    named = [entry_of(transition_of(stream_record(seq, job_id=OTHER_JOB, webhook=HOOK_ID)), 0) for seq in (1, 2)]
    subscribers.enqueue(named)
    assert [(hook, event.seq) for hook, event, _ in line.waiting] == [(HOOK_ID, 1), (HOOK_ID, 2)]
    cloud.webhooks.delete(TENANT, HOOK_ID)
    told(cloud, line).enqueue(named)
    assert len(line.waiting) == 2
